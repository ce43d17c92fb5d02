"""torch's process groups and meshes of devices beside a world, and parameters that are DTensors on them.

A DTensor is trained by its local part: a `Placed` has the rest of it, to make the DTensor again in a forward.
"""

import warnings
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from zero.errors import ConfigError


def ranks_of(group: Any) -> tuple[int, ...]:
    """Return the ranks of a process group of torch, or of a mesh of one dimension, in the group's order.

    Raises:
        ConfigError: `group` is neither, or this rank is not in it.
    """
    group = group.get_group() if _is_mesh(group) and group.ndim == 1 else group
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError("group does not have this rank. Pass a group with this rank on every rank.")
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            f"group is {type(group).__name__}: must be a process group of torch with this rank, or a mesh of one "
            "dimension."
        )
    return tuple(sorted(dist.get_process_group_ranks(group), key=lambda rank: dist.get_group_rank(group, rank)))


def check_started(rank: int, size: int) -> None:
    """Raise ConfigError unless torch's default process group has this `rank` of `size`, as the environment says."""
    if (dist.get_rank(), dist.get_world_size()) != (rank, size):
        raise ConfigError(
            f"torch's process group has rank {dist.get_rank()} of {dist.get_world_size()}, but RANK and WORLD_SIZE say "
            f"{rank} of {size}. Start with torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT."
        )


class Dimension(NamedTuple):
    """One dimension of a mesh, seen from this rank.

    Attributes:
        ranks: the ranks that differ from this rank in this dimension only.
        coordinates: this rank's index in each other dimension of more than one index.
        device: "cpu" or "cuda".
    """

    ranks: tuple[int, ...]
    coordinates: dict[str, int]
    device: str


def dimension_of(mesh: Any, name: str) -> Dimension:
    """Return a dimension of a mesh. For a part of a mesh, or a flattened one, coordinates are those in the whole mesh.

    Raises:
        ConfigError: `mesh` is not a mesh, has no such dimension, or does not have this rank.
    """
    if not _is_mesh(mesh):
        raise ConfigError(f"mesh is {type(mesh).__name__}: must be a DeviceMesh, from init_device_mesh.")
    with warnings.catch_warnings():  # torch warns of slicing a flattened dimension
        warnings.simplefilter("ignore")
        try:
            line = mesh if mesh.mesh_dim_names == (name,) else mesh[name]
        except (KeyError, RuntimeError):
            names = ", ".join(mesh.mesh_dim_names or ()) or "no names"
            raise ConfigError(f"mesh has no dimension named {name}: it has {names}. Name one of these.") from None
    ranks, whole = tuple(line.mesh.flatten().tolist()), line._get_root_mesh()
    if dist.get_rank() not in ranks:
        raise ConfigError(f"mesh does not have rank {dist.get_rank()}. Make it of all ranks of the run.")
    places = [(whole.mesh == rank).nonzero()[0].tolist() for rank in ranks]
    coordinates = {}
    for dimension, indices in zip(whole.mesh_dim_names, zip(*places, strict=True), strict=True):
        if dimension != name and len(set(indices)) == 1 and whole.size(whole.mesh_dim_names.index(dimension)) > 1:
            coordinates[dimension] = indices[0]
    return Dimension(ranks, coordinates, mesh.device_type)


def _is_mesh(value: object) -> bool:
    """Return whether a value is a DeviceMesh; compared by name, because torch imports meshes late."""
    return any(cls.__name__ == "DeviceMesh" for cls in type(value).__mro__)


# -- DTensors ----------------------------------------------------------------------------------------------------------


class Placed(NamedTuple):
    """The mesh, the placements, the shape and the strides of a DTensor parameter, without its values."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, parameter: Tensor) -> "Placed | None":
        """Return the placement of a parameter; None if it is no DTensor."""
        if not is_dtensor(parameter):
            return None
        made = cast(Any, parameter)
        stride = torch.empty(made.shape, device="meta").stride()  # gathered parts are contiguous
        return cls(made.device_mesh, tuple(made.placements), made.shape, stride)

    def wrap(self, local: Tensor) -> Tensor:
        """Return the DTensor whose local part on this rank is `local`, contiguous.

        The DTensor's gradient is brought to these placements before it becomes the gradient of `local`.
        """
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )

    @property
    def groups(self) -> list[tuple[tuple[int, ...], bool]]:
        """For each dimension of the mesh: the ranks of this rank's group, and whether they hold equal values."""
        return [
            (ranks_of(self.mesh.get_group(number)), placement.is_replicate())
            for number, placement in enumerate(self.placements)
        ]

    @property
    def is_partial(self) -> bool:
        """Whether its value is a sum over ranks."""
        return any(placement.is_partial() for placement in self.placements)


def is_dtensor(tensor: object) -> bool:
    """Return whether a tensor is a DTensor; compared by name, because importing DTensor takes almost a second."""
    return any(cls.__name__ == "DTensor" for cls in type(tensor).__mro__)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, without an autograd history; any other tensor as it is."""
    return cast(Tensor, cast(Any, tensor)._local_tensor) if is_dtensor(tensor) else tensor


def spec_of(dtensor: Tensor) -> Any:
    """Return all of a DTensor but its local part."""
    return cast(Any, dtensor)._spec


def with_spec(local: Tensor, spec: Any) -> Tensor:
    """Return the DTensor of a local part and a `spec_of`, without an autograd history."""
    from torch.distributed.tensor import DTensor

    return DTensor(local, spec, requires_grad=False)

"""The model beside other parallelism: which parameters are DTensors, and which of a norm group's ranks count each.

Ranks of a norm group hold different parts of the model. A parameter that is equal on all of them, such as a norm beside
matrices that are split, counts once in the sum of squares: on rank 0 of the group.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

from torch import nn

from zero.core import checks
from zero.core.optim import Transform
from zero.core.suggest import meant, some
from zero.distributed.mesh import Placed, local_part
from zero.distributed.world import World
from zero.engine.meta import is_meta
from zero.engine.model import Splitting
from zero.errors import PlanError


@dataclass(frozen=True)
class Beside:
    """The other parallelism beside a run.

    Attributes:
        groups: the worlds of `norm_groups`.
        placed: the placement of each parameter that was a DTensor, by name; the plan is for its local part.
        replicated: for each norm group, the names of parameters that are equal on all of its ranks.
    """

    groups: tuple[World, ...]
    placed: Mapping[str, Placed]
    replicated: Sequence[frozenset[str]]

    @cached_property
    def equal_over(self) -> dict[str, tuple[int, ...]]:
        """The name of a parameter -> the numbers of the norm groups on whose ranks it is equal."""
        return {
            name: tuple(number for number, equal in enumerate(self.replicated) if name in equal)
            for name in frozenset[str]().union(*self.replicated)
        }


def worlds_beside(world: World, norm_groups: object) -> tuple[World, ...]:
    """Return the worlds of norm groups. Collective among the ranks of each.

    Raises:
        PlanError: `norm_groups` is no list, has a world of another run, or has a group that shares further ranks with
            `world` or another group.
    """
    if not isinstance(norm_groups, list | tuple):
        raise PlanError(f"norm_groups is a {type(norm_groups).__name__}. Pass a list of groups: [group].")
    worlds = tuple(world.beside(group) for group in norm_groups)
    if any(other.whole is not world.whole for other in worlds):
        raise PlanError("norm_groups: a world was opened apart from the plan's. Pass torch's group or mesh instead.")
    for number, other in enumerate(worlds):
        for before in (world, *worlds[:number]):
            if len(shared := set(other.ranks) & set(before.ranks)) > 1:
                where = "the world" if before is world else "another group"
                raise PlanError(
                    f"norm_groups: ranks {', '.join(map(str, sorted(shared)))} are in {where}, too. Pass groups of "
                    "other dimensions only."
                )
    return worlds


def placements(model: nn.Module, world: World, norm_groups: Sequence[World]) -> dict[str, Placed]:
    """Return the placement of each parameter that is a DTensor, by name.

    Raises:
        PlanError: a DTensor is a sum over ranks, is on another device than `world`, or is split over ranks of `world`,
            or over ranks that are no norm group.
    """
    placed: dict[str, Placed] = {}
    for name, parameter in model.named_parameters():
        if (placement := Placed.of(parameter)) is None:
            continue
        placed[name] = placement
        where = f"parameter {name} is a DTensor"
        if placement.is_partial:
            raise PlanError(f"{where} of partial sums. Redistribute it to Shard or Replicate.")
        device = placement.mesh.device_type
        if not str(world.device).startswith(device):
            raise PlanError(f'{where} on {device}, but the world is on {world.device}. Open it with device="{device}".')
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise PlanError(f"{where} with a gradient hook. Register the hook after zero.init.")
        for ranks, replicated in placement.groups:
            others = set(ranks) - {world.ranks[world.rank]}
            if others & set(world.ranks):
                what, call = ("replicated", "distribute_module") if replicated else ("sharded", "fully_shard")
                has_dp = len(placement.groups) > 1 or set(ranks) != set(world.ranks)
                raise PlanError(
                    f"{where} that is {what} over ranks of the world already. Pass the model as it is before {call}"
                    + (', or open the world with zero.World.from_mesh(mesh, "dp").' if has_dp else ".")
                )
            if others and set(ranks) not in [set(group.ranks) for group in norm_groups]:
                raise PlanError(
                    f"{where} over ranks {', '.join(map(str, ranks))}, which are no group of norm_groups. Write a "
                    'loop with zero.Plan(..., norm_groups=[mesh["tp"]]), which zero.initialize does not have.'
                )
    return placed


def replicated_names(
    splitting: Splitting, placed: Mapping[str, Placed], norm_groups: Sequence[World], patterns: Sequence[str] | None
) -> list[frozenset[str]]:
    """Return, for each norm group, the names of the parameters that are equal on all of its ranks.

    Args:
        patterns: patterns of the names of equal parameters, DTensors over the group aside; None: all, if the model has
            DTensors.

    Raises:
        PlanError: a pattern matches no parameter.
    """
    if patterns is not None:
        patterns = checks.patterns("replicated", patterns, PlanError)
    if patterns and not norm_groups:
        raise PlanError("replicated is for the ranks of norm_groups. Write zero.Plan(..., norm_groups=[group]).")
    if patterns is None:
        patterns = ["*"] if placed else []
    equal, aliases = set[str](), splitting.aliases()
    for pattern in patterns:
        fitting = {first for first, names in aliases.items() if any(fnmatchcase(name, pattern) for name in names)}
        if not fitting:
            raise PlanError(f"replicated: no parameter is named {pattern}{meant(pattern, aliases) or '.'}")
        equal |= fitting

    def is_equal(name: str, group: World) -> bool:
        placements = placed[name].groups if name in placed else []
        over_group = [replicated for ranks, replicated in placements if set(ranks) == set(group.ranks)]
        return group.size == 1 or (all(over_group) if over_group else name in equal)

    return [frozenset(name for name in aliases if is_equal(name, group)) for group in norm_groups]


def check_matrices(splitting: Splitting, optimizer: Transform, placed: Mapping[str, Placed]) -> None:
    """Raise PlanError if this rank has a part of a matrix that is updated as a whole."""
    split = {name for name, placement in placed.items() if not all(is_equal for _, is_equal in placement.groups)}
    rule = optimizer.matrix_rule
    for unit in splitting.units if rule is not None else ():
        if unit.matrices and (parts := [slot.name for slot in unit.trainable.slots if slot.name in split]):
            assert rule is not None
            raise PlanError(
                f"{rule.title} updates whole matrices, and of {some(parts)} this rank has a part. Use zero.adamw."
            )


def refuse_equal_parts(model: nn.Module, replicated: Sequence[Collection[str]]) -> None:
    """Raise PlanError if parameters that ranks of a norm group split would be initialized alike on all of them."""
    equal = set.intersection(*map(set, replicated)) if replicated else set()
    named = model.named_parameters() if replicated else ()
    if split := [name for name, parameter in named if is_meta(local_part(parameter)) and name not in equal]:
        raise PlanError(
            f"{some(split)}: each rank of norm_groups has another part, but zero.init would make equal ones. Build the "
            "model with its values, pass weights=, or name parameters that are equal in replicated=[...]."
        )

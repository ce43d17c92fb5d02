"""The places of parameters in the modules of a model's sites, and the value to use at each place in a call."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from zero.distributed.mesh import Placed
from zero.engine.model import NOT_PLACED, Binding, ParameterPlaceholder, Site


class Place(NamedTuple):
    """The position of a parameter in a site's module.

    Attributes:
        owner: the path of the submodule that holds the parameter, relative to the site's module.
        parameters: that submodule's `_parameters`.
        name: the parameter's key in `parameters`.
        placeholder: the parameter itself.
    """

    owner: tuple[str, ...]
    parameters: dict[str, Any]
    name: str
    placeholder: ParameterPlaceholder

    def is_in(self, module: nn.Module) -> bool:
        """Return whether `module` still has a parameter at this place; users may exchange submodules."""
        for name in self.owner:
            part = module._modules.get(name)
            if part is None:
                return False
            module = part
        return module._parameters is self.parameters and self.parameters.get(self.name) is not None


class Places:
    """The places of all parameters, site by site in the order of the site's bindings.

    Args:
        placed: the placement of each parameter that was a DTensor, by its full name.
    """

    def __init__(self, placed: Mapping[str, Placed]) -> None:
        self._of: dict[str, list[Place]] = {}  # by the site's path
        self._placed = placed
        self._placed_of: dict[str, dict[str, Placed]] = {}  # by the site's path and the name in its `Body`

    def add(self, site: Site, bound: Binding, place: Place) -> None:
        """Add one place; call it in the order of the site's bindings."""
        self._of.setdefault(site.path, []).append(place)
        if (placed := self._placed.get(place.placeholder.full_name)) is not None:
            place.placeholder.is_part = True
            self._placed_of.setdefault(site.path, {})[f"module.{bound.local}"] = placed

    def placed(self, site: Site) -> Mapping[str, Placed]:
        """Return the placement of each parameter of `site` that was a DTensor, by its name in the site's `Body`."""
        return self._placed_of.get(site.path, NOT_PLACED)

    def names(self, site: Site) -> list[str]:
        """Return the full names of the site's parameters."""
        return [place.placeholder.full_name for place in self._of[site.path]]

    def is_in_full(self, site: Site) -> bool:
        """Return whether all parameters of `site` are in a block of `GatheredParameters`."""
        return all(place.placeholder.full_value is not None for place in self._of[site.path])

    @contextmanager
    def restored(self, site: Site) -> Iterator[None]:
        """Restore the site's places after the block, else the next call takes their contents for a user's tensors."""
        kept = [
            (parameters, name, parameters[name]) for _, parameters, name, _ in self._of[site.path] if name in parameters
        ]
        try:
            yield
        finally:
            for parameters, name, placeholder in kept:
                parameters[name] = placeholder

    def values(
        self, site: Site, module: nn.Module, gathered: Mapping[tuple[int, bool, int], Tensor]
    ) -> dict[str, Tensor]:
        """Return the site's parameters by their names in its `Body`, without those that the module has no more.

        Args:
            gathered: the gathered parameters by (unit, whether trainable, slot).
        """
        places = zip(site.bindings, self._of[site.path], strict=True)
        return {
            f"module.{bound.local}": _value_at(place, gathered.get((bound.unit, bound.trainable, bound.slot)))
            for bound, place in places
            if place.is_in(module)
        }


def _value_at(place: Place, gathered: Tensor | None) -> Tensor:
    """Return the value to use for the parameter at `place`.

    That is the tensor that the user put at the place, else the parameter's full value in a block of
    `GatheredParameters`, else its value in `gathered`.
    """
    there = place.parameters[place.name]
    if there is place.placeholder:
        full = place.placeholder.seen_in_full()
        return cast(Tensor, gathered) if full is None else full
    return there.value() if isinstance(there, ParameterPlaceholder) else cast(Tensor, there)

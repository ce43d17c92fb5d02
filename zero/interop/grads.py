"""What `parameter.grad` is between backward and step: the mean over the global batch, whole, and open to edits.

Below stage 2 every rank holds gradients, or gathers them, so there it can be read as in torch; what a script writes
into it, such as a bound, counts. From stage 2 on nobody wants to hold whole gradients, and the answer says so.
"""

import weakref
from collections.abc import Mapping

import torch
from torch import Tensor

from zero.errors import ConfigError
from zero.full import Source, get_full, set_full


class Grads:
    """Gradients that were given out, until the next backward or the update takes them back.

    Args:
        engine: whose step is under way; not kept alive.
    """

    def __init__(self, engine: Source) -> None:
        self._engine = weakref.ref(engine)
        self._given: dict[str, tuple[Tensor, Tensor]] = {}

    def of(self, name: str) -> Tensor | None:
        """(shape of the parameter) fp32, on the device; the same tensor until it is taken back. Collective.

        Raises:
            ConfigError: gradients are sharded.
        """
        engine = self._living()
        plan = engine.state.plan
        if not any(slot.name == name for unit in plan.units for slot in unit.trainable.slots):
            return None
        if plan.stage.gradients:
            raise ConfigError(
                f"{name}.grad: stage {plan.stage.level} shards gradients, and none is whole; read one with "
                "zero.get_full(engine, name, kind='grad'), write it with zero.set_full or in a hook of the parameter"
            )
        if name not in self._given:
            whole = get_full(engine, name, kind="grad").to(plan.world.device)
            self._given[name] = whole, whole.clone()
        return self._given[name][0]

    def take_back(self) -> None:
        """What was edited since it was given out counts. Collective where something was."""
        given, self._given = self._given, {}
        for name, value in _edited(given).items():
            set_full(self._living(), name, value, kind="grad")

    def drop(self) -> None:
        self._given.clear()

    def _living(self) -> Source:
        engine = self._engine()
        assert engine is not None, "an engine outlives its own gradients"
        return engine


def _edited(given: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    return {name: now for name, (now, before) in given.items() if not torch.equal(now, before)}

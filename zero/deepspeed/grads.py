"""What `parameter.grad` is between backward and step: the mean over the global batch, whole, and open to edits.

Below stage 2 every rank holds gradients, or gathers them, so there it can be read as in torch; what a script writes
into it, such as a bound, counts. From stage 2 on nobody wants to hold whole gradients, and the answer says so.
"""

import weakref
from collections.abc import Mapping

import torch
from torch import Tensor

from zero.engine.full import Source, get_full, set_full
from zero.errors import ConfigError


class Grads:
    """Gradients that were given out, until the next backward or the update takes them back.

    Args:
        engine: whose step is under way; not kept alive.
    """

    def __init__(self, engine: Source) -> None:
        self._engine = weakref.ref(engine)
        self._given: dict[str, tuple[Tensor, Tensor]] = {}
        self._outdated: list[tuple[str, weakref.ref[Tensor], Tensor]] = []  # somebody holds them still

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
        """What was edited since it was given out counts. Collective where something was.

        Raises:
            ConfigError: one was edited that another backward has made outdated.
        """
        for name, held, before in self._outdated:
            if (now := held()) is not None and not torch.equal(now, before):
                raise ConfigError(
                    f"a {name}.grad that was read before another backward was edited, and it is a copy of what there "
                    "was then; read it again"
                )
        edited = _edited(self._given)
        self._outdate()
        for name, value in edited.items():
            set_full(self._living(), name, value, kind="grad")

    def arriving(self) -> None:
        """More of a gradient arrives, by a backward that has not taken back what was given out.

        Raises:
            ConfigError: it was edited.
        """
        for name in _edited(self._given):
            raise ConfigError(
                f"{name}.grad was edited, and then came a backward that does not know; between edits use "
                "engine.backward(loss), or engine.scale(loss).backward()"
            )
        self._outdate()

    def drop(self) -> None:
        self._given.clear()
        self._outdated.clear()

    def _outdate(self) -> None:
        given = [(name, weakref.ref(now)) for name, (now, _) in self._given.items()]
        self._given.clear()  # who holds one now is not here
        self._outdated += [(name, ref, now.clone()) for name, ref in given if (now := ref()) is not None]

    def _living(self) -> Source:
        engine = self._engine()
        assert engine is not None, "an engine outlives its own gradients"
        return engine


def _edited(given: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    return {name: now for name, (now, before) in given.items() if not torch.equal(now, before)}

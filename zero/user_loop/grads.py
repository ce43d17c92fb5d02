"""The attribute `grad` of an engine's parameters, whose gradients the engine holds."""

import weakref

import torch
from torch import Tensor

from zero.engine.whole import Source, get_full, set_full
from zero.errors import ConfigError
from zero.platform.modes import unobserved


class Grads:
    """Values of `parameter.grad` between backward and step: full means over the global batch, which may be edited.

    Below stage 2 every rank holds or gathers full gradients, so scripts read and write them as in torch. From stage 2
    on no rank has full gradients, and reading one raises an error.

    Args:
        engine: the engine that holds the gradients; referenced weakly.
    """

    def __init__(self, engine: Source) -> None:
        self._engine: Source = weakref.proxy(engine)
        self._read: dict[str, tuple[Tensor, Tensor]] = {}  # each with a copy, to detect edits
        self._outdated: list[tuple[str, weakref.ref[Tensor], Tensor]] = []  # read before another backward, still alive

    def of(self, name: str) -> Tensor | None:
        """Return (shape of the parameter) the fp32 gradient on the device; None if it is not trained. Collective.

        Every call until the next backward returns the same tensor.

        Raises:
            ConfigError: gradients are sharded.
        """
        plan = self._engine.state.plan
        if not is_trained(self._engine, name):
            return None
        if plan.facts.stage.gradients:
            raise ConfigError(
                f"{name}.grad: stage {plan.facts.stage.level} shards gradients, and no rank has a full one. Clip with "
                "gradient_clipping and scale with fp16 in the config, read with zero.get_full(engine, name, "
                "kind='grad'), write with zero.set_full or in a hook of the parameter."
            )
        if name not in self._read:
            full = get_full(self._engine, name, kind="grad").to(plan.world.device)
            self._read[name] = full, full.clone()
        return self._read[name][0]

    @unobserved()
    def take_back(self) -> None:
        """Write the script's edits of gradients into the engine's gradients. Collective if there are edits.

        Raises:
            ConfigError: a tensor that was read before another backward was edited after it.
        """
        for name, tensor, before in self._outdated:
            if (now := tensor()) is not None and not torch.equal(now, before):
                raise ConfigError(
                    f"{name}.grad was edited after another backward. Read {name}.grad again and edit that."
                )
        edited = self._edited()
        self._outdate()
        for name, value in edited.items():
            set_full(self._engine, name, value, kind="grad")

    @unobserved()
    def arriving(self) -> None:
        """Mark gradients that were read as outdated, because the script's `loss.backward()` adds to them.

        Raises:
            ConfigError: a gradient was edited, because the edit would be lost.
        """
        for name in self._edited():
            raise ConfigError(
                f"{name}.grad was edited, and loss.backward() would lose the edit. Use engine.backward(loss), or "
                "engine.scale(loss).backward()."
            )
        self._outdate()

    def drop(self) -> None:
        """Drop all gradients that were read, and the script's edits of them."""
        self._read.clear()
        self._outdated.clear()

    def _outdate(self) -> None:
        tensors = [(name, weakref.ref(now)) for name, (now, _) in self._read.items()]
        self._read.clear()  # a tensor that is alive after this belongs to the script
        self._outdated += [(name, ref, now.clone()) for name, ref in tensors if (now := ref()) is not None]

    def _edited(self) -> dict[str, Tensor]:
        return {name: now for name, (now, before) in self._read.items() if not torch.equal(now, before)}


def is_trained(engine: Source, name: str) -> bool:
    """Return whether an optimizer trains the parameter `name`."""
    return any(slot.name == name for unit in engine.state.plan.units for slot in unit.trainable.slots)

"""What becomes of the model that the user passed.

Its values are rank 0's; they are taken over, and what is left of them reads as NaN. Which of its parameters require a
gradient, and which of its modules train, stays in force: the engine's copy follows.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from zero.copied import buffers_of
from zero.errors import ConfigError
from zero.initialise import Weights
from zero.world import World


class Modes:
    """Has a copy follow its original's `training` flags: `model.eval()` means the model that computes."""

    def __init__(self, original: nn.Module, copied: nn.Module) -> None:
        ours = dict(copied.named_modules())
        self._pairs = [(one, ours[name]) for name, one in original.named_modules()]
        self._seen = [one.training for one, _ in self._pairs]

    def follow(self) -> None:
        """Pass on what was changed on the original since the last time."""
        now = [one.training for one, _ in self._pairs]
        if now != self._seen:
            for (_, copy), flag, before in zip(self._pairs, now, self._seen, strict=True):
                if flag != before:
                    copy.training = flag
            self._seen = now

    def set(self, mode: bool) -> None:
        """Both, as `Module.train` does."""
        for number, (one, copy) in enumerate(self._pairs):
            one.training = copy.training = self._seen[number] = mode


@contextmanager
def training_only(model: nn.Module, chosen: set[int]) -> Iterator[None]:
    """Inside, parameters that no optimizer was given do not require a gradient."""
    others = [one for one in model.parameters() if one.requires_grad and id(one) not in chosen]
    for one in others:
        one.requires_grad_(False)
    try:
        yield
    finally:
        for one in others:
            one.requires_grad_(True)


def rank_0(model: nn.Module, world: World) -> Weights:
    """Rank 0's values, one parameter at a time; None where the model has none yet."""
    held = dict(model.named_parameters())
    if any(one.numel() > 1 and not any(one.stride()) and bool(one.isnan().all()) for one in held.values()):
        raise ConfigError("the model's values were released by an earlier zero.initialize; build it again")
    if any(parameter.is_meta for parameter in held.values()):
        return None

    def fill(name: str, tensor: Tensor) -> None:
        tensor.copy_(held[name].detach())
        world.broadcast(tensor, what=f"first values of {name}").wait()

    return fill


def share_buffers(copied: nn.Module, world: World) -> None:
    """Give every rank rank 0's buffers."""
    for name, buffer in buffers_of(copied).items():
        whole = buffer.contiguous()
        world.broadcast(whole, what=f"buffer {name}").wait()
        if not torch.equal(whole, buffer):
            buffer.copy_(whole)


def release(model: nn.Module) -> None:
    """Free the values of the user's model. What is left of them reads as NaN, so that nobody computes with them."""
    for parameter in model.parameters():
        if not parameter.is_meta:
            nothing = torch.full((), float("nan"), dtype=parameter.dtype, device=parameter.device)
            parameter.data = nothing.expand(parameter.shape)

"""The losses of a step on one rank: means over microbatches, or sums over tokens with the number of tokens.

The mean of means is wrong where microbatches have different numbers of tokens, as rows with masks do. With sums the
step divides by the tokens of all microbatches and ranks, which it knows at its end only: they are exchanged with the
norm.
"""

import functools
import operator
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from zero.core.precision import Precision
from zero.engine.arguments import is_count
from zero.errors import ConfigError

MEAN_LOSSES, SUM_LOSSES = 1, 2
"""Bits of the kinds of losses that a rank has counted in a step."""

FP16_DIVISOR = 2.0**12
"""In fp16, backward begins from a sum divided by this, so that gradients do not overflow: a power of two, which changes
no digit, near the tokens of a microbatch, because loss scales are made for means."""


class StepLosses:
    """The losses of one step, and further numbers.

    Attributes:
        kinds: bits of `MEAN_LOSSES` and `SUM_LOSSES`.
    """

    def __init__(self) -> None:
        self._of_microbatch = list[list[Tensor]]()
        self.forget()

    def begin_microbatch(self) -> None:
        """Begin a microbatch; its losses add up."""
        self._of_microbatch.append([])

    def add(self, loss: Tensor, aux: Mapping[str, Tensor], tokens: int | Tensor | None) -> None:
        """Count a loss with its further numbers.

        Args:
            loss: () a mean, or the sum over `tokens`.
            aux: 0-dim tensors by name.
            tokens: the number of tokens of a sum, see `checked_tokens`; None: `loss` is a mean.
        """
        self._of_microbatch[-1].append(loss.detach().double())
        self.kinds |= MEAN_LOSSES if tokens is None else SUM_LOSSES
        if tokens is not None:
            self._tokens.append(tokens)
        for name, number in aux.items():
            self._aux.setdefault(name, []).append(number.double())

    def forget(self) -> None:
        """Drop the losses so far. Microbatches that have begun go on."""
        self._of_microbatch = [[] for _ in self._of_microbatch]
        self._tokens, self._aux = list[int | Tensor](), dict[str, list[Tensor]]()
        self.kinds = 0

    @property
    def names(self) -> list[str]:
        """The names of the further numbers, sorted."""
        return sorted(self._aux)

    def numbers(self, accumulate: int, zero: Tensor) -> list[Tensor]:
        """Return the loss of this rank, its tokens, and the means of further numbers: 0-dim fp64 on the device.

        Args:
            accumulate: the number of microbatches of a step, by which the sum of means is divided.
            zero: 0, 0-dim fp64 on the device.
        """
        sums = [torch.stack(losses).sum() for losses in self._of_microbatch if losses]
        loss = torch.stack(sums).sum() if sums else zero / 0
        on_device = [tokens for tokens in self._tokens if isinstance(tokens, Tensor)]
        known = sum(tokens for tokens in self._tokens if isinstance(tokens, int))
        tokens = zero.new_full((), known) if known else zero  # launches a kernel; an upload would wait for the copy
        for more in on_device:
            tokens = tokens + more.to(zero)
        means = (torch.stack(self._aux[name]).mean() for name in self.names)
        mean = loss / accumulate if self.kinds != SUM_LOSSES else loss
        return [number.to(zero.device) for number in (mean, tokens, *means)]


def divisor_per_token(precision: Precision, scale: float) -> float:
    """Return the divisor of the sum of gradients for each token of losses that are sums.

    Args:
        scale: the loss scale.
    """
    return scale / FP16_DIVISOR if precision.compute == torch.float16 else scale


def checked_tokens(tokens: object) -> int | Tensor:
    """Return the number of tokens that the caller counted.

    Raises:
        ConfigError: it is neither an int of at least 0, nor a tensor of integers without dimensions.
    """
    if not is_count(tokens):
        shown = f"{tokens.dtype} of shape {tuple(tokens.shape)}" if isinstance(tokens, Tensor) else f"{tokens!r:.40}"
        raise ConfigError(
            f"count={shown} is no number of tokens. Pass an int of at least 0, or an integer without dimensions, such "
            "as (targets != -100).sum()"
        )
    assert isinstance(tokens, int | Tensor)
    return tokens.detach() if isinstance(tokens, Tensor) else tokens


def mean_of(losses: Sequence[float], tokens: Sequence[float], kinds: Sequence[int]) -> tuple[float, float]:
    """Return the loss of all ranks, and the number of its tokens (0 for means).

    Args:
        losses, tokens, kinds: of each rank.
    """
    if SUM_LOSSES not in kinds:
        return sum(losses) / len(losses), 0.0
    total = sum(tokens)
    loss = sum(loss for loss, kind in zip(losses, kinds, strict=True) if kind)  # a rank may have had no loss
    return (loss / total if total else float("nan")), total


def check_kinds(kinds: Sequence[int]) -> None:
    """Raise ConfigError if some losses of a step are means and others sums."""
    if functools.reduce(operator.or_, kinds) == MEAN_LOSSES | SUM_LOSSES:
        raise ConfigError(
            "some losses of this step are means and others come with a count. Return (sum, count) for all microbatches "
            "on all ranks, or none."
        )

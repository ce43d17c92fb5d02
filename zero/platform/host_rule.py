"""The rule of an optimizer for a GPU's kernel, on tensors in host memory: the same operations in the same order.

So an update by the host has the bits of one by the GPU, and a plan may split pages between both. Each operation rounds
once, as the kernel's do. torch's fused optimizers contract products and sums, each build of them in its own way.

Results are in buffers that the thread uses again: new memory would cost more than the arithmetic, in page faults.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor

from zero.core.fused import FIRST_OF_RULE, row
from zero.core.optim import Fused
from zero.core.tile import bound
from zero.core.updates import AVERAGE, INVERSE, GroupSettings, PageBatch
from zero.errors import ConfigError

RULE_NUMEL = 32 * 1024
"""Elements that are updated at a time. A rule has about eight results of 128 KiB, so they stay in a cache of 2 MiB."""


class _Buffers(threading.local):
    """The free buffers of one thread, each with `RULE_NUMEL` elements, by dtype."""

    def __init__(self) -> None:
        self.free: dict[torch.dtype, list[Tensor]] = defaultdict(list)


buffers = _Buffers()


def _result(function: Callable[..., Any]) -> Callable[..., "_Block"]:
    """Return an elementwise function as a method of blocks; a comparison results in 0.0 and 1.0."""

    def result(block: "_Block", other: "_Block | Tensor | float") -> "_Block":
        made = _Block.like(block)
        function(block.values, other.values if isinstance(other, _Block) else other, out=made.values)
        return made

    return result


class _Block:
    """A block of numbers, as rules use it. Its buffer is free again when nothing refers to the block.

    Args:
        buffer: the buffer of which `values` is the beginning; None if `values` is a page.
    """

    def __init__(self, values: Tensor, buffer: Tensor | None = None) -> None:
        self.values, self._buffer = values, buffer

    @classmethod
    def like(cls, block: "_Block", dtype: torch.dtype = torch.float32) -> "_Block":
        """Return a block of undefined numbers."""
        free = buffers.free[dtype]
        buffer = free.pop() if free else block.values.new_empty(RULE_NUMEL, dtype=dtype)
        return cls(buffer[: block.values.numel()], buffer)

    def __del__(self) -> None:
        if self._buffer is not None:
            buffers.free[self._buffer.dtype].append(self._buffer)

    __add__ = __radd__ = _result(torch.add)
    __mul__ = __rmul__ = _result(torch.mul)
    __sub__, __gt__, __lt__ = _result(torch.sub), _result(torch.gt), _result(torch.lt)
    __ge__, __le__ = _result(torch.ge), _result(torch.le)

    def __eq__(self, other: object) -> Any:
        return _result(torch.eq)(self, cast(Any, other))

    def __ne__(self, other: object) -> Any:
        return _result(torch.ne)(self, cast(Any, other))

    def __neg__(self) -> "_Block":
        return self * -1.0

    def __rsub__(self, other: "Tensor | float") -> "_Block":
        return -self + other

    def __bool__(self) -> bool:
        raise ConfigError("the optimizer's rule branches on a tile. Write tl.where(condition, yes, no).")

    def to(self, _: object) -> "_Block":
        """Return the block: it has numbers in fp32, also as a result of a comparison."""
        return self


class _Numbers:
    """A pointer into a group's numbers, as rules use it."""

    def __init__(self, numbers: Sequence[Tensor], first: int) -> None:
        self._numbers, self._first = numbers, first

    def __add__(self, count: int) -> "_Numbers":
        return _Numbers(self._numbers, self._first + count)

    def load(self) -> Tensor:
        return self._numbers[self._first]


class _Language:
    """The functions of `triton.language` that rules may use on the host."""

    float32 = torch.float32
    load = staticmethod(_Numbers.load)
    div_rn = staticmethod(_result(torch.div))

    @staticmethod
    def where(condition: Any, yes: Any, no: Any) -> Any:
        """Return `yes` where the condition is true: for each element, or for all if it compares a group's number."""
        if not isinstance(condition, _Block):
            return yes if condition else no
        made, (there, elsewhere) = _Block.like(condition), (x.values if isinstance(x, _Block) else x for x in (yes, no))
        made.values.copy_(torch.where(condition.values != 0, there, elsewhere))
        return made

    @staticmethod
    def sqrt_rn(square: _Block) -> _Block:
        """Return the nearest roots: fp32 roots of torch on a CPU are not always the nearest, but fp64 ones, rounded."""
        wide, root = _Block.like(square, torch.float64), _Block.like(square)
        root.values.copy_(wide.values.copy_(square.values).sqrt_())
        return root

    def __getattr__(self, name: str) -> Any:
        raise ConfigError(f"tl.{name} of the optimizer's rule exists on a GPU only. Set offload.compute=device.")


@cache
def _on_blocks(tile: Callable[..., Any]) -> Callable[..., Any]:
    return cast(Callable[..., Any], bound(cast(FunctionType, tile), _Language(), lambda function: function))


@lru_cache(256)
def _numbers(fused: Fused, now: GroupSettings, divisor: float) -> tuple[Tensor, ...]:
    return torch.tensor(row(fused, now, divisor), dtype=torch.float32, device="cpu").unbind()


def update_on_host(fused: Fused, batch: PageBatch) -> None:
    """Update pages in host memory as the kernel updates pages on a GPU, to the bit.

    Raises:
        ConfigError: the rule uses a function of Triton's that is not defined here.
    """
    numbers, rule = _numbers(fused, batch.settings, batch.divisor), _on_blocks(fused.tile)
    for pages in zip(batch.params, batch.grads, *batch.moments, strict=True):
        for param, grad, *moments in zip(*(page.split(RULE_NUMEL) for page in pages), strict=True):
            means = [moments.pop()] if fused.average is not None else []
            results = rule(
                _Block(param), _Block(grad) * numbers[INVERSE], _Numbers(numbers, FIRST_OF_RULE), *map(_Block, moments)
            )
            changed = (param, *moments)
            values = [block.values for block in (results if moments else (results,))]
            # a result may be a page, which must not change before it is copied
            values = [value.clone() if any(value is page for page in changed) else value for value in values]
            for page, value in zip(changed, values, strict=True):
                page.copy_(value)
            for mean in means:
                mean.mul_(numbers[AVERAGE]).add_(param * numbers[AVERAGE + 1])

"""The memory and work of operators on meta tensors, counted while a model runs.

Every new storage is counted while it exists. Memory that a kernel allocates for itself is not counted.
"""

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from operator import add
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zero.trainer.planning.traces.shapes import operand_tensors, result_of

aten = torch.ops.aten


class OperatorWork(NamedTuple):
    """Work of operators, divided into parts that a machine does at different rates."""

    flops: float = 0
    """Floating point operations of matrix products."""
    attention_flops: float = 0
    """Floating point operations of fused attention, as if nothing were masked."""
    nbytes: float = 0
    """Bytes read and written by all other operators."""
    launches: float = 0
    """Number of operators, without those that only make views."""
    exchanged_bytes: float = 0
    """Bytes received from the ranks that share rows."""

    def __add__(self, other: object) -> "OperatorWork":
        assert isinstance(other, OperatorWork)
        return OperatorWork(*map(add, self, other))

    def times(self, factor: float) -> "OperatorWork":
        """Return the work `factor` times."""
        return OperatorWork(*(factor * part for part in self))


class Product(NamedTuple):
    """A matrix product (batch, m, k) x (batch, k, n)."""

    batch: int
    m: int
    k: int
    n: int
    turned: tuple[bool, bool]
    """Whether each factor is stored column by column (column-major)."""

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.m * self.k * self.n

    def shortened(self, flops: float) -> "Product":
        """Return the product with its longest sides halved until at most `flops` operations are left."""
        if self.flops <= max(flops, 2.0):
            return self
        side = max(("batch", "m", "k", "n"), key=lambda name: getattr(self, name))
        return self._replace(**{side: -(-getattr(self, side) // 2)}).shortened(flops)


class Lap(NamedTuple):
    """The bytes and the work of a part of a trace."""

    net_bytes: int
    """Growth of the bytes that exist."""
    rise_bytes: int
    """Growth from the beginning to the peak."""
    work: OperatorWork
    products: Counter[Product]
    made: Counter[int]
    others: tuple[int, ...]
    """Growth of the counts of the caller."""


class OperatorCounts(TorchDispatchMode):
    """A dispatch mode that counts the bytes of storages while they exist, and the work of operators.

    Args:
        known: tensors whose storages are not counted.

    Attributes:
        peak_bytes: the most bytes that existed at once.
        work: work so far; the caller resets it to count forward and backward separately.
        products, attention: see `Traced`.
        made: bytes that operators other than products and attention read and write, by the size of their results.
    """

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._held = known  # keeps them alive, because an address identifies a storage only while it exists
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._live_bytes = self.peak_bytes = 0
        self.work, self._times = OperatorWork(), 1
        self.products: Counter[Product] = Counter()
        self.attention: tuple[int, ...] | None = None
        self.made: Counter[int] = Counter()
        self.operators = 0
        self._highest_bytes = 0
        self._began = 0, OperatorWork(), Counter[Product](), Counter[int](), tuple[int, ...]()

    def lap(self, others: tuple[int, ...]) -> Lap:
        """Return what the part since the last call of `lap` took, and begin the next one.

        Args:
            others: further counts, as many in each call.
        """
        live_bytes, work, products, made, before = self._began
        self._began = self._live_bytes, self.work, self.products.copy(), self.made.copy(), others
        rise_bytes, self._highest_bytes = self._highest_bytes - live_bytes, self._live_bytes
        return Lap(
            self._live_bytes - live_bytes,
            rise_bytes,
            self.work + work.times(-1),
            self.products - products,
            self.made - made,
            tuple(now - then for now, then in zip(others, before, strict=False)),
        )

    def repeat(self, lap: Lap) -> None:
        """Count a part once more that does not run."""
        self._raise_peak(self._live_bytes + lap.rise_bytes)
        self._live_bytes += lap.net_bytes
        self.work += lap.work
        self.products += lap.products
        self.made += lap.made

    @contextmanager
    def repeated(self, times: int) -> Iterator[None]:
        """Count the work of the operators in the body `times` times."""
        self._times = times
        try:
            yield
        finally:
            self._times = 1

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would make torch import its compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        made = result_of(func, args, kwargs or {})
        results = [*operand_tensors((made,))]
        for tensor in results:
            self._add(tensor.untyped_storage())
        self._count(func, args, results)
        return made

    def _count(self, func: Any, args: Any, results: list[Tensor]) -> None:
        """Add an operator to the work. Of a look-up the table is not counted."""
        if func.is_view or func.overloadpacket in _FREE:
            return
        if product := _product(func, args):
            self.products[product] += self._times
            work = OperatorWork(flops=product.flops, launches=1)
        elif func in _ATTENTION:
            times, query, key = _ATTENTION[func]
            self.attention = tuple(args[query].shape)
            work = OperatorWork(attention_flops=times * args[query].numel() * args[key].shape[-2], launches=1)
        else:
            read = operand_tensors(args[1:] if func.overloadpacket in _LOOKUPS else args)
            nbytes = sum(tensor.nbytes for tensor in (*results, *read))
            self.made[max((tensor.numel() for tensor in results), default=0)] += nbytes * self._times
            work = OperatorWork(nbytes=nbytes, launches=1)
        self.work += work if self._times == 1 else work.times(self._times)

    def _add(self, storage: Any) -> None:
        address, nbytes = storage._cdata, storage.nbytes()
        if address in self._alive or address in self._known:
            return

        def freed(_: Any) -> None:
            del self._alive[address]
            self._live_bytes -= nbytes

        self._alive[address] = weakref.ref(storage, freed)
        self._live_bytes += nbytes
        self._raise_peak(self._live_bytes)

    def _raise_peak(self, nbytes: int) -> None:
        self.peak_bytes, self._highest_bytes = max(self.peak_bytes, nbytes), max(self._highest_bytes, nbytes)


def _product(func: Any, args: Any) -> Product | None:
    if func in (aten.mm.default, aten.mm.out, aten.bmm.default):
        a, b = args[:2]
    elif func in (aten.addmm.default, aten.baddbmm.default):
        a, b = args[1:3]
    else:
        return None
    turned = a.stride(-1) > a.stride(-2), b.stride(-1) > b.stride(-2)
    return Product(a.shape[0] if a.ndim == 3 else 1, a.shape[-2], a.shape[-1], b.shape[-1], turned)


def median(made: Mapping[int, int]) -> int:
    """Return the median of sizes (numbers of elements), weighted by bytes."""
    left = sum(made.values()) / 2
    for numel, nbytes in sorted(made.items(), reverse=True):
        left -= nbytes
        if left <= 0:
            return numel
    return 0


_FREE = {aten.empty, aten.empty_strided, aten.empty_like, aten.new_empty, aten.new_empty_strided, aten._unsafe_view}
_FREE |= {aten.detach, aten._local_scalar_dense}

_LOOKUPS = {aten.embedding, aten.gather, aten.index, aten.index_select}

_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: (4.0, 0, 1),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (10.0, 1, 2),
}
"""Operations per element of the query and per key, and the argument positions of query and key, by kernel."""

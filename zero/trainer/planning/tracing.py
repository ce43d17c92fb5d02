"""Peak activation bytes and work of one microbatch, found by running forward and backward on meta tensors.

Meta tensors have a shape and no memory. The model runs once, with the same calls of units as in the engine: the sites
of the plan, and the engine's own recomputation. Each parameter's gradient is dropped as soon as it is computed, because
the engine copies it into a flat tensor that is counted elsewhere. Every new storage is counted while it exists.
Parameters are not counted, because the engine's saved-tensor hooks do not keep them.

Memory that a kernel allocates for itself is not counted. Attention is traced with the CPU's fused kernel, which saves
the same tensors as the fused kernels of GPUs: inputs, output, and one number per row.
"""

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zero.core.setting_types import RECOMPUTED, Activations
from zero.engine.forward import recomputed_call
from zero.engine.memory import Kept, OnHost
from zero.engine.model import Body, Site, Splitting, attach, move_buffers
from zero.platform.device import Device
from zero.trainer.planning.shapes import result_of

aten = torch.ops.aten

META = torch.device("meta")

AT_ONCE = 2**62
"""A sequence number that makes autograd run a node as soon as it is ready, because it runs the largest number first."""


class Work(NamedTuple):
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

    def __add__(self, other: object) -> "Work":
        assert isinstance(other, Work)
        return Work(*(a + b for a, b in zip(self, other, strict=True)))


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


class Traced(NamedTuple):
    """Memory and work of one microbatch."""

    peak_bytes: int
    """The most bytes that forward and backward hold at once."""
    host_bytes: int
    """Host memory for offloaded activations."""
    forward: Work
    backward: Work
    """Work of backward, including recomputation."""
    products: Mapping[Product, int]
    """Each product and how often it is computed."""
    attention: tuple[int, ...] | None
    """Shape of a query: rows, heads, tokens and channels; None without fused attention."""
    elementwise_numel: int
    """Median number of elements in results of operators other than products and attention, weighted by their bytes."""


def trace(
    model: nn.Module,
    splitting: Splitting,
    loss: Callable[[nn.Module, Any], Any],
    microbatch: Any,
    *,
    compute: torch.dtype,
    policies: Activations | Mapping[str, Activations] = "keep",
    backward: bool = True,
    exchanged: Callable[[], int] = lambda: 0,
) -> Traced:
    """Return the memory and work of one microbatch.

    Args:
        model: a module with parameters on any device; it is copied, never changed.
        splitting: the sites of the model; its units may be others than those of the plan.
        loss: maps (model, microbatch) to a scalar, or to a tuple that begins with a scalar.
        microbatch: meta tensors, of the shapes that training has.
        compute: dtype of the parameters.
        policies: the activation policy of all sites, or of each site by its name.
        backward: trace backward too; False: trace an evaluation, without gradients.
        exchanged: returns the bytes received so far from the ranks that share rows.
    """
    copied = _copy_on_meta(model, compute)
    values = {
        (unit.index, trainable, number): torch.empty(slot.shape, dtype=compute, device=META, requires_grad=trainable)
        for unit in splitting.units
        for trainable, slots in ((True, unit.trainable.slots), (False, unit.frozen_slots))
        for number, slot in enumerate(slots)
    }
    host = _Host([*values.values()])

    def call(site: Site, body: Body, args: Any, kwargs: Any) -> Any:
        """Run a site on meta tensors in the same way as `SiteRunner.run` does."""
        held = {
            f"module.module.{bound.local}": _arriving(values[bound.unit, bound.trainable, bound.slot])
            for bound in site.bindings
        }
        policy = policies if isinstance(policies, str) else policies[site.name]
        if backward and policy in RECOMPUTED:
            return recomputed_call(_Fusing(body), held, args, kwargs, selective=policy == "selective")
        with host.taking() if backward and policy == "offload" else nullcontext():
            return functional_call(_Fusing(body), held, args, kwargs, tie_weights=False)

    live = _Live([*values.values(), *copied.buffers(), *tree_leaves(microbatch)])
    attach(copied, splitting, lambda site: partial(call, site))
    with torch.set_grad_enabled(backward), live:
        began_bytes = exchanged()
        result = loss(copied, microbatch)
        forward_bytes = exchanged() - began_bytes
        forward, live.work = live.work + Work(exchanged_bytes=forward_bytes), Work()
        if backward:
            (result[0] if isinstance(result, tuple) else result).backward()
    back = live.work + Work(exchanged_bytes=exchanged() - began_bytes - forward_bytes)
    made = _median(live.made)
    return Traced(live.peak_bytes, host.allocated_bytes, forward, back, live.products, live.attention, made)


def _copy_on_meta(model: nn.Module, compute: torch.dtype) -> nn.Module:
    parameters = {
        id(parameter): nn.Parameter(torch.empty(parameter.shape, dtype=compute, device=META), parameter.requires_grad)
        for parameter in model.parameters()
    }
    copied = copy.deepcopy(model, parameters)
    move_buffers(copied, compute, META)
    return copied


def _arriving(parameter: Tensor) -> Tensor:
    if not (parameter.requires_grad and torch.is_grad_enabled()):
        return parameter
    arriving = _Arrive.apply(parameter)
    arriving.grad_fn._set_sequence_nr(AT_ONCE)
    return arriving


class _Arrive(torch.autograd.Function):
    """The identity, whose backward drops the gradient."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None


class _Meta(Device):
    """The meta device, whose copies do nothing."""

    def copy(self, into: Tensor, source: Tensor) -> None:
        pass


class _Host(OnHost):
    """The engine's offload of activations, with blocks of host memory that have a size and take no memory.

    Args:
        parameters: tensors that are not offloaded, because the engine does not save them.
    """

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__(_Meta(META), new_block=lambda nbytes: torch.empty(1, dtype=torch.uint8).expand(nbytes))
        self._parameters = {tensor.untyped_storage()._cdata for tensor in parameters}

    def taking(self) -> AbstractContextManager[Any]:
        """Offload the tensors that autograd saves during the body."""
        return torch.autograd.graph.saved_tensors_hooks(self.keep, self.find)

    def keep(self, tensor: Tensor) -> Any:
        if tensor.untyped_storage()._cdata in self._parameters:
            return Kept(tensor, tensor._version)
        return super().keep(tensor)


class _Live(TorchDispatchMode):
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
        self.work = Work()
        self.products: Counter[Product] = Counter()
        self.attention: tuple[int, ...] | None = None
        self.made: Counter[int] = Counter()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would make torch import its compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = result_of(func, args, kwargs or {})
        results = [tensor for tensor in tree_leaves(made) if isinstance(tensor, Tensor)]
        for tensor in results:
            self._add(tensor.untyped_storage())
        self._count(func, args, results)
        return made

    def _count(self, func: Any, args: Any, results: list[Tensor]) -> None:
        """Add an operator to the work. Of a look-up the table is not counted."""
        if func.is_view or func.overloadpacket in _FREE:
            return
        if product := _product(func, args):
            self.products[product] += 1
            self.work += Work(flops=product.flops, launches=1)
        elif func in _ATTENTION:
            times, query, key = _ATTENTION[func]
            self.attention = tuple(args[query].shape)
            self.work += Work(attention_flops=times * args[query].numel() * args[key].shape[-2], launches=1)
        else:
            read = tree_leaves(args)[func.overloadpacket in _LOOKUPS :]
            moved = [*results, *(tensor for tensor in read if isinstance(tensor, Tensor))]
            nbytes = sum(tensor.nbytes for tensor in moved)
            self.made[max((tensor.numel() for tensor in results), default=0)] += nbytes
            self.work += Work(nbytes=nbytes, launches=1)

    def _add(self, storage: Any) -> None:
        address, nbytes = storage._cdata, storage.nbytes()
        if address in self._alive or address in self._known:
            return

        def freed(_: Any) -> None:
            del self._alive[address]
            self._live_bytes -= nbytes

        self._alive[address] = weakref.ref(storage, freed)
        self._live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)


class _Fused(TorchFunctionMode):
    """A mode that replaces attention by the CPU's fused kernel.

    On meta tensors torch would choose the kernel that stores all scores.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class _Fusing(nn.Module):
    """A module that runs under `_Fused`, also when it is recomputed in backward, where torch suspends modes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _Fused():
            return self.module(*args, **kwargs)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, **kwargs: Any
) -> Tensor:
    fused = dropout_p == 0 and query.ndim == key.ndim == value.ndim == 4
    if not fused or (attn_mask is not None and attn_mask.requires_grad):
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, **kwargs)
    return aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, bool(kwargs.get("is_causal")), attn_mask=attn_mask, scale=kwargs.get("scale")
    )[0]


def _product(func: Any, args: Any) -> Product | None:
    if func in (aten.mm.default, aten.mm.out, aten.bmm.default):
        a, b = args[:2]
    elif func in (aten.addmm.default, aten.baddbmm.default):
        a, b = args[1:3]
    else:
        return None
    turned = a.stride(-1) > a.stride(-2), b.stride(-1) > b.stride(-2)
    return Product(a.shape[0] if a.ndim == 3 else 1, a.shape[-2], a.shape[-1], b.shape[-1], turned)


def _median(made: Mapping[int, int]) -> int:
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

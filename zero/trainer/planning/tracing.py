"""Peak activation bytes of one microbatch's forward and backward, by running them on meta tensors.

The model runs once on meta, where a tensor has a shape and no memory, through the same unit calls as in the engine:
sites of the plan's splitting, the engine's own recomputation, each parameter's gradient dropped as soon as it is made
(the engine copies it into a flat that is counted elsewhere). Every new storage is counted while it lives. Parameters
are left out: the engine packs away what a graph would keep of them.

Memory that a kernel takes for itself is not counted. Attention is that of the CPU's fused kernel, which keeps what
those of GPUs keep: inputs, output, and one number per row. Nothing here knows a `Config`.
"""

import weakref
from collections.abc import Callable, Collection, Mapping
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

from zero.engine.module_copy import Body, attach, detached_copy
from zero.engine.recompute import recomputed_call
from zero.engine.saved_tensors import Kept, OnHost
from zero.engine.unit import Site, Splitting
from zero.platform.device import Device
from zero.trainer.planning.shapes import result_of

aten = torch.ops.aten

META = torch.device("meta")

AT_ONCE = 2**62
"""As in `gather`: autograd runs what it can in the order of these numbers, largest first."""


class Traced(NamedTuple):
    """What one microbatch takes."""

    peak_bytes: int
    """Most bytes that forward and backward hold at once."""
    host_bytes: int
    """Of host memory, for what is sent there."""
    forward_flops: float
    backward_flops: float
    """Floating point operations of matrix products and attention; recomputation counts as backward."""


def trace(
    model: nn.Module,
    splitting: Splitting,
    loss: Callable[[nn.Module, Any], Any],
    microbatch: Any,
    *,
    compute: torch.dtype,
    remat: bool | Collection[int] = False,
    offload: Collection[int] = (),
    backward: bool = True,
) -> Traced:
    """Count one microbatch.

    Args:
        model: whose parameters may be on any device; it is copied, never changed.
        splitting: of the model, as its plan has it.
        loss: (model, microbatch) to a scalar, or to (scalar, more).
        microbatch: tensors on meta, of the shapes that training has.
        compute: dtype of parameters.
        remat: the units, by index, whose activations are computed again in backward; or all, or none.
        offload: the units whose activations are sent to host memory in between.
        backward: also go backward; otherwise an evaluation is counted, without gradients.
    """
    copied = detached_copy(model, splitting, compute, META)
    values = {
        (unit.index, trainable, number): torch.empty(slot.shape, dtype=compute, device=META, requires_grad=trainable)
        for unit in splitting.units
        for trainable, layout in ((True, unit.trainable), (False, unit.frozen))
        for number, slot in enumerate(layout.slots)
    }
    again = {unit.index for unit in splitting.units} if remat is True else set(remat or ())
    host = _Host([*values.values()])

    def policy(site: Site) -> str:
        unit = site.units[0]
        return "keep" if not backward else "remat" if unit in again else "offload" if unit in offload else "keep"

    attach(copied, splitting, lambda site: partial(_call, site, values, policy(site), host))
    live = _Live([*values.values(), *copied.buffers(), *tree_leaves(microbatch)])
    with torch.set_grad_enabled(backward), live:
        result = loss(copied, microbatch)
        forward_flops = live.flops
        if backward:
            (result[0] if isinstance(result, tuple) else result).backward()
    return Traced(live.peak_bytes, host.allocated_bytes, forward_flops, live.flops - forward_flops)


def _call(
    site: Site,
    values: Mapping[tuple[int, bool, int], Tensor],
    policy: str,
    host: "_Host",
    body: Body,
    args: Any,
    kwargs: Any,
) -> Any:
    """What a site does when it is called: see `Gatherer.run`."""
    names = [f"module.module.{bound.local}" for bound in site.bindings]
    held = [_arriving(values[bound.unit, bound.trainable, bound.slot]) for bound in site.bindings]
    if policy == "remat":
        return recomputed_call(_Fusing(body), names, held, args, kwargs)
    with host.taking() if policy == "offload" else nullcontext():
        return functional_call(_Fusing(body), dict(zip(names, held, strict=True)), args, kwargs, tie_weights=False)


def _arriving(parameter: Tensor) -> Tensor:
    if not (parameter.requires_grad and torch.is_grad_enabled()):
        return parameter
    arriving = _Arrive.apply(parameter)
    arriving.grad_fn._set_sequence_nr(AT_ONCE)
    return arriving


class _Arrive(torch.autograd.Function):
    """The identity; a gradient that arrives goes no further."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None


class _Meta(Device):
    """A device that copies nothing."""

    def copy(self, into: Tensor, source: Tensor) -> None:
        pass


class _Host(OnHost):
    """The engine's own way to host memory and back, with blocks that have a size and no memory.

    Args:
        parameters: which a graph does not keep.
    """

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__(_Meta(META), new_block=lambda nbytes: torch.empty(1, dtype=torch.uint8).expand(nbytes))
        self._parameters = {tensor.untyped_storage()._cdata for tensor in parameters}

    def taking(self) -> AbstractContextManager[Any]:
        """What autograd keeps within is sent."""
        return torch.autograd.graph.saved_tensors_hooks(self.keep, self.find)

    def keep(self, tensor: Tensor) -> Any:
        if tensor.untyped_storage()._cdata in self._parameters:
            return Kept(tensor, tensor._version)
        return super().keep(tensor)


class _Live(TorchDispatchMode):
    """Adds up the storages that are alive, `known` ones left out.

    Attributes:
        peak_bytes: the most there was at once.
        flops: of matrix products and attention so far.
    """

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._held = known  # an address means a storage only while that lives
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._live_bytes = self.peak_bytes = 0
        self.flops = 0.0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler, and has nothing to compile here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = result_of(func, args, kwargs or {})
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        self.flops += _flops(func, args)
        return made

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
    """Attention as the CPU's fused kernel does it. On meta torch would choose the one that writes out all scores."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class _Fusing(nn.Module):
    """A module that runs under `_Fused`, also when it is computed again in backward, where torch suspends modes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _Fused():
            return self.module(*args, **kwargs)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, **kwargs: Any
) -> Tensor:
    fused = dropout_p == 0 and query.ndim == key.ndim == value.ndim == 4 and not kwargs.get("enable_gqa")
    if not fused or (attn_mask is not None and attn_mask.requires_grad):
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, **kwargs)
    return aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, bool(kwargs.get("is_causal")), attn_mask=attn_mask, scale=kwargs.get("scale")
    )[0]


def _flops(func: Any, args: Any) -> float:
    """Two for each product that is added up."""
    if func in (aten.mm.default, aten.mm.out, aten.bmm.default):
        return 2.0 * args[0].numel() * args[1].shape[-1]
    if func in (aten.addmm.default, aten.baddbmm.default):
        return 2.0 * args[1].numel() * args[2].shape[-1]
    if func is aten._scaled_dot_product_flash_attention_for_cpu.default:
        return 4.0 * args[0].numel() * args[1].shape[-2]
    if func is aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
        return 10.0 * args[1].numel() * args[2].shape[-2]
    return 0.0

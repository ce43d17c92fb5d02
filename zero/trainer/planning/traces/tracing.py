"""Peak activation bytes and work of one microbatch, found by running forward and backward on meta tensors.

Meta tensors have a shape and no memory. The model runs once, with the same calls of units as in the engine: the sites
of the plan, and the engine's own recomputation. Each parameter's gradient is dropped as soon as it is computed, because
the engine copies it into a flat tensor that is counted elsewhere. Every new storage is counted while it exists.
Parameters are not counted, because the engine's saved-tensor hooks do not keep them.

Memory that a kernel allocates for itself is not counted. Attention is traced with the CPU's fused kernel, which saves
the same tensors as the fused kernels of GPUs: inputs, output, and one number per row.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from zero.core.activations import ACTIVATIONS, KEEP
from zero.core.activations.rows import ALL_ROWS
from zero.engine.forward import Chunks, recomputed_call
from zero.engine.memory import KeptTensor, OnHost
from zero.engine.model import Body, Site, Splitting, attach, move_buffers
from zero.losses import equal_chunks_once
from zero.platform.device import Device
from zero.trainer.planning.traces.operators import OperatorCounts, OperatorWork, Product, median

aten = torch.ops.aten

META_DEVICE = torch.device("meta")

AT_ONCE = 2**62
"""A sequence number that makes autograd run a node as soon as it is ready: autograd runs the largest number first."""


class Traced(NamedTuple):
    """Memory and work of one microbatch."""

    peak_bytes: int
    """The most bytes that forward and backward hold at once."""
    host_bytes: int
    """Host memory for offloaded activations."""
    forward: OperatorWork
    backward: OperatorWork
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
    policies: str | Mapping[str, str] = KEEP.name,
    rows: int = ALL_ROWS,
    backward: bool = True,
    exchanged: Callable[[], int] = lambda: 0,
) -> Traced:
    """Return the memory and work of one microbatch.

    Args:
        model: a module with parameters on any device; it is copied, never changed.
        splitting: the sites of the model; its units may differ from the plan's.
        loss: maps (model, microbatch) to a scalar, or to a tuple that begins with a scalar.
        microbatch: meta tensors, of the shapes that training has.
        compute: dtype of the parameters.
        policies: the activation policy of all sites, or of each site by its name.
        rows: rows of a chunk in which recomputed blocks run; 0: all rows at once.
        backward: trace backward too; False: trace an evaluation, without gradients.
        exchanged: returns the bytes received so far from the ranks that share rows.
    """
    copied = _copy_on_meta(model, compute)
    values = {
        (unit.index, trainable, number): torch.empty(
            slot.shape, dtype=compute, device=META_DEVICE, requires_grad=trainable
        )
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
        policy = ACTIVATIONS[policies if isinstance(policies, str) else policies[site.name]]
        with host.taking() if backward and policy.offloads else nullcontext():
            if backward and policy.recomputes:
                chunks = Chunks(rows, site.name) if rows and site.is_block else None
                return recomputed_call(_Fusing(body), held, args, kwargs, policy=policy, chunks=chunks)
            return functional_call(_Fusing(body), held, args, kwargs, tie_weights=False)

    live = OperatorCounts([*values.values(), *copied.buffers(), *tree_leaves(microbatch)])
    attach(copied, splitting, lambda site: partial(call, site))
    with torch.set_grad_enabled(backward), live, equal_chunks_once(live.repeated):
        began_bytes = exchanged()
        result = loss(copied, microbatch)
        forward_bytes = exchanged() - began_bytes
        forward, live.work = live.work + OperatorWork(exchanged_bytes=forward_bytes), OperatorWork()
        if backward:
            (result[0] if isinstance(result, tuple) else result).backward()
    back = live.work + OperatorWork(exchanged_bytes=exchanged() - began_bytes - forward_bytes)
    made = median(live.made)
    return Traced(live.peak_bytes, host.allocated_bytes, forward, back, live.products, live.attention, made)


def _copy_on_meta(model: nn.Module, compute: torch.dtype) -> nn.Module:
    parameters = {
        id(parameter): nn.Parameter(
            torch.empty(parameter.shape, dtype=compute, device=META_DEVICE), parameter.requires_grad
        )
        for parameter in model.parameters()
    }
    # deepcopy would take ten times as long for each empty dictionary, of which a module has twelve for hooks
    values = (value for module in model.modules() for value in vars(module).values())
    empty = {id(value): type(value)() for value in values if type(value) in (dict, OrderedDict) and not value}
    copied = copy.deepcopy(model, {**parameters, **empty})
    move_buffers(copied, compute, META_DEVICE)
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
        super().__init__(_Meta(META_DEVICE), new_block=lambda nbytes: torch.empty(1, dtype=torch.uint8).expand(nbytes))
        self._parameters = {tensor.untyped_storage()._cdata for tensor in parameters}

    def taking(self) -> AbstractContextManager[Any]:
        """Offload the tensors that autograd saves during the body."""
        return torch.autograd.graph.saved_tensors_hooks(self.keep, self.find)

    def keep(self, tensor: Tensor) -> Any:
        if tensor.untyped_storage()._cdata in self._parameters:
            return KeptTensor(tensor, tensor._version)
        return super().keep(tensor)


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

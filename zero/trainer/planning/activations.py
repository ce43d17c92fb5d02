"""How many bytes forward and backward of one microbatch hold at most beside parameters and gradient flats.

The model runs once on meta, where a tensor has a shape and no memory, through the same unit calls as in the engine:
sites of the plan's splitting, the engine's own recomputation, each parameter's gradient dropped as soon as it is made
(the engine copies it into a flat that is counted elsewhere). Every new storage is counted while it lives. Parameters
are left out: the engine packs away what a graph would keep of them.

What a kernel takes for itself is not seen. Attention is that of the CPU's fused kernel, which keeps what those of GPUs
keep: inputs, output, and one number per row.
"""

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
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
from zero.engine.unit import Site, Splitting, split
from zero.trainer.build import build_precision
from zero.trainer.config import Config
from zero.trainer.evaluate import CHUNK_TOKENS
from zero.trainer.planning.shapes import result_of
from zero.trainer.task import loss_of

aten = torch.ops.aten

META = torch.device("meta")

HEAP: Mapping[str, float] = MappingProxyType({"keep": 1.5, "remat": 2.5})
"""By `zero.activations`: how much the heap of a process grows for a byte of activations on a CPU, because freed tensors
leave holes that others do not fit in. Measured with `scripts/check_plan` under glibc 2.36 and `launch.malloc=raised`:
1.4 to 1.7 and 2.5 to 3.4, the higher the smaller the model. With `lean`, which maps large tensors apart, it is 1."""

AT_ONCE = 2**62
"""As in `gather`: autograd runs what it can in the order of these numbers, largest first."""


class Traced(NamedTuple):
    """What one microbatch takes."""

    peak_bytes: int
    """Most bytes that forward and backward hold at once."""
    forward_flops: float
    backward_flops: float
    """Floating point operations of matrix products and attention; recomputation counts as backward."""


class Activations:
    """What microbatches of a run take, each number of rows counted once.

    Args:
        config: its batch may still be auto.
        model: built under `zero.empty()`, or on any device.
    """

    def __init__(self, config: Config, model: nn.Module) -> None:
        self._config, self._model = config, model
        names = None if config.zero.units == "auto" else config.zero.units
        self._splitting = split(model, world_size=1, class_names=names)
        self._compute = build_precision(config).compute
        self._traced: dict[tuple[int, int, bool], Traced] = {}

    def lighter(self, rows: int, device: str) -> dict[str, int]:
        """What can be set to take less than a microbatch of `rows` rows does, and what is to be planned with then."""
        settings, found = self._config.zero, {}
        if settings.activations != "remat":
            found["set zero.activations=remat"] = self.bytes(rows, device, remat=True)
        if rows > 1:
            found["use a smaller batch.micro"] = self.bytes(1, device)
        if self._config.model.seq > 1:
            found["use a smaller model.seq"] = self.bytes(rows, device, seq=self._config.model.seq // 2)
        return found

    def of(self, rows: int, *, remat: bool | None = None, seq: int | None = None) -> Traced:
        """A microbatch of `rows` rows; a run validates as well, which counts if that takes more.

        Of a model without a trainable parameter only the validation is counted: it is not trained.

        Args:
            remat: whether activations are computed again; None: as the run has it.
            seq: tokens of a row; None: as the run has it.
        """
        key = rows, seq or self._config.model.seq, self._is_remat(remat)
        if key not in self._traced:
            self._traced[key] = self._training(*key) if self._splitting.trains else self._validation(key[1])
        return self._traced[key]

    def bytes(self, rows: int, device: str, *, remat: bool | None = None, seq: int | None = None) -> int:
        """What to plan with for a microbatch of `rows` rows on a device type: on a CPU also what the heap wastes.

        Recomputing wastes more of less, but takes no more in all than keeping does.
        """
        remat = self._is_remat(remat)
        taken_bytes = self.of(rows, remat=remat, seq=seq).peak_bytes
        if device != "cpu" or self._config.launch.malloc == "lean":
            return taken_bytes
        kept_bytes = int(self.of(rows, remat=False, seq=seq).peak_bytes * HEAP["keep"])
        return min(kept_bytes, int(taken_bytes * HEAP["remat"])) if remat else kept_bytes

    def _is_remat(self, asked: bool | None) -> bool:
        """Whether anything is computed again; without backward nothing is."""
        wanted = self._config.zero.activations == "remat" if asked is None else asked
        return wanted and self._splitting.trains

    def _training(self, rows: int, seq: int, remat: bool) -> Traced:
        traced = self._trace(rows, seq, remat=remat)
        if rows >= _chunk(seq):
            return traced
        return traced._replace(peak_bytes=max(traced.peak_bytes, self._validation(seq).peak_bytes))

    def _validation(self, seq: int) -> Traced:
        return self._trace(_chunk(seq), seq, backward=False)

    def _trace(self, rows: int, seq: int, *, remat: bool = False, backward: bool = True) -> Traced:
        return trace(
            self._model,
            self._splitting,
            loss_of(self._config),
            torch.empty(rows, seq + 1, dtype=torch.int64, device=META),
            compute=self._compute,
            remat=remat,
            backward=backward,
        )


def _chunk(seq: int) -> int:
    """Rows that a rank evaluates at a time."""
    return max(1, CHUNK_TOKENS // seq)


def trace(
    model: nn.Module,
    splitting: Splitting,
    loss: Callable[[nn.Module, Any], Any],
    microbatch: Any,
    *,
    compute: torch.dtype,
    remat: bool = False,
    backward: bool = True,
) -> Traced:
    """Count one microbatch.

    Args:
        model: whose parameters may be on any device; it is copied, never changed.
        splitting: of the model, as its plan has it.
        loss: (model, microbatch) to a scalar, or to (scalar, more).
        microbatch: tensors on meta, of the shapes that training has.
        compute: dtype of parameters.
        remat: activations of each unit are computed again in backward.
        backward: also go backward; otherwise an evaluation is counted, without gradients.
    """
    copied = detached_copy(model, splitting, compute, META)
    values = {
        (unit.index, trainable, number): torch.empty(slot.shape, dtype=compute, device=META, requires_grad=trainable)
        for unit in splitting.units
        for trainable, layout in ((True, unit.trainable), (False, unit.frozen))
        for number, slot in enumerate(layout.slots)
    }
    attach(copied, splitting, lambda site: partial(_call, site, values, remat and backward))
    live = _Live([*values.values(), *copied.buffers(), *tree_leaves(microbatch)])
    with torch.set_grad_enabled(backward), live:
        result = loss(copied, microbatch)
        forward_flops = live.flops
        if backward:
            (result[0] if isinstance(result, tuple) else result).backward()
    return Traced(live.peak_bytes, forward_flops, live.flops - forward_flops)


def _call(
    site: Site, values: Mapping[tuple[int, bool, int], Tensor], remat: bool, body: Body, args: Any, kwargs: Any
) -> Any:
    """What a site does when it is called: see `Gatherer.run`."""
    names = [f"module.module.{bound.local}" for bound in site.bindings]
    held = [_arriving(values[bound.unit, bound.trainable, bound.slot]) for bound in site.bindings]
    if remat:
        return recomputed_call(_Fusing(body), names, held, args, kwargs)
    return functional_call(_Fusing(body), dict(zip(names, held, strict=True)), args, kwargs, tie_weights=False)


def _arriving(parameter: Tensor) -> Tensor:
    if not (parameter.requires_grad and torch.is_grad_enabled()):
        return parameter
    arriving = _Arrive.apply(parameter)
    arriving.grad_fn._set_sequence_nr(AT_ONCE)
    assert isinstance(arriving, Tensor)
    return arriving


class _Arrive(torch.autograd.Function):
    """The identity; a gradient that arrives goes no further."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None


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
        return False  # torch would import its compiler to be told that it has nothing to do here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = result_of(func, args, kwargs or {})
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._see(tensor.untyped_storage())
        self.flops += _flops(func, args)
        return made

    def _see(self, storage: Any) -> None:
        address, nbytes = storage._cdata, storage.nbytes()
        if address in self._alive or address in self._known:
            return

        def gone(_: Any) -> None:
            del self._alive[address]
            self._live_bytes -= nbytes

        self._alive[address] = weakref.ref(storage, gone)
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
    made = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, bool(kwargs.get("is_causal")), attn_mask=attn_mask, scale=kwargs.get("scale")
    )
    assert isinstance(made[0], Tensor)
    return made[0]


def _flops(func: Any, args: Any) -> float:
    """Two for each product that is added up."""
    if func in (aten.mm.default, aten.bmm.default):
        return 2.0 * args[0].numel() * args[1].shape[-1]
    if func in (aten.addmm.default, aten.baddbmm.default):
        return 2.0 * args[1].numel() * args[2].shape[-1]
    if func is aten._scaled_dot_product_flash_attention_for_cpu.default:
        return 4.0 * args[0].numel() * args[1].shape[-2]
    if func is aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
        return 10.0 * args[1].numel() * args[2].shape[-2]
    return 0.0

"""Part 2: correctness on this device. Every setting gives the same bits, and training agrees with plain torch.

Part 6 does the same on several ranks.

Bounds: for fp32 those of `tests/engine/test_against_torch.py`, which explains them. In half precision, a difference in
the last bit of the master may round to another half-precision number, whose last bit is 2^-9 (bf16) or 2^-12 (fp16) of
it, and a loss is a mean over many such numbers. A wrong learning rate, decay or scale changes it by more than 1 %.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import zero
from gpu_parts.devices import Gpu
from gpu_parts.run import Budget, Emit, Row, error_text
from gpu_parts.sizes import Sizes
from gpu_parts.training import (
    CLIP,
    Offloading,
    Values,
    running,
    tokens,
    tokens_of_rank,
    torch_optimizer,
    whole_model,
)
from zero.attention import Documents, Scoring, causal_attention
from zero.engine.whole.read import digest
from zero.errors import ZeroError
from zero.trainer.models import GPTConfig, loss

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BOUNDS = {"fp32": 1e-5, "bf16": 2e-3, "fp16": 2e-3}
SCORINGS = {"documents": Scoring(), "a window": Scoring(window=64), "a cap": Scoring(softcap=2.0)}
"""Kinds of attention of ranks that share rows. In bf16 a GPU takes the first in torch's kernel of variable lengths."""

SANITIZED_STEPS = 3
"""Steps under the sanitizer, which is slow. The second is the first one that follows an update."""

STATIC_SCALE = 1024.0
"""Loss scale of fp16 when compared with plain torch, which has no dynamic one here. A power of two rounds nothing."""


class Case(NamedTuple):
    """One way to train. All cases of a family must give the same bits."""

    family: str
    name: str
    plan: dict[str, Any]


def cases(sizes: Sizes) -> Iterator[Case]:
    """Yield the cases. The first of each family is the reference. The second is the same again: if kernels are not
    deterministic, the comparisons after it mean nothing."""
    yield Case("", "stage 3", {})
    yield Case("", "stage 3 again", {})
    for preset in ("cpu", "nvme", "infinity"):
        yield Case("", preset, {"offloading": Offloading(preset)})
        for page_bytes in sizes.law_pages:
            settings = {"offloading": Offloading(preset), "page_bytes": page_bytes}
            yield Case("", f"{preset}, {page_bytes // 1024} KiB pages", settings)
    for prefetch in (0, 2):
        yield Case("", f"infinity, prefetch {prefetch}", {"offloading": Offloading("infinity"), "prefetch": prefetch})
    for stage in (0, 1, 2):
        yield Case("", f"stage {stage}", {"stage": stage})
    yield Case("", "stage 1, nvme", {"stage": 1, "offloading": Offloading("nvme")})
    yield Case("", "update serial", {"update": "serial"})
    yield Case("", "update serial, nvme", {"update": "serial", "offloading": Offloading("nvme")})
    yield Case("", "remat", {"activations": "remat"})
    yield Case("", "activations on the host", {"activations": "offload"})
    yield Case("", "remat, infinity", {"activations": "remat", "offloading": Offloading("infinity")})
    yield Case("no clipping", "stage 3", {"clip": None})
    yield Case(
        "no clipping", "update serial, nvme", {"clip": None, "update": "serial", "offloading": Offloading("nvme")}
    )


def compiled_cases(sizes: Sizes) -> Iterator[Case]:
    """Yield the compiled cases. A compiler fuses kernels, so these bits differ from others; no tier changes them."""
    for name, more in (
        ("stage 3", {}),
        ("stage 3 again", {}),
        ("nvme", {"offloading": Offloading("nvme")}),
        ("stage 0", {"stage": 0}),
    ):
        yield Case("compiled", name, {"compile": sizes.compile, **more})


def check_laws(gpu: Gpu, sizes: Sizes, disk: Path, emit: Emit, budget: Budget) -> None:
    """Compare with plain torch in every precision, which is quick, then the bits of all cases."""
    be_deterministic(gpu, sizes, disk, emit)
    for precision in DTYPES:
        emit(against_torch(gpu, sizes, disk, precision))
        for kind, scoring in SCORINGS.items():
            emit(against_masks(gpu, sizes, precision, kind, scoring))
    for precision in ("bf16", "fp32", "fp16"):
        compare_digests(cases(sizes), precision, gpu, sizes, disk, emit)


def check_compiled(gpu: Gpu, sizes: Sizes, disk: Path, emit: Emit, budget: Budget) -> None:
    """Compare the bits of compiled units, as a separate task, because compiling may take long."""
    be_deterministic(gpu, sizes, disk, emit)
    for precision in sizes.precisions:
        compare_digests(compiled_cases(sizes), precision, gpu, sizes, disk, emit)


def check_hazards(gpu: Gpu, sizes: Sizes, disk: Path, emit: Emit, budget: Budget) -> None:
    """Emit the races that torch's sanitizer finds on real streams."""
    for name, more in (
        ("stage 3", {}),
        ("cpu", {"offloading": Offloading("cpu")}),
        ("nvme", {"offloading": Offloading("nvme")}),
        ("infinity, remat", {"offloading": Offloading("infinity"), "activations": "remat"}),
    ):
        try:
            races = gpu.hazards(partial(_trained, gpu, sizes, disk, "bf16", more, SANITIZED_STEPS))
            emit({"kind": "hazards", "case": name, "found": races and len(races), "texts": (races or [])[:20]})
        except Exception as error:  # the sanitizer is private to torch, and may fail in any way
            emit({"kind": "hazards", "case": name, "error": error_text(error)})


def be_deterministic(gpu: Gpu, sizes: Sizes, disk: Path, emit: Emit) -> None:
    """Use deterministic kernels: others do not give equal bits. If one is missing, emit a note. In this mode torch also
    fills uninitialized memory with NaN, which shows reads of memory that nobody wrote."""
    torch.use_deterministic_algorithms(True)
    try:
        _trained(gpu, sizes, disk, "fp32", {})
    except RuntimeError as error:
        torch.use_deterministic_algorithms(True, warn_only=True)
        emit({"kind": "note", "text": f"not deterministic: {error_text(error)}"})


def compare_digests(chosen: Iterable[Case], precision: str, gpu: Gpu, sizes: Sizes, disk: Path, emit: Emit) -> None:
    """Train each case and emit its digest, and whether it equals that of its family's first case. Collective."""
    first: dict[str, str] = {}
    for case in chosen:
        row: Row = {"kind": "digest", "precision": precision, "family": case.family, "case": case.name}
        begin_s = time.perf_counter()
        try:
            state_digest = _trained(gpu, sizes, disk, precision, case.plan)
            row |= {"digest": state_digest[:12], "equal": first.setdefault(case.family, state_digest) == state_digest}
        except (ZeroError, RuntimeError, OSError) as error:
            row["error"] = error_text(error)
        emit({**row, "seconds": round(time.perf_counter() - begin_s, 2)})


def _trained(gpu: Gpu, sizes: Sizes, disk: Path, precision: str, plan: dict[str, Any], steps: int | None = None) -> str:
    """Train some steps and return the digest of the state."""
    config = GPTConfig(**sizes.laws)
    with running(config, gpu, sizes, disk, precision=_precision(precision), **plan) as run:
        for number in range(steps or sizes.law_steps):
            run.step(tokens_of_rank(config, sizes.law_rows, gpu, number))
        return digest(run.state)


def _precision(name: str) -> zero.Precision:
    """Return the precision. fp16 has a static loss scale: with a dynamic one, the first steps would be skipped."""
    scale = zero.LossScaling(static=STATIC_SCALE) if name == "fp16" else None
    return zero.Precision(name, scale=scale)


# -- bounds ------------------------------------------------------------------------------------------------------------


def against_torch(gpu: Gpu, sizes: Sizes, disk: Path, precision: str) -> Row:
    """Return the largest differences between training here and plain torch in one process. Collective."""
    config, values = GPTConfig(**sizes.laws), Values()
    rows = sizes.law_rows * gpu.world.size

    def in_plain_torch() -> list[Point]:
        plain = _PlainTorch(config, gpu, values, DTYPES[precision], STATIC_SCALE if precision == "fp16" else 1.0)
        return [plain.step(tokens(config, rows, gpu, number)) for number in range(2 * sizes.law_steps)]

    return bounded("plain torch", precision, gpu, sizes, lambda: curve(gpu, sizes, disk, precision), in_plain_torch)


Point = tuple[float, float]
"""The loss and the gradient norm of one step; of attention, the norms of its result and its gradients."""


def against_masks(gpu: Gpu, sizes: Sizes, precision: str, kind: str, scoring: Scoring) -> Row:
    """Return the largest differences between attention in packed rows of documents and a mask of all pairs in fp32."""

    def points(attend: Callable[..., Tensor], dtype: torch.dtype) -> list[Point]:
        return [_attended(attend, scoring, dtype, gpu, number) for number in range(2 * sizes.law_steps)]

    ours, theirs = partial(points, causal_attention, DTYPES[precision]), partial(points, _masked, torch.float32)
    return bounded(f"masks: {kind}", precision, gpu, sizes, ours, theirs)


def _attended(attend: Callable[..., Tensor], scoring: Scoring, dtype: torch.dtype, gpu: Gpu, seed: int) -> Point:
    """Return the norms of the result and of its gradients. Inputs are rounded to bf16, so that all dtypes hold them."""
    random = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(2, heads, 320, 64, generator=random).bfloat16() for heads in (8, 2, 2, 8)]
    q, k, v, weights = (x.to(gpu.device, dtype).requires_grad_() for x in drawn)
    result = attend(q, k, v, ((200, 120), (1, 319)), scoring)
    gradients = torch.autograd.grad(result, (q, k, v), weights.detach())
    return float(result.detach().float().norm()), float(torch.stack([x.float().norm() for x in gradients]).norm())


def _masked(q: Tensor, k: Tensor, v: Tensor, documents: Documents, scoring: Scoring) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    places = torch.arange(q.shape[2], device=q.device)
    numbers = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in documents]).to(
        q.device
    )
    distance = places[:, None] - places
    seen = (numbers[:, None, :, None] == numbers[:, None, None, :]) & (distance >= 0)
    if scoring.window is not None:
        seen = seen & (distance < scoring.window)
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v


def curve(gpu: Gpu, sizes: Sizes, disk: Path, precision: str, **plan: Any) -> list[Point]:
    """Train and return the points of all steps. Collective."""
    config = GPTConfig(**sizes.laws)
    with running(config, gpu, sizes, disk, precision=_precision(precision), values=Values(), **plan) as run:
        steps = [run.step(tokens_of_rank(config, sizes.law_rows, gpu, n)) for n in range(2 * sizes.law_steps)]
    return [(metrics.loss, metrics.grad_norm) for metrics in steps]


def bounded(
    reference: str,
    precision: str,
    gpu: Gpu,
    sizes: Sizes,
    ours: Callable[[], list[Point]],
    theirs: Callable[[], list[Point]],
) -> Row:
    """Return the largest relative differences between two curves, and whether they are within the bound."""
    bound, steps = BOUNDS[precision], 2 * sizes.law_steps
    row: Row = {"kind": "bound", "reference": reference, "ranks": gpu.world.size, "precision": precision}
    row |= {"steps": steps, "bound": bound}
    try:
        pairs = list(zip(ours(), theirs(), strict=True))
    except (ZeroError, RuntimeError, OSError) as error:
        return {**row, "error": error_text(error)}
    differences = {what: max(abs(a[i] - b[i]) / abs(b[i]) for a, b in pairs) for i, what in enumerate(("loss", "norm"))}
    holds, last = max(differences.values()) <= bound, [loss for loss, _ in pairs[-1]]
    return {**row, **differences, "holds": holds, "last": last}


class _PlainTorch:
    """torch.optim and clip_grad_norm_ in one process. Half precision has an fp32 master (Micikevicius et al. 2018)."""

    def __init__(self, config: GPTConfig, gpu: Gpu, values: Values, dtype: torch.dtype, scale: float) -> None:
        self._model, self._scale = whole_model(config, gpu, values, dtype), scale
        self._master = [
            parameter.detach().float().clone() for parameter in whole_model(config, gpu, values).parameters()
        ]
        self._optimizer = torch_optimizer(self._master)

    def step(self, rows: Tensor) -> tuple[float, float]:
        value = loss(self._model, rows)
        (value * self._scale).backward()
        for parameter, master in zip(self._model.parameters(), self._master, strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float() / self._scale, None
        norm = float(nn.utils.clip_grad_norm_(self._master, CLIP))
        self._optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(self._model.parameters(), self._master, strict=True):
                parameter.copy_(master)
        return value.item(), norm

"""Part 2: the laws on this device. Whatever is chosen the bits are the same, and training is what plain torch does.

Bounds. In fp32 those of `tests/engine/test_against_torch.py`, where they are reasoned. In half types a difference in
the last bit of the master may round to another half number, whose last bit is 2^-9 (bf16) or 2^-12 (fp16) of it, and
a loss is a mean over many such: a wrong rate, decay or scale shows as more than a hundredth.
"""

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import zero
from gpu_parts.doors import Gpu
from gpu_parts.run import Budget, Row, Tell, error_text
from gpu_parts.sizes import Sizes
from gpu_parts.training import CLIP, Away, Running, Values, running, tokens, torch_optimizer, whole_model
from zero.engine.full import digest
from zero.errors import ZeroError
from zero.trainer.models import GPTConfig, loss

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BOUNDS = {"fp32": 1e-5, "bf16": 2e-3, "fp16": 2e-3}
LOOKED_AT = 3
"""Steps under the sanitizer, which is slow: the second is the first with an update before it."""

STATIC_SCALE = 1024.0
"""Of fp16 beside plain torch, which has no dynamic one here; a power of two, so it rounds nothing."""


class Case(NamedTuple):
    """One way to train. Those of one family have the same bits."""

    family: str
    name: str
    plan: dict[str, Any]


def cases(sizes: Sizes) -> Iterator[Case]:
    """The first of each family is what the others are held against; the second is the same again, because kernels
    whose results vary from run to run would make everything after it meaningless."""
    yield Case("", "stage 3", {})
    yield Case("", "stage 3 again", {})
    for preset in ("cpu", "nvme", "infinity"):
        yield Case("", preset, {"away": Away(preset)})
        for page_bytes in sizes.law_pages:
            yield Case(
                "", f"{preset}, {page_bytes // 1024} KiB pages", {"away": Away(preset), "page_bytes": page_bytes}
            )
    for prefetch in (0, 2):
        yield Case("", f"infinity, prefetch {prefetch}", {"away": Away("infinity"), "prefetch": prefetch})
    for stage in (0, 1, 2):
        yield Case("", f"stage {stage}", {"stage": stage})
    yield Case("", "stage 1, nvme", {"stage": 1, "away": Away("nvme")})
    yield Case("", "update serial", {"update": "serial"})
    yield Case("", "update serial, nvme", {"update": "serial", "away": Away("nvme")})
    yield Case("", "remat", {"activations": "remat"})
    yield Case("", "activations on the host", {"activations": "offload"})
    yield Case("", "remat, infinity", {"activations": "remat", "away": Away("infinity")})
    yield Case("no clipping", "stage 3", {"clip": None})
    yield Case("no clipping", "update eager", {"clip": None, "update": "eager"})
    yield Case("no clipping", "update eager, nvme", {"clip": None, "update": "eager", "away": Away("nvme")})


def compiled_cases(sizes: Sizes) -> Iterator[Case]:
    """A compiler fuses, so its bits are its own; but no tier changes them."""
    for name, more in (
        ("stage 3", {}),
        ("stage 3 again", {}),
        ("nvme", {"away": Away("nvme")}),
        ("stage 0", {"stage": 0}),
    ):
        yield Case("compiled", name, {"compile": sizes.compile, **more})


def tell_laws(gpu: Gpu, sizes: Sizes, disk: Path, tell: Tell, budget: Budget) -> None:
    """Of every precision, against plain torch first, because that is soon told."""
    _be_deterministic(gpu, sizes, disk, tell)
    for precision in DTYPES:
        tell(_against_torch(gpu, sizes, disk, precision))
    for precision in ("bf16", "fp32", "fp16"):
        _tell_digests(cases(sizes), precision, gpu, sizes, disk, tell)


def tell_compiled(gpu: Gpu, sizes: Sizes, disk: Path, tell: Tell, budget: Budget) -> None:
    """Compiled units: a task of their own, because a compiler may take long."""
    _be_deterministic(gpu, sizes, disk, tell)
    for precision in ("bf16", "fp32"):
        _tell_digests(compiled_cases(sizes), precision, gpu, sizes, disk, tell)


def tell_hazards(gpu: Gpu, sizes: Sizes, disk: Path, tell: Tell, budget: Budget) -> None:
    """What torch's own sanitizer finds on real streams."""
    for name, more in (
        ("stage 3", {}),
        ("cpu", {"away": Away("cpu")}),
        ("nvme", {"away": Away("nvme")}),
        ("infinity, remat", {"away": Away("infinity"), "activations": "remat"}),
    ):
        try:
            found = gpu.hazards(partial(_trained, gpu, sizes, disk, "bf16", more, LOOKED_AT))
            tell({"kind": "hazards", "case": name, "found": found and len(found), "texts": (found or [])[:20]})
        except Exception as error:  # the sanitizer is torch's own, private, and may not run at all
            tell({"kind": "hazards", "case": name, "error": error_text(error)})


def _be_deterministic(gpu: Gpu, sizes: Sizes, disk: Path, tell: Tell) -> None:
    """Kernels whose results vary from run to run say nothing about the laws. Where one has to be used all the same, it
    is told which; torch also fills what is only allocated with NaN then, which shows what nobody wrote."""
    torch.use_deterministic_algorithms(True)
    try:
        _trained(gpu, sizes, disk, "fp32", {})
    except RuntimeError as error:
        torch.use_deterministic_algorithms(True, warn_only=True)
        tell({"kind": "note", "text": f"not deterministic: {error_text(error)}"})


def _tell_digests(them: Iterator[Case], precision: str, gpu: Gpu, sizes: Sizes, disk: Path, tell: Tell) -> None:
    first: dict[str, str] = {}
    for case in them:
        if precision == "fp16" and case.plan.get("update") == "eager":
            continue  # it is refused with loss scaling
        row: Row = {"kind": "digest", "precision": precision, "family": case.family, "case": case.name}
        begin_s = time.perf_counter()
        try:
            told = _trained(gpu, sizes, disk, precision, case.plan)
            row |= {"digest": told[:12], "equal": first.setdefault(case.family, told) == told}
        except (ZeroError, RuntimeError, OSError) as error:
            row["error"] = error_text(error)
        tell({**row, "seconds": round(time.perf_counter() - begin_s, 2)})


def _trained(gpu: Gpu, sizes: Sizes, disk: Path, precision: str, plan: dict[str, Any], steps: int | None = None) -> str:
    """The digest after some steps."""
    config = GPTConfig(**sizes.laws)
    with running(config, gpu, sizes, disk, precision=_precision(precision), **plan) as run:
        for number in range(steps or sizes.law_steps):
            run.step(tokens(config, sizes.law_rows, gpu, number))
        return digest(run.state)


def _precision(name: str) -> zero.Precision:
    """fp16 with a static scale: with the dynamic one the first steps would be skipped."""
    scale = zero.LossScaling(static=STATIC_SCALE) if name == "fp16" else None
    return zero.Precision(name, scale=scale)


# -- plain torch -------------------------------------------------------------------------------------------------------


def _against_torch(gpu: Gpu, sizes: Sizes, disk: Path, precision: str) -> Row:
    config, steps, values = GPTConfig(**sizes.laws), 2 * sizes.law_steps, Values()
    row: Row = {"kind": "bound", "precision": precision, "steps": steps, "bound": BOUNDS[precision]}
    try:
        with running(config, gpu, sizes, disk, precision=_precision(precision), values=values) as run:
            ours = [_loss_and_norm(run, config, sizes, gpu, number) for number in range(steps)]
        plain = _PlainTorch(config, gpu, values, DTYPES[precision], STATIC_SCALE if precision == "fp16" else 1.0)
        theirs = [plain.step(tokens(config, sizes.law_rows, gpu, number)) for number in range(steps)]
    except (ZeroError, RuntimeError, OSError) as error:
        return {**row, "error": error_text(error)}
    pairs = list(zip(ours, theirs, strict=True))
    far = {what: max(abs(a[i] - b[i]) / abs(b[i]) for a, b in pairs) for i, what in enumerate(("loss", "norm"))}
    return {**row, **far, "holds": max(far.values()) <= BOUNDS[precision], "last": [ours[-1][0], theirs[-1][0]]}


def _loss_and_norm(run: Running, config: GPTConfig, sizes: Sizes, gpu: Gpu, number: int) -> tuple[float, float]:
    metrics = run.step(tokens(config, sizes.law_rows, gpu, number))
    return metrics.loss, metrics.grad_norm


class _PlainTorch:
    """One process, torch.optim, clip_grad_norm_; in half types a master in fp32, as Micikevicius et al. have it."""

    def __init__(self, config: GPTConfig, gpu: Gpu, values: Values, dtype: torch.dtype, scale: float) -> None:
        self._model, self._scale = whole_model(config, gpu, values, dtype), scale
        self._master = [one.detach().float().clone() for one in whole_model(config, gpu, values).parameters()]
        self._optimizer = torch_optimizer(self._master)

    def step(self, rows: Tensor) -> tuple[float, float]:
        value = loss(self._model, rows)
        (value * self._scale).backward()
        for one, master in zip(self._model.parameters(), self._master, strict=True):
            assert one.grad is not None
            master.grad, one.grad = one.grad.float() / self._scale, None
        norm = float(nn.utils.clip_grad_norm_(self._master, CLIP))
        self._optimizer.step()
        with torch.no_grad():
            for one, master in zip(self._model.parameters(), self._master, strict=True):
                one.copy_(master)
        return value.item(), norm

"""Part 5: the trace of one step, by torch's profiler and by the library's timeline, and how much work is exposed."""

import gzip
import shutil
from pathlib import Path
from typing import Any

import zero
from gpu_parts.devices import Gpu
from gpu_parts.run import Budget, Emit, error_text
from gpu_parts.sizes import Sizes
from gpu_parts.training import Offloading, Values, running, tokens
from zero.trainer.models import GPTConfig

MOST_BYTES = 15 * 2**20
"""Largest size of a file. Larger ones are removed."""


def trace_steps(folder: Path, gpu: Gpu, sizes: Sizes, disk: Path, emit: Emit, budget: Budget) -> None:
    """Trace a step with all state in host memory, which has the most copies, and a step with no offload."""
    for preset in ("cpu", "none"):
        try:
            emit(
                {
                    "kind": "exposed",
                    "model": sizes.traced.name,
                    "preset": preset,
                    **_one(preset, folder, gpu, sizes, disk),
                }
            )
        except (zero.ZeroError, RuntimeError, OSError) as error:
            emit({"kind": "exposed", "preset": preset, "error": error_text(error)})


def _one(preset: str, folder: Path, gpu: Gpu, sizes: Sizes, disk: Path) -> dict[str, Any]:
    config = GPTConfig(**sizes.traced.config)
    batch, files = tokens(config, sizes.traced.rows[0], gpu), []
    with running(
        config,
        gpu,
        sizes,
        disk,
        offloading=Offloading(preset),
        values=Values(),
        precision="bf16",
        activations=sizes.traced.activations,
    ) as run:
        for _ in range(2):
            run.step(batch)
        with zero.record(run.state) as timeline:
            run.step(batch)
        plain = folder / f"timeline-{preset}.json"
        timeline.write(plain)
        files += [_zipped(plain)]
        traced = folder / f"trace-{preset}.json"
        run.drain()
        with zero.record(run.state, profile=True):
            gpu.trace(lambda: run.drained_step(batch), traced)
        files += [_zipped(traced)]
    shares = {row: [share.busy_s, share.exposed_s] for row, share in timeline.hidden().items() if share.busy_s}
    return {
        "tokens": batch[:, 1:].numel(),
        "recorded_s": timeline.step_s,
        "shares": shares,
        "files": [name for name in files if name],
    }


def _zipped(path: Path) -> str | None:
    """Replace the file by a compressed one and return its name; None if that is too large, too."""
    small = path.with_name(f"{path.name}.gz")
    with path.open("rb") as source, gzip.open(small, "wb") as into:
        shutil.copyfileobj(source, into)
    path.unlink()
    if small.stat().st_size <= MOST_BYTES:
        return small.name
    small.unlink()
    return None

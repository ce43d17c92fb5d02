"""Part 5: one step as a trace, by torch's profiler and by the library's own timeline, and what of it is exposed."""

import gzip
import shutil
from pathlib import Path
from typing import Any

import zero
from gpu_parts.doors import Gpu
from gpu_parts.run import Budget, Tell, error_text
from gpu_parts.sizes import Sizes
from gpu_parts.training import Away, Values, running, tokens
from zero.trainer.models import GPTConfig

MOST_BYTES = 15 * 2**20
"""Of a file: larger ones are not worth sending, and are removed."""


def tell_traces(folder: Path, gpu: Gpu, sizes: Sizes, disk: Path, tell: Tell, budget: Budget) -> None:
    """With pages in host memory, where most can go wrong, and with nothing away."""
    for preset in ("cpu", "none"):
        try:
            tell(
                {
                    "kind": "exposed",
                    "model": sizes.traced.name,
                    "preset": preset,
                    **_one(preset, folder, gpu, sizes, disk),
                }
            )
        except (zero.ZeroError, RuntimeError, OSError) as error:
            tell({"kind": "exposed", "preset": preset, "error": error_text(error)})


def _one(preset: str, folder: Path, gpu: Gpu, sizes: Sizes, disk: Path) -> dict[str, Any]:
    config = GPTConfig(**sizes.traced.config)
    batch, files = tokens(config, sizes.traced.rows[0], gpu), []
    activations = sizes.traced.activations
    with running(
        config, gpu, sizes, disk, away=Away(preset), values=Values(), precision="bf16", activations=activations
    ) as run:
        for _ in range(2):
            run.step(batch)
        with zero.record(run.state) as timeline:
            run.step(batch)
        plain = folder / f"timeline-{preset}.json"
        timeline.write(plain)
        files += [_zipped(plain)]
        traced = folder / f"trace-{preset}.json"
        run.settle()
        with zero.record(run.state, profile=True):
            gpu.trace(lambda: run.settled_step(batch), traced)
        files += [_zipped(traced)]
    shares = {row: [share.busy_s, share.exposed_s] for row, share in timeline.hidden().items() if share.busy_s}
    return {
        "tokens": batch[:, 1:].numel(),
        "recorded_s": timeline.step_s,
        "shares": shares,
        "files": [name for name in files if name],
    }


def _zipped(path: Path) -> str | None:
    """The name of the file that takes the place of `path`; None where even that would be too large."""
    small = path.with_name(f"{path.name}.gz")
    with path.open("rb") as source, gzip.open(small, "wb") as into:
        shutil.copyfileobj(source, into)
    path.unlink()
    if small.stat().st_size <= MOST_BYTES:
        return small.name
    small.unlink()
    return None

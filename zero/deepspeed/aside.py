"""What DeepSpeed's scripts ask for beside their engine: lines of some ranks, a loader without an end, memory in use,
recomputation.
"""

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import psutil
import torch.utils.checkpoint

from zero.deepspeed.accelerator import get_accelerator

log = logging.getLogger("zero")


def log_dist(message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """Log `message` on some ranks.

    Args:
        ranks: -1 for all of them; None: rank 0.
    """
    rank, wanted = _rank(), (0,) if ranks is None else tuple(ranks)
    if rank in wanted or -1 in wanted:
        log.log(level, "[Rank %d] %s", rank, message)


def get_local_rank() -> int:
    """Number of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


class RepeatingLoader:
    """Batches of `loader` without an end: after the last one it begins anew."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
            return next(self._batches)


def see_memory_usage(message: str, force: bool = False) -> None:
    """On rank 0, if `force`, what is in use on the device, the most since the last call, and the host's."""
    if not force or _rank() != 0:
        return
    device, host = get_accelerator(), psutil.virtual_memory()
    counts = device.memory_allocated(), device.max_memory_allocated(), device.memory_reserved(), host.used
    now, most, reserved, used = (f"{count / 2**30:.2f} GiB" for count in counts)
    print(f"{message}: device {now}, at most {most}, reserved {reserved}; host {used}, {host.percent}%", flush=True)
    device.reset_peak_memory_stats()


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(*args)`, which runs again in backward in place of keeping what it computed: torch's own."""
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)


non_reentrant_checkpoint = checkpoint


def configure(mpu_: Any = None, *ignored: Any, **further: Any) -> None:
    """Nothing to do: an input of `checkpoint` stays where it is, whole."""


def is_configured() -> bool:
    """It needs no `configure`."""
    return True


def reset() -> None:
    """Nothing is kept between two calls."""


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))

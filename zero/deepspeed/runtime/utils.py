"""`see_memory_usage` of DeepSpeed."""

import psutil

from zero.deepspeed.accelerator import get_accelerator
from zero.distributed.rendezvous import rank_of_process


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print memory in use on the device, its peak since the last call, and that of the host; on rank 0 only.

    Args:
        message: the beginning of the line.
        force: nothing is printed without it.
    """
    if not force or rank_of_process() != 0:
        return
    device, host = get_accelerator(), psutil.virtual_memory()
    counts = device.memory_allocated(), device.max_memory_allocated(), device.memory_reserved(), host.used
    now, peak, reserved, used = (f"{count / 2**30:.2f} GiB" for count in counts)
    print(f"{message}: device {now}, at most {peak}, reserved {reserved}; host {used}, {host.percent}%", flush=True)
    device.reset_peak_memory_stats()

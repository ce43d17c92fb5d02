"""DeepSpeed's function `see_memory_usage`."""

import psutil

from zero.deepspeed.accelerator import get_accelerator
from zero.distributed.rendezvous import rank_of_process


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print on rank 0 the device memory in use, its peak since the last call, and the host memory in use.

    Args:
        message: the beginning of the line.
        force: False: print nothing.
    """
    if not force or rank_of_process() != 0:
        return
    device, host = get_accelerator(), psutil.virtual_memory()
    counts = device.memory_allocated(), device.max_memory_allocated(), device.memory_reserved(), host.used
    now, peak, reserved, used = (f"{count / 2**30:.2f} GiB" for count in counts)
    print(f"{message}: device {now}, at most {peak}, reserved {reserved}; host {used}, {host.percent}%", flush=True)
    device.reset_peak_memory_stats()

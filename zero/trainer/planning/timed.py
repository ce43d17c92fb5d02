"""The shortest time of functions that are called again and again."""

import time
from collections.abc import Callable, Sequence

from zero.platform.device import Device


def fastest_s(works: Sequence[Callable[[], object]], device: Device, limit_s: float) -> list[float]:
    """Call all functions of `works` in turn for `limit_s` seconds; returns the shortest time of each.

    A first turn, which may load code, is not timed.
    """
    for work in works:
        work()
    device.join()
    fastest_s = [float("inf")] * len(works)
    end_s = time.perf_counter() + limit_s
    while fastest_s[-1] == float("inf") or time.perf_counter() < end_s:
        for number, work in enumerate(works):
            begin_s = time.perf_counter()
            work()
            device.join()
            fastest_s[number] = min(fastest_s[number], max(time.perf_counter() - begin_s, 1e-9))
    return fastest_s

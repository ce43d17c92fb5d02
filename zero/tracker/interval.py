"""The time and traffic of the steps since the last row of metrics, on one rank and over all ranks.

Bytes moved and seconds waited are differences of counters that run since the start. Bytes are summed over ranks;
seconds are those of the slowest rank, because it determines the duration of a step.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import astuple, fields
from math import nan

import torch
from torch import Tensor

from zero.distributed.world import Collectives, World
from zero.platform.host_memory import host_peak_bytes
from zero.store import Traffic

TOTALS = (*(field.name for field in fields(Traffic)), *(f"comm_{name}" for name in Collectives._fields), "copy_bytes")
"""Names of a rank's counters: the fields of `Traffic` and of `Collectives`, and the bytes of `Device.copied`."""

WRITTEN = TOTALS.index("write_bytes")

WAITS = torch.tensor([name.endswith(("wait_s", "busy_s")) for name in TOTALS], device="cpu")
"""(len(TOTALS),) bool: whether each total is a time of waits or transfers (`wait_s`, `busy_s`)."""


class Interval:
    """The clock and the counters of one rank since the start, and since the last row.

    Only `end` is collective, so that a summary can still be made after other ranks have failed.

    Args:
        traffic: returns bytes moved and times of this rank's store.

    Attributes:
        peaks_bytes: the largest peaks over ranks at the last row, as (device, host).
    """

    def __init__(self, world: World, traffic: Callable[[], Traffic]) -> None:
        self._world, self._traffic = world, traffic
        self._start_s = self._since_s = time.perf_counter()
        self._start = self._since = self._totals()
        self._untimed = 0  # number of untimed steps since the last row
        self.peaks_bytes = (0, 0)
        self._written_bytes = self._trained_bytes = 0  # by all ranks until the last row; since the first step only

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._start_s

    def paused(self) -> AbstractContextManager[None]:
        """Return a context manager whose time and traffic do not count in the steps.

        The store must be idle on entry, because writes of the last step that end inside would not count either.
        """
        return self._left_out(torch.ones_like(WAITS))

    def clock_stopped(self) -> AbstractContextManager[None]:
        """Return a context manager whose time does not count in the steps.

        Traffic in the block counts, because updates of the last step cause it.
        """
        return self._left_out(WAITS)

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """Context manager for a recorded step, on all ranks. Its time does not count, because recording slows it."""
        with self.clock_stopped():
            yield
        self._untimed += 1

    @contextmanager
    def _left_out(self, which: Tensor) -> Iterator[None]:
        """Context manager that leaves out its block's time, and its part of the totals whose entry in `which` is 1."""
        begin_s, before = time.perf_counter(), self._totals()
        yield
        self._since_s += time.perf_counter() - begin_s
        self._since = self._since + (self._totals() - before) * which

    def end(self, steps: int) -> tuple[int, float, dict[str, Tensor]]:
        """End the interval after `steps` steps, and begin the next one. Collective.

        Returns:
            The number of steps whose time counts; the seconds of each of them, NaN if there is none; and for each of
            `TOTALS`, (W,) the count of every rank.
        """
        now_s, now = time.perf_counter(), self._totals()
        timed = steps - self._untimed
        step_s = (now_s - self._since_s) / timed if timed else nan
        moved = self._collect(now)
        self._since_s, self._since, self._untimed = now_s, now, 0
        return timed, step_s, moved

    def peaks_now(self) -> tuple[int, int]:
        """Return the peaks as (device, host): of other ranks until the last row, of this rank until now."""
        device, host = map(max, self.peaks_bytes, self._peaks_of_rank())
        return device, host

    def written_now(self) -> tuple[int, int]:
        """Return the bytes that all ranks wrote to their stores until the last row, or this rank alone if it has more.

        Returns:
            The bytes since the store was opened, and since the first step.
        """
        written_bytes, before_bytes = (int(totals[WRITTEN]) for totals in (self._totals(), self._start))
        return max(self._written_bytes, written_bytes), max(self._trained_bytes, written_bytes - before_bytes)

    def _totals(self) -> Tensor:
        """Return (len(TOTALS),) fp64 the current totals of this rank."""
        counts = *astuple(self._traffic()), *self._world.traffic, self._world.compute.copied.nbytes
        return torch.tensor(counts, dtype=torch.float64, device="cpu")

    def _collect(self, now: Tensor) -> dict[str, Tensor]:
        """Exchange peaks and totals between all ranks. Collective.

        Returns:
            For each of `TOTALS`, (W,) the count of every rank since the last row.
        """
        peaks_bytes = torch.tensor(self._peaks_of_rank(), dtype=torch.float64, device="cpu")
        values = torch.cat((peaks_bytes, now[WRITTEN : WRITTEN + 1], now - self._start, now - self._since))
        everyone = torch.zeros(self._world.size, len(values), dtype=torch.float64, device=self._world.device)
        everyone[self._world.rank] = values.to(self._world.device)
        self._world.all_reduce(everyone, what="memory peaks and traffic").wait()
        peaks, written, trained, moved = everyone.cpu().split((2, 1, len(TOTALS), len(TOTALS)), dim=1)
        device, host = peaks.amax(dim=0)
        self.peaks_bytes = int(device), int(host)
        self._written_bytes, self._trained_bytes = int(written.sum()), int(trained[:, WRITTEN].sum())
        return dict(zip(TOTALS, moved.T, strict=True))

    def _peaks_of_rank(self) -> tuple[int, int]:
        """Return the peaks of this rank as (device, host)."""
        return self._world.compute.peak_bytes(), host_peak_bytes()


def figures(
    moved: Mapping[str, Tensor], *, steps: int, timed: int, step_s: float, numel: int
) -> dict[str, float | int | None]:
    """Return the values of a row about offload and communication, by key of `tracker.ROW`.

    Without traffic the hidden fraction is 1 and rates are None.

    Args:
        moved: for each of TOTALS, (W,) the count of every rank in `steps` steps; waits count in timed steps only.
        timed: number of steps whose time counts, each of `step_s` seconds.
    """
    read_bytes, write_bytes = (int(moved[name].sum()) for name in ("read_bytes", "write_bytes"))
    received = {
        f"comm/{name}": int(moved[f"comm_{name}"].sum()) for name in ("gather_bytes", "reduce_bytes", "wire_bytes")
    }
    read_s, write_s = (float(moved[name].max()) for name in ("read_s", "write_s"))
    waits_s = moved["comm_wait_s"] / timed
    slowest = int(waits_s.argmin()) if len(waits_s) > 1 else None
    stood_s = float((moved["wait_s"] + moved["comm_wait_s"]).max()) / timed
    busy = moved["busy_s"] > 0
    hidden = 1 - moved["wait_s"][busy] / moved["busy_s"][busy]
    return {
        "speed/compute_s": max(0.0, step_s - stood_s),
        "speed/stall_fraction": min(1.0, stood_s / step_s),
        "speed/hidden_fraction": max(0.0, min(hidden.tolist(), default=1.0)),
        **received,
        "comm/wait_s": float(waits_s.max()),
        "comm/slowest_rank": slowest,
        "comm/slowest_s": None if slowest is None else step_s - float(waits_s[slowest]),
        "offload/read_bytes": read_bytes,
        "offload/write_bytes": write_bytes,
        "offload/copy_bytes": int(moved["copy_bytes"].sum()),
        "offload/wait_s": float(moved["wait_s"].max()) / timed,
        "offload/read_gbps": read_bytes / read_s / 1e9 if read_s > 0 else None,
        "offload/write_gbps": write_bytes / write_s / 1e9 if write_s > 0 else None,
        "offload/bytes_per_param": (read_bytes + write_bytes) / steps / numel,
    }

"""How many rows a second an engine trains: DeepSpeed's `engine.tput_timer`.

The engine starts it with the first forward of a step and stops it where the update is decided, when every rank has
waited for the norm. What a loop does between two steps is not in it; the update itself is, in the next forward.
"""

import time

LEFT_OUT = 2
"""Steps at the beginning, which pay for the start."""


class Throughput:
    """A clock that runs while a step does.

    Args:
        rows: of a step, on all ranks.

    Attributes:
        epoch_count, micro_step_count, global_step_count: what was told to it, and how often it was stopped.
        total_elapsed_time: seconds of the steps that count.
    """

    def __init__(self, rows: int) -> None:
        self.batch_size, self.start_step = rows, LEFT_OUT
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.total_elapsed_time = 0.0
        self._began_s: float | None = None

    def update_epoch_count(self) -> None:
        """Another epoch begins."""
        self.epoch_count, self.micro_step_count = self.epoch_count + 1, 0

    def start(self) -> None:
        """It runs from now on."""
        self._began_s = time.perf_counter()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """It stands still; nothing happens where it did already.

        Args:
            global_step: a whole step has ended.
            report_speed: for old calls; rows of metrics tell the speed.
        """
        if self._began_s is None:
            return
        if self.global_step_count >= self.start_step:
            self.total_elapsed_time += time.perf_counter() - self._began_s
        self._began_s = None
        self.micro_step_count += 1
        self.global_step_count += global_step

    def avg_samples_per_sec(self) -> float:
        """Rows a second over the steps that count; minus infinity, as there, before one has ended."""
        steps = self.global_step_count - self.start_step
        return self.batch_size * steps / self.total_elapsed_time if steps > 0 else float("-inf")

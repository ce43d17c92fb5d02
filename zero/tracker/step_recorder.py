"""The recording of one step of a user's loop, from the step before's end to its own."""

from collections.abc import Callable
from contextlib import ExitStack

from zero.distributed.world import World
from zero.platform.tape import Tape
from zero.platform.timeline import Timeline
from zero.tracker.interval import Interval
from zero.tracker.run_record import RECORDED


class StepRecorder:
    """Recorder of the first step that is complete. Rank 0 records; other ranks only leave the step's time out.

    Args:
        interval: the time of the steps, in which the recorded step does not count.
        wanted: whether to record at all.
    """

    def __init__(self, world: World, tape: Tape, interval: Interval, *, wanted: bool) -> None:
        self._world, self._tape, self._interval, self._wanted = world, tape, interval, wanted
        self._recording: ExitStack | None = None
        self._timeline = Timeline()

    def begin(self, done: int) -> None:
        """Start to record a step, with the loop's own work before it, if `done` steps are enough and none is recorded.

        `end` or `drop` ends the recording.
        """
        if not self._wanted or done < RECORDED - 1:
            return
        self._recording = ExitStack()
        self._recording.enter_context(self._interval.untimed())
        if self._world.rank == 0:
            self._timeline = self._recording.enter_context(self._tape.record(yields=True))

    def end(self, write: Callable[[Timeline], None]) -> None:
        """End the recording, if there is one, and call `write` with its timeline on rank 0. Collective.

        The timeline is empty if a recording of the user's replaced this one; then the next step is recorded instead.
        """
        if self._recording is None:
            return
        self._recording.close()
        self._recording = None
        written = self._world.rank == 0 and bool(self._timeline.spans)
        if written:
            write(self._timeline)
        self._wanted = not self._world.share("written" * written)  # ranks wait for the file here, not in a step

    def drop(self) -> None:
        """Discard the current recording, because it would hold more than one step.

        The exception keeps `Interval.untimed` from counting an untimed step.
        """
        if self._recording is not None:
            error = InterruptedError()
            self._recording.__exit__(type(error), error, None)
            self._recording = None

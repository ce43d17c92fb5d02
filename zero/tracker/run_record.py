"""The rows, summary.json, report and trace that every run leaves, of train.py and of `zero.track`."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from zero.errors import MachineError
from zero.platform.installed import from_here
from zero.tracker import RUNNING, Tracker, write_failure, write_summary
from zero.tracker.meter import Meter, Summary
from zero.tracker.report import run as report
from zero.tracker.report.origin import Defaults

RECORDED = 3
"""The first step that may be recorded, counted from 1 at each start of a run. In earlier steps the engine learns in
which order units are visited."""

NOTHING: Mapping[str, Any] = MappingProxyType({})

Unit = Literal["samples", "tokens", ""]


class RunRecord:
    """The files of one run, from its meter and for its tracker. Every rank has one, and only rank 0 writes.

    Only `log` is collective, because other ranks may have failed before the other methods are called.

    Args:
        folder: the run's folder; None on ranks other than 0.
        checkpoint: returns the folder of the newest checkpoint that this start has saved.
        unit: the unit in which the meter's tokens are counted; "" if speed is not counted.

    Attributes:
        further: further fields of summary.json.
    """

    def __init__(
        self,
        folder: Path | None,
        meter: Meter,
        tracker: Tracker,
        checkpoint: Callable[[], Path | None],
        *,
        unit: Unit = "tokens",
        data_digest: str = "",
    ) -> None:
        self._folder, self._meter, self._tracker, self._checkpoint = folder, meter, tracker, checkpoint
        self._unit, self._data_digest = unit, data_digest
        self.further: dict[str, Any] = {}

    def log(self, *, validated: bool, further: Mapping[str, Any] = NOTHING) -> None:
        """Log a row of metrics, and write the summary so far, which remains if the run is killed. Collective.

        Args:
            validated: whether the row includes the newest validation loss.
            further: values of other keys; values of the row's own keys are left out.
        """
        row = counted_in(self._unit, self._meter.row(validated=validated))
        self.write(RUNNING)
        self._tracker.log(row | {key: value for key, value in further.items() if key not in row})

    def write(self, exit_reason: str) -> Summary:
        """Write summary.json and return the results so far."""
        summary = self._meter.summary(self._data_digest, exit_reason, self._checkpoint())
        if self._folder is not None:
            write_summary(self._folder, self.counted(summary) | self.further)
        return summary

    def write_failure(self, exit_reason: str) -> None:
        """Write summary.json of a run that failed, as far as the disk allows."""
        summary = self._meter.summary(self._data_digest, exit_reason, self._checkpoint())
        if self._folder is not None:
            with suppress(MachineError):
                write_failure(self._folder, self.counted(summary) | self.further)

    def write_report(self, describe: Callable[[BaseException], str], defaults: Defaults | None = None) -> None:
        """Write report.html; a failure becomes a note, because the run itself has ended well.

        Args:
            describe: returns an error as one line.
            defaults: as for `write_run` of the report.
        """
        if self._folder is None:
            return
        try:
            self._tracker.report(report.write_run(self._folder, defaults))
            self._tracker.note(f"report {from_here(self._folder / 'report.html')}")
        except Exception as error:
            self._tracker.note(f"warning: no report: {describe(error)}")

    @contextmanager
    def writing_trace(self) -> Iterator[None]:
        """Context manager that turns a failure to write a trace into a note, because the run goes on without one."""
        try:
            yield
        except (MachineError, RuntimeError) as error:
            self._tracker.note(f"warning: no trace: {error}")

    def counted(self, summary: Summary) -> dict[str, Any]:
        """Return the fields of a summary in the unit of the run."""
        return counted_in(self._unit, summary._asdict())


def counted_in(unit: Unit, figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return figures of a `Meter` with `unit` in place of "tokens" in their keys; without a unit, drop these keys."""
    return {key.replace("tokens", unit): value for key, value in figures.items() if unit or "tokens" not in key}

"""The error of a run that a signal stopped, and the description of any error in one line."""

import signal
from pathlib import Path

from zero.errors import one_line, with_class

MEMORY_ADVICE = "mode=plan with the same settings shows settings that take less memory"


class Interrupted(BaseException):
    """The error of a run that a signal stopped immediately.

    A BaseException like KeyboardInterrupt, so that no `except Exception` catches it and continues.

    Attributes:
        folder: the run's folder; None if the run had not begun.
    """

    folder: Path | None = None

    def __init__(self, signum: int, why: str = "") -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}" + (f": {why}" if why else ""))
        self.exit_code = 128 + signum
        self.why = why


def describe(error: BaseException) -> str:
    """Return an error as one line: its message, its class unless it is a ZeroError, and advice if memory ran out."""
    if isinstance(error, KeyboardInterrupt):
        error = Interrupted(signal.SIGINT)
    text = one_line(error) if isinstance(error, Interrupted) else with_class(error)
    if isinstance(error, MemoryError) or "out of memory" in text or "can't allocate memory" in text:
        text = f"{text.removesuffix('.')}. {MEMORY_ADVICE}"
    return text

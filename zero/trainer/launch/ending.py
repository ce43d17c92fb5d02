"""An exception as one line of text."""

import signal
from pathlib import Path

from zero.errors import one_line, with_class

MEMORY_ADVICE = "mode=plan with the same settings shows which ones take less"


class Interrupted(BaseException):
    """A signal stopped the run at once. Not an Exception, like KeyboardInterrupt, so that no code goes on after it.

    Attributes:
        folder: of the run, if it had begun.
    """

    folder: Path | None = None

    def __init__(self, signum: int, why: str = "") -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}" + (f": {why}" if why else ""))
        self.exit_code = 128 + signum
        self.why = why


def describe(error: BaseException) -> str:
    """Return one line: the class if it is not a ZeroError, the message, and advice if memory ran out."""
    if isinstance(error, KeyboardInterrupt):
        error = Interrupted(signal.SIGINT)
    text = one_line(error) if isinstance(error, Interrupted) else with_class(error)
    if isinstance(error, MemoryError) or "out of memory" in text or "can't allocate memory" in text:
        text = f"{text}; {MEMORY_ADVICE}"
    return text

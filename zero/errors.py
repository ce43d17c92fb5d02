"""The tree of all errors that zero raises on purpose.

    ZeroError                    exit code 1; the message is one line: key or value, problem, remedy
    ├── ConfigError              2  a setting or a call is wrong; raised before anything is allocated
    │   ├── SettingError            a key or a value that no run can have
    │   ├── LayoutError             sizes that do not describe a flat parameter
    │   └── PlanError               a model that cannot be split
    ├── OutsideUnitError         1  a parameter was written to outside a step, or read before it had values
    ├── StaleStateError          1  a spent State, or parameters changed under a live graph
    ├── MachineError             3  a limit or a fault of this machine
    │   └── StoreError              a page that cannot be read or written
    ├── NumericsError            6  the numbers are wrong, and more steps do not mend them
    ├── CheckpointError          4  a checkpoint that is damaged, does not fit, or cannot be written
    ├── Preempted                75 a signal stopped the run, and it has saved
    └── WorldError               5  ranks that cannot go on together
        ├── HandshakeError       2  ranks have different settings, first values or arguments
        ├── DeadlineError        5  a wait ran out; the message names rank and operation
        └── RankFailedError      5  another rank died; the message names it and its cause

`exit_code` is the exit code of the command line; a child without a number has its parent's. 0 is success. A run that a
signal ended at once returns 128 plus the signal's number.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class ZeroError(Exception):
    """The base class of all errors of zero."""

    exit_code = 1


class ConfigError(ZeroError):
    """A setting or a call is wrong, and can be mended in the config or the script."""

    exit_code = 2


class SettingError(ConfigError):
    """A key or a value that no run can have, whatever the other settings are."""


class LayoutError(ConfigError):
    """Sizes or names that do not describe this flat parameter."""


class PlanError(ConfigError):
    """The model cannot be split, placed or initialised."""


class OutsideUnitError(ZeroError):
    """A parameter was written to outside of an update, or read before it had values."""


class StaleStateError(ZeroError):
    """A `State` was used again after the step that consumed it."""


class MachineError(ZeroError):
    """A limit or a fault of this machine: no such GPU, no room, a limit of the system, a disk that fails."""

    exit_code = 3


class StoreError(MachineError):
    """A page could not be read or written whole."""


class NumericsError(ZeroError):
    """The numbers are wrong, and more steps do not mend them."""

    exit_code = 6


class CheckpointError(ZeroError):
    """A checkpoint is damaged, missing, of another model, or could not be written; the message names it."""

    exit_code = 4


class Preempted(ZeroError):
    """A signal stopped the run, and it has saved. 75 is a temporary failure in sysexits.h: start again."""

    exit_code = 75


class WorldError(ZeroError):
    """The ranks cannot go on together."""

    exit_code = 5


class HandshakeError(WorldError):
    """The ranks have different settings, first values or arguments; the message names the first that differs."""

    exit_code = 2


class DeadlineError(WorldError):
    """A wait ran out of time."""


class RankFailedError(WorldError):
    """Another rank failed first; the message names it and its cause."""


def one_line(error: object) -> str:
    """Return the message of an error on one line; empty if it has none."""
    return " ".join(str(error).split())


def with_class(error: BaseException) -> str:
    """Return the message of an error on one line, after its class unless it is a ZeroError."""
    text = one_line(error) or "no message"
    return text if isinstance(error, ZeroError) else f"{type(error).__name__}: {text}"


def in_short(error: BaseException) -> str:
    """Return the message of a library's error on one line of at most 200 characters."""
    return one_line(error)[:200] or type(error).__name__


@contextmanager
def if_it_fails(undo: Callable[[], object]) -> Iterator[None]:
    """Call `undo` if the body raises, and raise the error again."""
    try:
        yield
    except BaseException:
        undo()
        raise

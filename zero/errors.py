"""The class hierarchy of the errors that zero raises on purpose.

    ZeroError                    exit code 1; the message is one line: key or value, problem, remedy
    ├── ConfigError              2  a setting or a call is wrong; raised before anything is allocated
    │   ├── SettingError            a key or a value that no run can have
    │   ├── LayoutError             sizes that do not describe a flat parameter
    │   └── PlanError               a model that cannot be split
    ├── OutsideUnitError         1  a parameter was written to outside a step, or read before it had values
    ├── StaleStateError          1  a `State` used after its step, or parameters changed under a live graph
    ├── MachineError             3  a limit or a fault of this machine
    │   └── StoreError              a page that cannot be read or written
    ├── NumericsError            6  loss or gradients are wrong, and more steps will not repair them
    ├── CheckpointError          4  a checkpoint that is damaged, does not fit, or cannot be written
    ├── Preempted                75 a signal stopped the run, which has saved a checkpoint
    └── WorldError               5  the ranks cannot continue together
        ├── HandshakeError       2  ranks have different settings, first values or arguments
        ├── DeadlineError        5  a wait for other ranks timed out; the message names rank and operation
        └── RankFailedError      5  another rank died; the message names it and its cause

`exit_code` is the exit code of the command line; a class without a number above has its parent's. 0 is success. A run
that a signal ended at once returns 128 plus the signal's number.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class ZeroError(Exception):
    """The base class of all errors of zero."""

    exit_code = 1


class ConfigError(ZeroError):
    """A setting or a call is wrong, and the user can correct it in the config or the script."""

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
    """A `State` was used again after the step that consumed it, or parameters changed under a live graph."""


class MachineError(ZeroError):
    """A limit or a fault of this machine: a missing GPU, too little space, a limit of the system, a failing disk."""

    exit_code = 3


class StoreError(MachineError):
    """A page could not be read or written completely."""


class NumericsError(ZeroError):
    """Loss or gradients are wrong, and more steps will not repair them."""

    exit_code = 6


class CheckpointError(ZeroError):
    """A checkpoint is damaged, missing, of another model, or could not be written; the message names it."""

    exit_code = 4


class Preempted(ZeroError):
    """A signal stopped the run, which has saved a checkpoint.

    The exit code 75 is a temporary failure in sysexits.h: start the run again.
    """

    exit_code = 75


class WorldError(ZeroError):
    """The ranks cannot continue together."""

    exit_code = 5


class HandshakeError(WorldError):
    """The ranks have different settings, first values or arguments; the message names the first that differs."""

    exit_code = 2


class DeadlineError(WorldError):
    """A wait for other ranks timed out."""


class RankFailedError(WorldError):
    """Another rank failed first; the message names it and its cause."""


def one_line(error: object) -> str:
    """Return the message of an error on one line; "" if it has none."""
    return " ".join(str(error).split())


def with_class(error: BaseException) -> str:
    """Return the message of an error on one line, after the name of its class unless it is a ZeroError."""
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

"""Every error that zero raises on purpose, as one tree.

    ZeroError                    exit code 1; the message is one line: what, seen, do
    ├── ConfigError              2  a setting or a call is wrong; a run is refused before anything is allocated
    │   ├── SettingError            a key or a value that no run could have, whatever else is set
    │   ├── LayoutError             sizes that do not describe a flat parameter
    │   └── PlanError               a model that cannot be split as asked
    ├── OutsideUnitError         1  a parameter was written to outside a step, or read before it had values
    ├── StaleStateError          1  a spent State, or parameters changed under a live graph
    ├── MachineError             3  this machine cannot do what was asked
    │   └── StoreError              a page that cannot be read or written
    ├── NumericsError            6  the numbers have gone wrong, and more steps will not mend them
    ├── CheckpointError          4  a checkpoint that is damaged, does not fit, or cannot be written
    ├── Preempted                75 the run was asked to stop, and has saved
    └── WorldError               5  ranks that cannot go on together
        ├── HandshakeError       2  ranks that should say the same do not
        ├── DeadlineError        5  a wait ran out; names rank and operation
        └── RankFailedError      5  another rank died; names it and its cause

`exit_code` is what the command line returns for each; a child without a number has its parent's. 0 is success, and a
run that a signal ended at once returns 128 and the signal's number.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class ZeroError(Exception):
    """Base of all: `except zero.ZeroError` catches what zero itself refuses."""

    exit_code = 1


class ConfigError(ZeroError):
    """A setting or a call is wrong, and can be mended in the config or the script.

    A run is refused before anything is allocated.
    """

    exit_code = 2


class SettingError(ConfigError):
    """A key or a value that no run could have, whatever else is set."""


class LayoutError(ConfigError):
    """Sizes or names that do not describe this flat parameter."""


class PlanError(ConfigError):
    """The model cannot be split, placed or initialised as asked."""


class OutsideUnitError(ZeroError):
    """A parameter was written to outside of an update, or read before it had values."""


class StaleStateError(ZeroError):
    """A `State` was used again after the step that consumed it."""


class MachineError(ZeroError):
    """This machine cannot do what was asked: no such GPU, no room, a limit of the system, a disk that fails."""

    exit_code = 3


class StoreError(MachineError):
    """A page could not be read or written whole."""


class NumericsError(ZeroError):
    """The numbers have gone wrong, and more steps will not mend them."""

    exit_code = 6


class CheckpointError(ZeroError):
    """A checkpoint is damaged, missing, of another model, or could not be written; the message names it."""

    exit_code = 4


class Preempted(ZeroError):
    """A signal asked the run to stop, and it has saved. 75 is a temporary failure in sysexits.h: start again."""

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
    """What an error says, with a blank for every break; nothing if it says nothing."""
    return " ".join(str(error).split())


def with_class(error: BaseException) -> str:
    """One line: what an error says, after its class unless it is one of ours."""
    text = one_line(error) or "no message"
    return text if isinstance(error, ZeroError) else f"{type(error).__name__}: {text}"


def in_short(error: BaseException) -> str:
    """What a library says of an error, on a line that is no longer than a reader wants."""
    return one_line(error)[:200] or type(error).__name__


@contextmanager
def if_it_fails(undo: Callable[[], object]) -> Iterator[None]:
    """Where the body ends with an error, whatever it is, `undo` is called before that goes on."""
    try:
        yield
    except BaseException:
        undo()
        raise

"""The file of frozen values that the checkpoints of one run share.

Steps do not change frozen parameters and their codes, so a save gives the file of the checkpoint before a second name
(a hard link) in place of writing the same bytes again. Each folder stays complete by itself: it can be verified, loaded
and copied alone, and removing older folders leaves the file where it has another name.
"""

from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary

from zero.checkpoint.format.manifest import File
from zero.engine.runtime import Runtime


class FrozenFile(NamedTuple):
    """A published file with a rank's frozen values, all finite; `version` counts the changes of those values."""

    folder: Path
    file: File
    version: int


_PUBLISHED: WeakKeyDictionary[Runtime, FrozenFile] = WeakKeyDictionary()


def frozen_version(runtime: Runtime) -> int:
    """Return the number of changes of frozen values so far."""
    return sum(unit.frozen_version for unit in runtime.units)


def remember(runtime: Runtime, folder: Path, file: File, version: int) -> None:
    """Note that `folder` has this rank's frozen values as they were at `version`."""
    _PUBLISHED[runtime] = FrozenFile(folder.absolute(), file, version)


def recall(runtime: Runtime) -> FrozenFile | None:
    """Return the published file with the frozen values that the run has now; None if there is none."""
    published = _PUBLISHED.get(runtime)
    return published if published is not None and published.version == frozen_version(runtime) else None

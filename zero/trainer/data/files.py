"""Files below a folder, and their split into training and validation. Does not import torch."""

import codecs
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

HEAD_BYTES = 8000  # length of the beginning that decides whether a file is text, as in git


def drawn(octets: bytes) -> float:
    """Hash bytes to a number in [0, 1)."""
    return int.from_bytes(hashlib.sha256(octets).digest()[:6], "big") / 2**48


class TextFile(NamedTuple):
    """A text file below the root folder of the data."""

    path: Path
    key: str
    """Path below the root, with forward slashes."""
    size: int

    @property
    def draw(self) -> float:
        """Hash of the key in [0, 1). It depends on the key alone, so that adding a file does not move other files."""
        return drawn(os.fsencode(self.key))


class Split(NamedTuple):
    """Files for training and files for validation; of a single file, the last `tail` bytes are for validation."""

    train: list[TextFile]
    held: list[TextFile]
    tail: int = 0


def is_text(path: Path) -> bool:
    """Return whether the beginning of a file is text in UTF-8."""
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if not head or b"\0" in head:
        return False
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return True


def files_below(root: Path, wanted: Callable[[Path], bool], skip: Sequence[str] = ()) -> Iterator[TextFile]:
    """Yield files below the root, in the same order on every machine; unreadable files raise OSError.

    Args:
        wanted: returns whether a file is one of them.
        skip: names of folders that are left out.
    """
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name not in skip and not name.startswith("."))
        for name in sorted(files):
            path = Path(folder, name)
            if path.is_file() and wanted(path):
                yield TextFile(path, path.relative_to(root).as_posix(), path.stat().st_size)


def text_files(root: Path, skip: Sequence[str] = ()) -> Iterator[TextFile]:
    """Yield the text files below the root, see `files_below`."""
    return files_below(root, is_text, skip)


def split_files(files: list[TextFile], holdout: float) -> Split:
    """Hold out for validation each file whose `draw` is below `holdout`: at least one file and never all.

    If there is one file only, its end is held out. With 0 or 1 none or all are held out.
    """
    if holdout in (0, 1):
        return Split([], files) if holdout else Split(files, [])
    if len(files) == 1:
        return Split(files, [], tail=max(1, round(files[0].size * holdout)))
    by_draw = sorted(file.draw for file in files)
    below = min(max(holdout, by_draw[1]), by_draw[-1]) if files else holdout
    return Split([file for file in files if file.draw >= below], [file for file in files if file.draw < below])

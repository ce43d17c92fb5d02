"""Read a root, the folder of a run's checkpoints, and the manifest of each; any number of processes may do that.

Published folders are called `step-<step>`. Folders of other names are `Aside`: readers ignore them, except for an old
folder whose step has no other folder, see `publish`.
"""

import contextlib
import os
import re
import stat
from pathlib import Path
from typing import NamedTuple

from zero.checkpoint.files.claim import is_of_this_boot
from zero.checkpoint.files.disk import Disk, closing, read_bytes
from zero.checkpoint.format.manifest import File, Manifest, file_name, index_name, step_name
from zero.checkpoint.format.texts import CAP_BYTES, from_text
from zero.core.suggest import some
from zero.errors import CheckpointError
from zero.platform.files import naming
from zero.platform.step_folders import MANIFEST_NAME, step_of


class Aside(NamedTuple):
    """An unpublished folder in the root; `kind` is "tmp", "old" or "del"."""

    path: Path
    kind: str
    step: int

    @property
    def is_dead_if_unclaimed(self) -> bool:
        """Return whether no save needs the folder unless a process of this machine saves in the root."""
        return self.kind == "del" or is_of_this_boot(self.path.name.rpartition("-")[2])


class Listing:
    """The folders in a root, by their names.

    Args:
        path: the root, which need not exist.

    Raises:
        CheckpointError: from any method, if a file call fails; the message names the path.
    """

    def __init__(self, path: Path, disk: Disk | None = None) -> None:
        self.path = path
        self.disk = disk or Disk()

    def steps(self) -> list[int]:
        """Return the steps in the names of the root's folders, in ascending order. No folder is opened."""
        with naming(self.path, "listing it"):
            return sorted(step for name in self.names() if (step := step_of(name)) is not None)

    def folders(self) -> dict[int, Path]:
        """Return step -> folder of the checkpoints in the root, in ascending order. No folder is opened.

        A folder that an interrupted `publish` has set aside counts if no other folder has its step.
        """
        with naming(self.path, "listing it"):
            aside = {aside.step: aside.path for aside in self.asides() if aside.kind == "old"}
        folders = aside | {step: self.path / step_name(step) for step in self.steps()}
        return dict(sorted(folders.items()))

    def published(self) -> list[int]:
        """Return the steps in the names of folders in the root."""
        with naming(self.path, "listing it"):
            return [step for step in self.steps() if is_folder(self.path / step_name(step), self.disk)]

    def asides(self) -> list[Aside]:
        asides = [_parse(self.path / name) for name in self.names()]
        return [aside for aside in asides if aside is not None and is_folder(aside.path, self.disk)]

    def names(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError):  # the root does not exist before the first save
            return self.disk.names(self.path)
        return []


def read_manifest(folder: Path, disk: Disk | None = None) -> Manifest:
    """Read the manifest of a checkpoint, and check that the folder holds exactly the files that it lists.

    Args:
        folder: a checkpoint's folder, under any name. Must not be a link.

    Raises:
        CheckpointError: a file is missing or unknown, or the manifest is damaged.
    """
    disk = disk or Disk()
    with naming(folder, "listing it"):
        if not is_folder(folder, disk):
            raise CheckpointError(f"{folder}: is a link, or not a folder. Pass the folder itself.")
        check_not_writable(folder / "..", disk)  # not folder.parent, which may be a link
        check_not_writable(folder, disk)
        names = set(disk.names(folder))
    if MANIFEST_NAME not in names:
        if steps := sorted(name for name in names if step_of(name) is not None):
            raise CheckpointError(
                f"{folder}: holds checkpoints and is not one. Write zero.open_latest(world, folder), or open the "
                f"newest, {folder / steps[-1]}."
            )
        raise CheckpointError(f"{folder}: has no {MANIFEST_NAME}, so it was never complete or was damaged later")
    text = read_bytes(disk, folder / MANIFEST_NAME, CAP_BYTES)
    try:
        manifest = from_text(text)
    except CheckpointError as error:
        raise CheckpointError(f"{folder / MANIFEST_NAME}: {error}") from error
    if step_of(folder.name) not in (None, manifest.step):  # a renamed copy would count as another step
        raise CheckpointError(
            f"{folder}: holds step {manifest.step}, not that of its name. Rename it to {step_name(manifest.step)}."
        )
    _check_names(folder, names, manifest)
    return manifest


def check_size(path: Path, file: File, disk: Disk) -> None:
    with naming(path, "reading its size"), closing(disk, disk.open(path)) as fd:
        nbytes = disk.size(fd)
    if nbytes != file.size:
        raise CheckpointError(f"{path}: has {nbytes} bytes, the manifest says {file.size}")


def check_not_writable(folder: Path, disk: Disk) -> None:
    """Raise CheckpointError if every user may replace the contents of `folder`."""
    try:
        mode = disk.mode(folder)
    except FileNotFoundError:
        return
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX and stat.S_ISDIR(mode):
        raise CheckpointError(
            f"{os.path.normpath(folder)}: every user may write to it. If you trust its files, run chmod o-w on it."
        )


def is_folder(path: Path, disk: Disk) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return stat.S_ISDIR(disk.mode(path))
    return False


def parts_in(path: Path) -> list[str]:
    """Return the names of folders in `path` that hold checkpoints with coordinates."""
    named = (folder for folder in path.glob("*-*") if re.fullmatch(r"\w+-\d+(-\w+-\d+)*", folder.name))
    return sorted(folder.name for folder in named if folder.is_dir() and Listing(folder).steps())


def _parse(path: Path) -> Aside | None:
    match = re.fullmatch(r"\.(tmp|old|del)-([0-9]{10})-[0-9a-f]{16}", path.name)
    return Aside(path, match[1], int(match[2])) if match else None


def _check_names(folder: Path, names: set[str], manifest: Manifest) -> None:
    world, files = manifest.world, range(len(manifest.files))
    expected = {MANIFEST_NAME, *(name(file, world) for file in files for name in (file_name, index_name))}
    if missing := sorted(expected - names):
        raise CheckpointError(
            f"{folder}: the files of {world} rank{'s' * (world > 1)} are not complete: {some(missing)} missing"
        )
    if extra := sorted(names - expected):
        raise CheckpointError(
            f"{folder}: has {some([repr(name) for name in extra])}, not in the manifest. Remove what does not "
            "belong here."
        )

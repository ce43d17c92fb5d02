"""Publish checkpoint folders with their manifest.json, and remove them, in one piece: write aside, sync, rename.

A save is written into a folder that nobody believes, `.tmp-<step>-<nonce>`, and gets its name `step-<step>` by one
rename when everything in it is on the disk. Nothing is ever written into a published folder. What is to go is renamed
to `.del-<step>-<nonce>` first and deleted then. Where a step is saved again, the old one waits as
`.old-<step>-<nonce>` while the new one takes its name; a run that dies between these two renames leaves no folder of
that step, and the next run's `sweep` gives the old one its name back.

Hashes keep wrong data from being believed, fsyncs keep a save that was acknowledged from being lost. In order:

    a rank's two files   their bytes (by each rank, in ShardWriter.finish and `write_index`, before `publish`)
    the root's parent    the root's own name: without it the root may be gone, with all that is in it
    manifest.json        its bytes: without it a published folder may have half a manifest
    .tmp-...             the names of the files in it: without it a published folder may be empty
    the root             the new name: without it a save that was acknowledged may still be called .tmp-...
    the root, again      that what is deleted next has no published name: without it half a checkpoint may have one

An fsync that failed is never repeated: the system may have dropped what it could not write, and would report success.
That save has failed; another one writes everything anew.
"""

import contextlib
import errno
import os
import re
import secrets
import stat
import warnings
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from zero.checkpoint.disk import Disk, closing, naming, read_bytes, write_text
from zero.checkpoint.manifest import (
    CAP_BYTES,
    File,
    Index,
    Manifest,
    file_name,
    from_text,
    index_name,
    index_to_text,
    step_name,
)
from zero.errors import CheckpointError, ConfigError
from zero.platform.files import named
from zero.platform.step_folders import MANIFEST_NAME, step_of

_ASIDE = re.compile(r"\.(tmp|old|del)-([0-9]{10})-[0-9a-f]{16}")


class _Aside(NamedTuple):
    """A folder in the root that is not published."""

    kind: str
    step: int
    path: Path


class Root:
    """The folder that holds all checkpoints of a run. One process writes in it at a time; any number may read.

    Args:
        path: made by the first save; its parent exists.

    Raises:
        CheckpointError: from any method, where the system refuses or a folder is not what it should be; one line
            that names the path.
    """

    def __init__(self, path: Path, disk: Disk | None = None) -> None:
        self.path = path
        self.disk = disk or Disk()
        self._begun: set[Path] = set()

    def begin(self, step: int, nonce: str | None = None) -> Path:
        """Make the folder that this save is written into.

        Args:
            nonce: 16 hexadecimal digits, never used before; None: random ones.
        """
        tmp = self._aside("tmp", step, nonce)
        with naming(self.path, "making it"):
            with contextlib.suppress(FileExistsError):
                self.disk.make_folder(self.path)
            # Protects the root's own name. Every time: who made the root may have been killed before this call.
            self.disk.fsync_folder(self.path.parent)
            self._refuse_if_writable(self.path.resolve())
        with naming(tmp, "making it"):
            self.disk.make_folder(tmp)
        self._begun.add(tmp)
        return tmp

    def write_index(self, tmp: Path, rank: int, world: int, index: Index) -> File:
        """Write the index of a rank's file, and synchronise it.

        Returns:
            The file as the manifest lists it.
        """
        text = index_to_text(index)
        write_text(self.disk, tmp / index_name(rank, world), text)
        return File(index.hashes.size, sha256(text.encode()).hexdigest())

    def publish(self, tmp: Path, step: int, manifest_text: str) -> Path:
        """Give what was begun its name. When this returns, the save is acknowledged: no crash takes it back.

        Args:
            tmp: from `begin`; holds every rank's files, each synchronised by who wrote it, and no manifest yet.

        Returns:
            The published folder.

        Raises:
            CheckpointError: the save failed; call `abandon`. What was published before is still there.
        """
        write_text(self.disk, tmp / MANIFEST_NAME, manifest_text)
        with naming(tmp, "synchronising it"):
            self.disk.fsync_folder(tmp)  # protects the names of the files, the manifest's among them
        found = self.read_manifest(tmp).step
        if found != step:
            raise CheckpointError(f"{tmp}: its manifest is that of step {found}, not {step}; save again")
        target = self.path / step_name(step)
        with naming(target, "publishing it"):
            old = self._set_aside(step)
            self._rename(tmp, target, old)
            self.disk.fsync_folder(self.path)  # protects the published name; from here on, the save is acknowledged
        self._begun.discard(tmp)
        if old is not None:
            self._delete(old)  # the fsync above has made the new one's name last
        return target

    def abandon(self, tmp: Path) -> None:
        """Remove what was begun, as far as that is possible. Never raises: an error is being reported already."""
        if tmp in self._begun:
            self._begun.discard(tmp)
            with contextlib.suppress(OSError):  # what is left has a name that nobody believes, and is swept later
                self._erase(tmp)

    def sweep(self) -> None:
        """Put in order what dead runs left behind. For the process that will write here, before it reads `steps`.

        All leftovers but those that this `Root` began are taken for dead: one process writes here at a time. Should
        another one live all the same, its save loses its folder by a rename and fails in one piece: nothing partial is
        published either way.
        """
        with naming(self.path, "sweeping it"):
            self._refuse_if_writable(self.path.resolve())
            published = set(self._published())
            doomed = []
            for aside in self._asides():
                if aside.kind == "old" and aside.step not in published:  # died between the two renames of `publish`
                    self.disk.rename(aside.path, self.path / step_name(aside.step))
                    published.add(aside.step)
                elif aside.path not in self._begun:
                    doomed.append(aside.path)
            self._discard(doomed)

    def steps(self) -> list[int]:
        """Steps that the root has a name for, ascending; `read_manifest` and the files' hashes show what they are."""
        with naming(self.path, "listing it"):
            found = [step_of(name) for name in self._names()]
            return sorted(step for step in found if step is not None)

    def retain(self, keep: int, every: int | None, valid: Callable[[Path], bool]) -> None:
        """Remove what is older than the last `keep` valid checkpoints, but for every step that `every` divides.

        What is newer than those and is not valid is left alone: it may be of a newer version, or evidence. With fewer
        than `keep` valid ones, nothing is removed.

        Args:
            keep: at least 2, so that a newest one that rots unseen is not the only one.
            every: steps, or None to keep no others.
            valid: called from the newest folder on, until `keep` of them are.
        """
        if keep < 2:
            raise ConfigError(f"checkpoint.keep={keep}: at least 2 are kept, so that one may rot; set it to 2 or more")
        kept, doomed = 0, []
        for step in reversed(self._published()):
            folder = self.path / step_name(step)
            if kept < keep:
                kept += valid(folder)
            elif not every or step % every:
                doomed.append(folder)
        with naming(self.path, "removing old checkpoints"):
            self._discard(doomed)

    def read_manifest(self, folder: Path) -> Manifest:
        """The manifest of a folder in which every file is present, regular, and as large as the manifest says.

        Args:
            folder: a published one, here or elsewhere, under its own name or another. Links are not followed.

        Raises:
            CheckpointError: it is none; the line names the file. Nothing was read but the manifest, within its cap.
        """
        with naming(folder, "listing it"):
            if not self._is_folder(folder):
                raise CheckpointError(f"{folder}: is not a folder, or a link to one; give the folder itself")
            self._refuse_if_writable(folder / "..")  # for the root itself may be reached through a link
            self._refuse_if_writable(folder)
            names = self.disk.names(folder)
        if MANIFEST_NAME not in names:
            if steps := sorted(name for name in names if step_of(name) is not None):
                raise CheckpointError(
                    f"{folder}: this is a folder of checkpoints; write zero.open_latest(world, folder), or open its "
                    f"newest, {folder / steps[-1]}"
                )
            raise CheckpointError(f"{folder}: has no {MANIFEST_NAME}; it was never published, or was damaged since")
        manifest = self._parsed(folder / MANIFEST_NAME)
        if step_of(folder.name) not in (None, manifest.step):  # a copy would take that step's place
            raise CheckpointError(
                f"{folder}: holds step {manifest.step}; it was renamed or copied, give it its own name"
            )
        _check_names(folder, names, manifest)
        for rank, file in enumerate(manifest.files):
            path = folder / file_name(rank, manifest.world)
            with naming(path, "asking for its size"), closing(self.disk, self.disk.open(path)) as fd:
                nbytes = self.disk.size(fd)
            if nbytes != file.size:
                raise CheckpointError(f"{path}: has {nbytes} bytes, the manifest says {file.size}")
        return manifest

    def _published(self) -> list[int]:
        """Of the steps, those that are folders: anything else with such a name is not ours to remove."""
        with naming(self.path, "listing it"):
            return [step for step in self.steps() if self._is_folder(self.path / step_name(step))]

    def _parsed(self, path: Path) -> Manifest:
        text = read_bytes(self.disk, path, CAP_BYTES)
        try:
            return from_text(text)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error

    def _refuse_if_writable(self, folder: Path) -> None:
        """Where anybody may put, rename or replace what is in a folder, nobody knows whose checkpoints it holds."""
        try:
            mode = self.disk.mode(folder)
        except FileNotFoundError:
            return
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX and stat.S_ISDIR(mode):
            raise CheckpointError(f"{os.path.normpath(folder)}: anybody may write here; chmod o-w it if you trust it")

    def _set_aside(self, step: int) -> Path | None:
        """Make room for a new folder of this step. Returns where the old one is now, if there is one."""
        target = self.path / step_name(step)
        if target.name not in self._names():
            return None
        if not self._is_folder(target):
            raise CheckpointError(f"{target}: is in the way and is not a folder; remove it")
        # Two old ones of one step would leave `sweep` to guess which was the last.
        self._discard([aside.path for aside in self._asides() if (aside.kind, aside.step) == ("old", step)])
        old = self._aside("old", step)
        self.disk.rename(target, old)
        return old

    def _rename(self, tmp: Path, target: Path, old: Path | None) -> None:
        try:
            self.disk.rename(tmp, target)
        except OSError:
            if old is not None:
                with contextlib.suppress(OSError):  # then `sweep` does it in the next run
                    self.disk.rename(old, target)
            raise

    def _discard(self, folders: Sequence[Path]) -> None:
        """Take these folders' names away, and delete what is in them."""
        if not folders:
            return
        doomed = [self._retire(folder) for folder in folders]
        # Protects from half a checkpoint under a published name: the renames just made, and those of a process that was
        # killed before its own fsync, must be on the disk before anything is deleted.
        self.disk.fsync_folder(self.path)
        for folder in doomed:
            self._delete(folder)

    def _retire(self, folder: Path) -> Path:
        aside = _parse(folder)
        if aside is not None and aside.kind == "del":
            return folder
        step = aside.step if aside is not None else step_of(folder.name)
        assert step is not None
        retired = self._aside("del", step)
        self.disk.rename(folder, retired)
        return retired

    def _delete(self, folder: Path) -> None:
        """Of a folder that is no longer published. What cannot be deleted costs space and harms nothing else."""
        try:
            self._erase(self._retire(folder))
        except OSError as error:
            warnings.warn(
                f"{folder}: {named(error)} while removing it; it is no longer a checkpoint, the next run tries again",
                stacklevel=3,
            )

    def _erase(self, folder: Path) -> None:
        if not self._is_folder(folder):  # behind a link may lie anything
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        for name in self.disk.names(folder):
            self.disk.unlink(folder / name)
        self.disk.remove_folder(folder)

    def _aside(self, kind: str, step: int, nonce: str | None = None) -> Path:
        name = f".{kind}-{step:010d}-{secrets.token_hex(8) if nonce is None else nonce}"
        if not _ASIDE.fullmatch(name):
            raise CheckpointError(
                f"{name!r} is not a folder's name: a step has up to 10 digits, a nonce 16 hexadecimal"
            )
        return self.path / name

    def _asides(self) -> list[_Aside]:
        """Real folders only: a link with such a name is not ours, and what it leads to least of all."""
        found = [_parse(self.path / name) for name in self._names()]
        return [aside for aside in found if aside is not None and self._is_folder(aside.path)]

    def _names(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError):  # nothing was ever saved
            return self.disk.names(self.path)
        return []

    def _is_folder(self, path: Path) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return stat.S_ISDIR(self.disk.mode(path))
        return False


def _parse(path: Path) -> _Aside | None:
    found = _ASIDE.fullmatch(path.name)
    return _Aside(found[1], int(found[2]), path) if found else None


def _check_names(folder: Path, names: Sequence[str], manifest: Manifest) -> None:
    ranks, world = range(manifest.world), manifest.world
    expected = [MANIFEST_NAME, *(name(rank, world) for rank in ranks for name in (file_name, index_name))]
    missing, extra = sorted(set(expected) - set(names)), sorted(set(names) - set(expected))
    if missing:
        whose = "1 rank's" if manifest.world == 1 else f"{manifest.world} ranks'"
        raise CheckpointError(f"{folder}: {_listed(missing)} missing, of {whose} files")
    if extra:
        raise CheckpointError(f"{folder}: {_listed(extra)} not in the manifest; remove what does not belong here")


def _listed(names: Sequence[str]) -> str:
    """At most five, and how many there are. Quoted: a name may hold anything."""
    some = ", ".join(repr(name) for name in names[:5])
    return f"{some} is" if len(names) == 1 else f"{some}{' ...' * (len(names) > 5)} ({len(names)} files) are"

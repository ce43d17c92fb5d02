"""Publish and remove checkpoint folders, each atomically by one rename.

A save is written into `.tmp-<step>-<nonce>`, which readers ignore, and is renamed to `step-<step>` when all of it is on
disk. A published folder is never written to. A folder is renamed to `.del-<step>-<nonce>` before its files are deleted.
If a step is saved again, the old folder is renamed to `.old-<step>-<nonce>` before the new folder gets the name. If the
run dies between these two renames, readers open the old folder under that name, and `sweep` before the next save
renames it back. `sweep_beside` removes what killed saves left in roots that may never be saved into again; `claim` says
which these are.

Hashes detect wrong data, and fsync makes a save durable before it is reported as successful. The calls of fsync, in
order, and what each one protects:

    a rank's files       their bytes (each rank, in ShardWriter.finish and `write_index`, before `publish`)
    the root's parent    the root's own name: without it the root may be lost, with all checkpoints in it
    manifest.json        its bytes: without it a published folder may have half a manifest
    .tmp-...             the names of the files in it: without it a published folder may be empty
    the root             the new name: without it a save reported as successful may still be called .tmp-...
    the root, again      the rename to .del-...: without it a published folder may have half its files

A failed fsync is never repeated, because the kernel may have dropped the bytes and would then report success. The save
fails, and the next save writes all bytes again.
"""

import contextlib
import errno
import glob
import os
import secrets
import warnings
from collections.abc import Callable, Iterable
from hashlib import sha256
from pathlib import Path

from zero.checkpoint.files.claim import Claim, unclaimed
from zero.checkpoint.files.disk import Disk, read_bytes, write_text
from zero.checkpoint.files.listing import (
    Aside,
    Listing,
    check_not_writable,
    check_size,
    is_folder,
    read_manifest,
)
from zero.checkpoint.format.manifest import File, Index, file_name, index_name, step_name
from zero.checkpoint.format.texts import index_cap_bytes, index_to_text
from zero.distributed.world import World
from zero.errors import CheckpointError, if_it_fails
from zero.platform.files import named, naming
from zero.platform.step_folders import MANIFEST_NAME

NO_LINKS = errno.EPERM, errno.ENOTSUP, errno.ENOSYS
"""Errors of a file system that has no hard links."""


class Root(Listing):
    """The folder that holds all checkpoints of a run, as its one writer sees it.

    Args:
        path: the folder; the first save makes it in its parent, which must exist.

    Attributes:
        has_links: False after the file system has refused a hard link.

    Raises:
        CheckpointError: from any method, if a file call fails; the message names the path.
    """

    def __init__(self, path: Path, disk: Disk | None = None) -> None:
        super().__init__(path, disk)
        self.has_links = True
        self._begun: set[Path] = set()
        self._claim: Claim | None = None

    def make(self) -> None:
        """Make the root itself in its parent, unless it exists."""
        with naming(self.path, "making it"):
            with contextlib.suppress(FileExistsError):
                self.disk.make_folder(self.path)
            # Also if the root exists already, because the process that made it may have been killed before its fsync.
            self.disk.fsync_folder(self.path.parent)
            check_not_writable(self.path.resolve(), self.disk)

    def begin(self, step: int) -> Path:
        """Make the temporary folder that the save of `step` is written into, and return its path.

        First call `sweep`, because nobody else removes the files of saves that were killed.
        """
        self.make()
        self.sweep()
        self._claim = self._claim or Claim(self.path, self.disk)
        tmp = self._aside("tmp", step)
        self._begun.add(tmp)
        with if_it_fails(lambda: self._end(tmp)), naming(tmp, "making it"):
            self.disk.make_folder(tmp)
        return tmp

    def write_index(self, tmp: Path, file: int, world: int, index: Index) -> File:
        """Write and fsync the index of a file; return the file's entry for the manifest."""
        text = index_to_text(index)
        write_text(self.disk, tmp / index_name(file, world), text)
        return File(index.hashes.size, sha256(text.encode()).hexdigest())

    def link(self, published: Path, tmp: Path, number: int, world: int, file: File) -> bool:
        """Add a file of a published checkpoint, and its index, to a folder from `begin`; no bytes move.

        Returns:
            False if the file system refuses the link, or the files are not those that `file` describes. Nothing was
            added then.
        """
        names = index_name(number, world), file_name(number, world)
        try:
            for name in names:
                self.disk.link(published / name, tmp / name)
            text = read_bytes(self.disk, tmp / names[0], index_cap_bytes(file.size))
            check_size(tmp / names[1], file, self.disk)
            linked = sha256(text).hexdigest() == file.index_sha256
        except OSError as error:
            # the system may also refuse a link to a file of another user, and the next save links a file of this one
            self.has_links = error.errno not in NO_LINKS or self._is_of_another_user(published / names[1])
            linked = False
        except CheckpointError:  # the files are damaged
            linked = False
        if not linked:
            for name in names:
                with contextlib.suppress(OSError):
                    self.disk.unlink(tmp / name)
        return linked

    def publish(self, tmp: Path, step: int, manifest_text: str) -> Path:
        """Write the manifest and rename the temporary folder to its published name.

        When this returns, the checkpoint is durable: a crash cannot lose it.

        Args:
            tmp: a folder from `begin`, with the files of all ranks, each fsynced by the rank that wrote it.

        Returns:
            The published folder.

        Raises:
            CheckpointError: the save failed; call `abandon`. Published checkpoints are unchanged.
        """
        write_text(self.disk, tmp / MANIFEST_NAME, manifest_text)
        with naming(tmp, "synchronising it"):
            self.disk.fsync_folder(tmp)
        manifest = read_manifest(tmp, self.disk)
        for number, file in enumerate(manifest.files):  # detects a rank that wrote to another disk
            check_size(tmp / file_name(number, manifest.world), file, self.disk)
        target = self.path / step_name(step)
        with naming(target, "publishing it"):
            old = self._set_aside(target, step)
            try:
                self.disk.rename(tmp, target)
            except OSError:
                if old is not None:
                    with contextlib.suppress(OSError):  # `sweep` renames it in the next run
                        self.disk.rename(old, target)
                raise
            self.disk.fsync_folder(self.path)
        if old is not None:
            self._delete(old)
        self._end(tmp)
        return target

    def abandon(self, tmp: Path) -> None:
        """Remove a folder from `begin` as far as possible. Never raises, because the caller reports another error."""
        if tmp in self._begun:
            with contextlib.suppress(OSError):  # `sweep` removes the rest
                self._erase(tmp)
            self._end(tmp)

    def sweep(self) -> None:
        """Remove the unpublished folders of earlier runs, and rename back the old folder of an interrupted `publish`.

        Call it in the process that will write. If another process is still saving into this root, its temporary folder
        is removed, and its whole save fails.
        """
        self._sweep(lambda aside: True)

    def sweep_dead(self) -> None:
        """Remove the unpublished folders of killed saves of this machine as far as possible, and nothing of others.

        Other processes may save into this root meanwhile. Errors are ignored: the save is in another root.
        """
        with contextlib.suppress(OSError, CheckpointError):
            if self.asides():
                with unclaimed(self.path, self.disk) as is_free:
                    if is_free:
                        self._sweep(lambda aside: aside.is_dead_if_unclaimed)

    def _sweep(self, is_dead: Callable[[Aside], bool]) -> None:
        with naming(self.path, "sweeping it"):
            check_not_writable(self.path.resolve(), self.disk)
            published = set(self.published())
            doomed = []
            for aside in filter(is_dead, self.asides()):
                if aside.kind == "old" and aside.step not in published:  # killed between the two renames of `publish`
                    self.disk.rename(aside.path, self.path / step_name(aside.step))
                    published.add(aside.step)
                elif aside.path not in self._begun:
                    doomed.append(aside.path)
            self._discard(doomed)

    def keep_only(self, step: int) -> None:
        """Remove all checkpoints but that of `step`, which is published."""
        doomed = [self.path / step_name(number) for number in self.published() if number != step]
        with naming(self.path, "removing replaced checkpoints"):
            self._discard(doomed)

    def retain(self, keep: int, spared: Callable[[int], bool], valid: Callable[[Path], bool]) -> None:
        """Remove checkpoints older than the last `keep` valid ones, except for the steps that are spared.

        Newer checkpoints that are not valid are kept, because a newer version of the library may have written them. If
        fewer than `keep` are valid, nothing is removed.

        Args:
            keep: at least 2, so that one checkpoint is left if the newest is damaged (but for a frozen file that both
                share).
            spared: returns whether an older step is kept, too.
            valid: returns whether a folder is a valid checkpoint. Called for the newest folders first, until it has
                returned True `keep` times.
        """
        kept, doomed = 0, []
        for step in reversed(self.published()):
            folder = self.path / step_name(step)
            if kept < keep:
                kept += valid(folder)
            elif not spared(step):
                doomed.append(folder)
        with naming(self.path, "removing old checkpoints"):
            self._discard(doomed)

    def _set_aside(self, target: Path, step: int) -> Path | None:
        """Rename the published folder of a step to an "old" name; return the new path, or None if there is none."""
        if target.name not in self.names():
            return None
        if not is_folder(target, self.disk):
            raise CheckpointError(f"{target}: is not a folder, but a checkpoint needs this name. Remove it.")
        # With two old folders of a step, `sweep` could not tell which is newer.
        self._discard(aside.path for aside in self.asides() if (aside.kind, aside.step) == ("old", step))
        old = self._aside("old", step)
        self.disk.rename(target, old)
        return old

    def _discard(self, folders: Iterable[Path]) -> None:
        doomed = [self._retire(folder) for folder in folders]
        if doomed:
            # Also if this call renamed nothing, because the process that did may have been killed before its fsync.
            self.disk.fsync_folder(self.path)
        for folder in doomed:
            self._delete(folder)

    def _retire(self, folder: Path) -> Path:
        """Rename a folder to a "del" name, which readers ignore; return the new path."""
        if folder.name.startswith(".del-"):
            return folder
        retired = self._aside("del", int(folder.name.split("-")[1]))  # from step-<step> or .<kind>-<step>-<nonce>
        self.disk.rename(folder, retired)
        return retired

    def _end(self, tmp: Path) -> None:
        self._begun.discard(tmp)
        if self._claim is not None and not self._begun:
            self._claim.release()
            self._claim = None

    def _delete(self, folder: Path) -> None:
        try:
            self._erase(self._retire(folder))
        except FileNotFoundError:
            pass  # another process removes it, see `sweep_dead`
        except OSError as error:
            warnings.warn(
                f"{folder}: {named(error)} while removing it. It is no longer a checkpoint, and the "
                "next run tries again.",
                stacklevel=3,
            )

    def _erase(self, folder: Path) -> None:
        if not is_folder(folder, self.disk):  # never delete through a link
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        for name in self.disk.names(folder):
            self.disk.unlink(folder / name)
        self.disk.remove_folder(folder)

    def _aside(self, kind: str, step: int) -> Path:
        nonce = secrets.token_hex(8) if self._claim is None else self._claim.nonce()
        return self.path / f".{kind}-{step:010d}-{nonce}"

    def _is_of_another_user(self, path: Path) -> bool:
        with contextlib.suppress(OSError):
            return self.disk.owner(path) != os.geteuid()
        return False


def own_root(path: Path, world: World) -> Root:
    """Return the root in `path` of the checkpoints of `world`, a folder of its own if it has coordinates.

    Raises:
        CheckpointError: the world is a part of the run and has no coordinates.
    """
    if world.size < world.whole.size and not world.coordinates:
        raise CheckpointError(
            f"{path}: worlds without coordinates would write to one name. Open the world by zero.World.from_mesh, or "
            'by zero.World.from_group(..., coordinates={"tp": 1}).'
        )
    return Root(path / "-".join(f"{name}-{place}" for name, place in sorted(world.coordinates.items())))


def sweep_beside(path: Path, world: World) -> None:
    """Remove files of killed saves of this machine in the roots beside `path`, which may never be saved into again.

    These are folders of the same parent, as DeepSpeed's tags, and folders of the same name one level up, as the
    training states in the checkpoints of Trainer, Lightning and Accelerate. Call it in the process that will write.
    """
    path = path.absolute()
    for parent, pattern in ((path.parent, "*"), (path.parent.parent, f"*/{glob.escape(path.name)}")):
        with contextlib.suppress(OSError):
            for folder in parent.glob(pattern):
                own_root(folder, world).sweep_dead()

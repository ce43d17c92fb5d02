"""A model of a disk, in memory, that lists every state that a crash may leave.

The model is stricter than any file system in use:

- any subset of the writes to a file since its last fsync may survive;
- of the files that were created, renamed or removed in a folder since its last fsync, the first n changes survive, for
  any n; this is independent of other folders and of the content of files;
- an fsync of a file does not make its name durable, and an fsync of a folder does not make the files in it durable.

A protocol that is correct in every state of this disk is correct on every disk whose fsync works.
"""

import contextlib
import errno
import itertools
import os
import stat
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zero.checkpoint.files.disk import FOLDER_MODE, Disk
from zero.platform.files import FILE_MODE, READ

Tree = tuple[tuple[str, Any], ...]
"""Content of a folder, sorted by name: the bytes of a file, or the tree of a folder."""


class Killed(BaseException):
    """The process was killed here. Its memory is lost; system calls that it had made are not."""


def kill(call: object) -> Any:
    """A fault for `FaultyDisk`: end the process instead of a call."""
    raise Killed


@dataclass(eq=False)
class _File:
    synced: bytes = b""
    writes: list[tuple[int, bytes]] = field(default_factory=list)

    def now(self) -> bytes:
        return self._after(self.writes)

    def fsync(self) -> None:
        self.synced, self.writes = self.now(), []

    def tree(self) -> Any:
        return self.now()

    def states(self) -> set[Any]:
        kept = itertools.product([False, True], repeat=len(self.writes))
        return {self._after(list(itertools.compress(self.writes, which))) for which in kept}

    def _after(self, writes: list[tuple[int, bytes]]) -> bytes:
        content = bytearray(self.synced)
        for offset, data in writes:
            content.extend(bytes(max(0, offset + len(data) - len(content))))
            content[offset : offset + len(data)] = data
        return bytes(content)


@dataclass(eq=False)
class _Folder:
    synced: dict[str, Any] = field(default_factory=dict)
    changes: list[tuple[str | None, str | None, Any]] = field(
        default_factory=list
    )  # (old name, new name, file or folder)

    def now(self) -> dict[str, Any]:
        return self._after(len(self.changes))

    def fsync(self) -> None:
        self.synced, self.changes = self.now(), []

    def tree(self) -> Any:
        return tuple(sorted((name, node.tree()) for name, node in self.now().items()))

    def states(self) -> set[Any]:
        outcomes: set[Any] = set()
        for count in range(len(self.changes) + 1):
            entries = sorted(self._after(count).items())
            below = [[(name, state) for state in node.states()] for name, node in entries]
            outcomes.update(itertools.product(*below))
        return outcomes

    def _after(self, count: int) -> dict[str, Any]:
        entries = dict(self.synced)
        for gone, new, node in self.changes[:count]:
            if gone is not None:
                del entries[gone]
            if new is not None:
                entries[new] = node
        return entries


class CrashDisk(Disk):
    """A `Disk` whose files are in memory.

    Args:
        tree: durable content at the start.
        most_bytes: largest write, in bytes; a longer one is cut into several, of which any may be lost.
        skip: numbers of fsyncs, counted from 0, that report success and do nothing.
        watch: called after every change; may be set later.

    Attributes:
        synced: the path of each fsync, of files and folders, in order.
        count: number of changes so far.
        kill_at: number of the change, counted from 1, that raises `Killed` instead of being made.
        fail_at: number of the fsync, counted from 0, that raises EIO and does nothing.
        held: open descriptors.
    """

    def __init__(
        self,
        tree: Tree = (),
        *,
        most_bytes: int = 2**30,
        skip: Container[int] = (),
        watch: Callable[[], None] | None = None,
    ) -> None:
        self.synced: list[Path] = []
        self.count = 0
        self.kill_at: int | None = None
        self.fail_at: int | None = None
        self.held: dict[int, tuple[Path, _File]] = {}
        self._top = _grown(tree)
        self._most_bytes = most_bytes
        self.skip = skip
        self.watch = watch
        self._next_fd = 1000

    def tree(self) -> Tree:
        """The current content, as a process sees it."""
        return self._top.tree()

    def crashes(self) -> set[Tree]:
        """Every state that the disk may have after a crash at this moment."""
        return self._top.states()

    def make_folder(self, path: Path) -> None:
        self._make(path, _Folder())

    def lock(self, path: Path, operation: int) -> int:
        raise _refusal(errno.ENOTSUP, path)

    def create(self, path: Path) -> int:
        file = _File()
        self._make(path, file)
        return self._opened(path, file)

    def open(self, path: Path, flags: int = READ) -> int:
        return self._opened(path, self._at(path))

    def size(self, fd: int) -> int:
        file = self.held[fd][1]
        if not isinstance(file, _File):
            raise OSError(errno.EINVAL, "not a regular file")
        return len(file.now())

    def pwrite(self, fd: int, view: memoryview, offset: int) -> int:
        data = bytes(view[: self._most_bytes])
        with self._changing():
            self.held[fd][1].writes.append((offset, data))
        return len(data)

    def pread(self, fd: int, view: memoryview, offset: int) -> int:
        data = self.held[fd][1].now()[offset : offset + len(view)]
        view[: len(data)] = data
        return len(data)

    def fsync(self, fd: int) -> None:
        self._fsync(*self.held[fd])

    def fsync_folder(self, path: Path) -> None:
        self._fsync(path, self._folder(path))

    def forget(self, fd: int, nbytes: int) -> None:
        """Does nothing: it is only a hint to the system."""

    def close(self, fd: int) -> None:
        del self.held[fd]

    def link(self, old: Path, new: Path) -> None:
        self._make(new, self._at(old))

    def rename(self, old: Path, new: Path) -> None:
        self._folder(old)
        if new.name in self._folder(new.parent).now():
            raise _refusal(errno.EEXIST, new)
        assert old.parent == new.parent, "the model supports no other"
        node = self._at(old)
        with self._changing():
            self._folder(old.parent).changes.append((old.name, new.name, node))

    def replace(self, old: Path, new: Path) -> None:
        assert old.parent == new.parent, "the model supports no other"
        node = self._at(old)
        with self._changing():
            self._folder(old.parent).changes.append((old.name, new.name, node))

    def names(self, path: Path) -> list[str]:
        return sorted(self._folder(path).now())

    def unlink(self, path: Path) -> None:
        if isinstance(self._at(path), _Folder):
            raise _refusal(errno.EISDIR, path)
        with self._changing():
            self._folder(path.parent).changes.append((path.name, None, None))

    def remove_folder(self, path: Path) -> None:
        if self._folder(path).now():
            raise _refusal(errno.ENOTEMPTY, path)
        with self._changing():
            self._folder(path.parent).changes.append((path.name, None, None))

    def free_bytes(self, path: Path) -> int:
        return 2**40

    def mode(self, path: Path) -> int:
        return stat.S_IFDIR | FOLDER_MODE if isinstance(self._at(path), _Folder) else stat.S_IFREG | FILE_MODE

    def _at(self, path: Path) -> Any:
        node: Any = self._top
        for name in filter(None, os.path.normpath(path).split("/")):
            if not isinstance(node, _Folder):
                raise _refusal(errno.ENOTDIR, path)
            if name not in (entries := node.now()):
                raise _refusal(errno.ENOENT, path)
            node = entries[name]
        return node

    def _folder(self, path: Path) -> _Folder:
        node = self._at(path)
        if not isinstance(node, _Folder):
            raise _refusal(errno.ENOTDIR, path)
        return node

    def _make(self, path: Path, node: _File | _Folder) -> None:
        parent = self._folder(path.parent)
        if path.name in parent.now():
            raise _refusal(errno.EEXIST, path)
        with self._changing():
            parent.changes.append((None, path.name, node))

    def _opened(self, path: Path, file: _File) -> int:
        self._next_fd += 1
        self.held[self._next_fd] = path, file
        return self._next_fd

    def _fsync(self, path: Path, node: _File | _Folder) -> None:
        number = len(self.synced)
        self.synced.append(path)
        if number == self.fail_at:
            raise _refusal(errno.EIO, path)
        with self._changing():
            if number not in self.skip:
                node.fsync()

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        self.count += 1
        if self.count == self.kill_at:
            raise Killed
        yield
        if self.watch is not None:
            self.watch()


def _grown(tree: Tree) -> _Folder:
    return _Folder({name: _File(below) if isinstance(below, bytes) else _grown(below) for name, below in tree})


def _refusal(code: int, path: Path) -> OSError:
    return OSError(code, os.strerror(code), str(path))

"""An acknowledged save survives every crash, and a published folder is whole, whatever fails or lies in it."""

import contextlib
import errno
import functools
import json
import math
import os
import shutil
import stat
import struct
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.faults.crash import CrashDisk, Killed, Tree, kill
from tests.faults.disks import FaultyDisk, fail
from zero.checkpoint.files.disk import Disk, read_bytes
from zero.checkpoint.files.listing import read_manifest
from zero.checkpoint.files.publish import MANIFEST_NAME, Root
from zero.checkpoint.files.shard import ShardReader, ShardWriter
from zero.checkpoint.format.hashes import FileHash
from zero.checkpoint.format.manifest import File, Index, Manifest, SavedFlat, file_name, index_name, step_name
from zero.checkpoint.format.texts import CAP_BYTES, FORMAT, index_from_text, to_text
from zero.core.layout import Layout
from zero.errors import CheckpointError
from zero.platform.files import appearing, transfer_all
from zero.platform.safetensors_files import FilePart, offsets

WORLD = 2
NUMEL = 1024  # of each rank
PARTS = (FilePart("parameter/weight", torch.float32, (NUMEL,)),)
RUN = Path("/run")
ROOT = RUN / "checkpoints"
BARE: Tree = (("run", ()),)


def content(step: int, version: int, rank: int) -> bytes:
    """Never zeros: those are what a lost write leaves."""
    return struct.pack("<i", 1 + step % 10_000 + 100_000 * version + 50_000 * rank) * NUMEL


def contents(step: int, version: int) -> bytes:
    return b"".join(content(step, version, rank) for rank in range(WORLD))


def manifest(step: int, files: list[File], world: int = WORLD) -> Manifest:
    layout = Layout.of({"weight": (world * NUMEL,)}, world_size=world)
    return Manifest(FORMAT, step, world, (SavedFlat({"parameter": "float32"}, layout, 1),), tuple(files), True, {})


def write_files(root: Root, tmp: Path, step: int, version: int) -> str:
    """As the ranks do it: all write at once, then each synchronises its own. Returns the manifest."""
    with contextlib.ExitStack() as writers:
        ranks = [
            writers.enter_context(ShardWriter(root.disk, tmp / file_name(rank, WORLD), PARTS)) for rank in range(WORLD)
        ]
        for rank, writer in enumerate(ranks):
            writer.write(memoryview(bytearray(content(step, version, rank))))
        files = [root.write_index(tmp, rank, WORLD, Index(writer.finish(), None)) for rank, writer in enumerate(ranks)]
        return to_text(manifest(step, files))


def hashes_of(root: Root, folder: Path, rank: int, file: File) -> FileHash:
    """Return the hashes in the index of a rank's file, if the manifest has its hash."""
    text = read_bytes(root.disk, folder / index_name(rank, WORLD), 10_000)
    if sha256(text).hexdigest() != file.index_sha256:
        raise CheckpointError(f"{folder}: another index")
    return index_from_text(text, file.size).hashes


def save(root: Root, step: int, version: int = 1) -> Path:
    tmp = root.begin(step)
    try:
        return root.publish(tmp, step, write_files(root, tmp, step, version))
    except CheckpointError:
        root.abandon(tmp)
        raise


def one_line(error: CheckpointError, about: Path) -> None:
    assert "\n" not in str(error)
    assert str(about) in str(error)


def accepted(root: Root, folder: Path) -> bytes | None:
    """Return the contents of a folder whose manifest and hashes fit them, else None."""
    try:
        manifest = read_manifest(folder, root.disk)
        data = bytearray(WORLD * 4 * NUMEL)
        for rank, file in enumerate(manifest.files):
            path = folder / file_name(rank, manifest.world)
            hashes = hashes_of(root, folder, rank, file)
            with ShardReader(root.disk, path, hashes, PARTS) as reader, memoryview(data) as view:
                reader.check(0)
                reader.read(offsets(PARTS)[0], view[rank * 4 * NUMEL : (rank + 1) * 4 * NUMEL])
        return bytes(data)
    except CheckpointError as error:
        one_line(error, folder)
        return None


def published(root: Root) -> dict[int, bytes | None]:
    return {step: accepted(root, root.path / step_name(step)) for step in root.steps()}


# Crash states: everything that a strict disk may hold after a power failure at any moment.


@functools.cache
def accepted_tree(name: str, folder: Tree) -> bytes | None:
    root = Root(Path("/"), CrashDisk(((name, folder),)))
    return accepted(root, root.path / name)


Held = tuple[tuple[int, bytes | None], ...]


def published_in(disk: CrashDisk) -> Held:
    """As `published`; each folder is judged once, for most states differ in one."""
    checkpoints = dict(dict(dict(disk.tree())["run"]).get(ROOT.name, ()))
    names = [step_name(step) for step in Root(ROOT, disk).steps()]
    return tuple((int(name[5:]), accepted_tree(name, checkpoints[name])) for name in names)


@functools.cache
def recovered(tree: Tree) -> tuple[Held, Held, bool]:
    """Return the published folders before and after a sweep, and whether anything else is left."""
    disk = CrashDisk(tree)
    before = published_in(disk)
    Root(ROOT, disk).sweep()
    litter = ROOT.name in disk.names(RUN) and any(name.startswith(".") for name in disk.names(ROOT))
    return before, published_in(disk), litter


def multiples_of(every: int | None) -> Callable[[int], bool]:
    """The steps that `checkpoint.keep_every` keeps."""
    return lambda step: every is not None and step % every == 0


class Story:
    """The writes of a run, the promises at each moment, and the laws that a state after a crash breaks.

    Attributes:
        promised: step to contents of which one must be found after a crash.
        states: those seen, each with the promise at that moment.
        broken: how often which law did not hold.

    Args:
        skip: fsyncs to leave out.
        since: number of the fsync before which states are not looked at.
        until: laws of which one that is broken ends the look.
    """

    def __init__(
        self,
        *,
        skip: frozenset[int] = frozenset(),
        since: int = 0,
        until: frozenset[str] = frozenset(),
        most_bytes: int = 4096,
        nested: bool = False,
    ) -> None:
        self.disk = CrashDisk(BARE, most_bytes=most_bytes, skip=skip, watch=self.look)
        self.root = Root(ROOT, self.disk)
        self.promised: dict[int, frozenset[bytes]] = {}
        self.states: set[tuple] = set()
        self.broken: Counter[str] = Counter()
        self.watching = True
        self._complete: dict[int, set[bytes]] = {}
        self._version = 0
        self._nested = nested
        self._since, self._until = since, until

    def save(self, step: int) -> None:
        self._version += 1
        new = contents(step, self._version)
        before = self.promised.get(step)
        self._complete.setdefault(step, set()).add(new)
        if before is not None:
            self.promised[step] = before | {new}  # until it is acknowledged, either one is right
        save(self.root, step, self._version)
        self.promised[step] = frozenset({new})
        self.look()

    def link(self, step: int, source: int) -> None:
        """Publish a step that has the files of another one."""
        folder, tmp = self.root.path / step_name(source), self.root.begin(step)
        self._complete[step] = set(self.promised[source])
        files = read_manifest(folder, self.root.disk).files
        assert all(self.root.link(folder, tmp, number, WORLD, file) for number, file in enumerate(files))
        self.root.publish(tmp, step, to_text(manifest(step, list(files))))
        self.promised[step] = self.promised[source]
        self.look()

    def replace(self, step: int) -> None:
        self.save(step)
        self.promised = {step: self.promised[step]}
        self.root.keep_only(step)
        self.look()

    def retain(self, keep: int, every: int | None = None) -> None:
        newest = self.root.steps()[-keep:]  # one may be whole, and not acknowledged since its last fsync failed
        for step in set(self.promised) - set(newest):
            if not every or step % every:
                del self.promised[step]
        self.root.retain(keep, multiples_of(every), lambda folder: True)
        self.look()

    def start_again(self) -> None:
        """Another process, on the machine as it is: what was told to the system is still there to be seen."""
        self.disk.kill_at = None
        self.disk.held.clear()
        self.root = Root(ROOT, self.disk)
        self.root.sweep()
        self.look()
        self.judge(published_in(self.disk), self.promised)

    def look(self) -> None:
        if not self.watching or len(self.disk.synced) < self._since or self._until & self.broken.keys():
            return
        promise = tuple(sorted(self.promised.items()))
        for tree in self.disk.crashes():
            if (tree, promise) in self.states:
                continue
            self.states.add((tree, promise))
            before, after, litter = recovered(tree)
            self.judge(before, {})
            self.judge(after, self.promised)
            self._count("litter", litter)
            if self._nested:
                self._crash_in_the_sweep(tree)

    def judge(self, state: Held, promised: dict[int, frozenset[bytes]]) -> None:
        held = dict(state)
        self._count("lost", any(held.get(step) not in allowed for step, allowed in promised.items()))
        self._count("partial", any(data is None for data in held.values()))
        self._count("wrong", any(data not in self._complete[step] for step, data in state if data is not None))

    def _count(self, law: str, is_broken: bool) -> None:
        if is_broken:
            self.broken[law] += 1

    def _crash_in_the_sweep(self, tree: Tree) -> None:
        def look() -> None:
            for again in disk.crashes():
                before, after, _ = recovered(again)
                self.judge(before, {})
                self.judge(after, self.promised)

        disk = CrashDisk(tree, watch=look)
        Root(ROOT, disk).sweep()


def the_same_step_again(story: Story) -> None:
    for step in (20, 40, 40):
        story.save(step)


def with_retention(story: Story) -> None:
    for step in (0, 20, 40, 60):
        story.save(step)
        story.retain(2, every=40)


def again_where_the_name_was_not_synchronised(story: Story) -> None:
    """The old one is still aside when the step is saved once more."""
    story.save(20)
    story.save(40)
    story.disk.fail_at = len(story.disk.synced) + 7  # parent, two files of two ranks, manifest, folder, root
    with pytest.raises(CheckpointError, match="EIO"):
        story.save(40)
    assert any(name.startswith(".old-") for name in story.disk.names(ROOT))
    story.save(40)
    story.retain(2)


def with_links(story: Story) -> None:
    """The files outlive the folder in which they were written."""
    story.save(20)
    story.link(40, source=20)
    story.link(60, source=40)
    story.save(80)
    story.retain(2)


def with_replacement(story: Story) -> None:
    """As under a tag: a newer save, which may have fewer steps, is the only one."""
    for step in (40, 20, 60):
        story.replace(step)


STORIES = [
    the_same_step_again,
    with_retention,
    again_where_the_name_was_not_synchronised,
    with_links,
    with_replacement,
]
RETAINING = with_retention, with_links, with_replacement


def test_no_crash_loses_what_was_acknowledged_or_shows_what_is_not_whole():
    for tell in STORIES:
        story = Story(most_bytes=2048)
        tell(story)
        assert not story.broken, f"{tell.__name__}: {story.broken} in {len(story.states)} states"
        assert not story.disk.held
        assert len(story.states) >= 100


@pytest.mark.parametrize("tell", STORIES, ids=lambda tell: tell.__name__)
def test_no_crash_in_the_sweep_after_a_crash_does_either(tell):
    story = Story(nested=True)
    tell(story)
    assert not story.broken, f"{story.broken} in {len(story.states)} states"


def role(path: Path) -> str:
    """Return the name that the protocol gives the fsync of `path`."""
    if path == RUN:
        return "parent"
    if path == ROOT:
        return "root"
    if path.name == MANIFEST_NAME:
        return "manifest"
    return "folder" if path.name.startswith(".tmp-") else "rank"


@pytest.mark.parametrize("tell", STORIES, ids=lambda tell: tell.__name__)
def test_every_fsync_is_needed(tell):
    """Each is left out in turn, and some crash state shows it: a retention without its fsync leaves half a folder."""
    whole = Story()
    tell(whole)
    roles = [role(path) for path in whole.disk.synced]
    if tell is with_retention:
        save, discard = ["rank"] * 4 + ["manifest", "folder", "root"], ["root"]
        assert roles == ["parent", *save] * 4 + discard
    for number, kind in enumerate(roles):
        if number == whole.disk.fail_at:  # it is left out as it is
            continue
        is_discard = kind == roles[number - 1] == "root" and tell in RETAINING
        laws = frozenset({"partial"} if is_discard else {"lost"} if tell in RETAINING else {"lost", "partial"})
        story = Story(skip=frozenset({number}), since=number, until=laws)
        tell(story)
        if kind == "parent" and number > 0:
            assert not story.broken  # it matters again where a run was killed before it, see below
            continue
        assert "wrong" not in story.broken, "hashes see to that, with or without fsyncs"
        assert laws & story.broken.keys(), f"nothing tells that fsync {number}, of {kind}, is left out"


def calls_of(tell: Callable[[Story], None]) -> int:
    story = Story()
    story.watching = False
    tell(story)
    return story.disk.count


def killed_and_started_again(tell: Callable[[Story], None], at: int, skip: frozenset[int] = frozenset()) -> Story:
    """Killed in place of a call; a new run sweeps, saves the newest step again and removes old ones.

    The machine goes on, so what is seen may be on no disk yet: this is where a sweep that deletes too early shows.
    """
    story = Story(skip=skip)
    story.watching = False
    story.disk.kill_at = at
    with pytest.raises(Killed):
        tell(story)
    story.watching = True
    story.look()
    story.start_again()
    story.save(max(story.promised, default=20))
    story.retain(2)
    return story


@pytest.mark.parametrize("tell", STORIES[:2], ids=lambda tell: tell.__name__)
def test_a_run_killed_at_any_call_leaves_the_next_one_everything(tell):
    for at in range(1, calls_of(tell) + 1):
        story = killed_and_started_again(tell, at)
        assert not story.broken, f"killed at call {at}: {story.broken} of {len(story.states)} states"


def test_a_sweep_synchronises_what_it_sees_before_it_deletes():
    """A killed run's renames may not be on the disk: the old one's files must not go before its name has."""
    violations = Counter()
    for at in range(1, calls_of(the_same_step_again) + 1):
        story = Story()
        story.watching = False
        story.disk.kill_at = at
        with pytest.raises(Killed):
            the_same_step_again(story)
        story.watching = True
        story.disk.skip = range(len(story.disk.synced), 10**6)
        story.start_again()
        violations.update(story.broken)
    assert violations["lost"]
    assert violations["partial"]


def test_the_root_of_a_killed_run_is_synchronised_by_the_next_one():
    """The first run made it, and died before the fsync of its parent."""
    assert not killed_and_started_again(the_same_step_again, at=2).broken
    assert "lost" in killed_and_started_again(the_same_step_again, at=2, skip=frozenset({1})).broken


def test_no_failed_fsync_is_repeated_and_none_loses_anything():
    for tell in STORIES[:2]:
        whole = Story()
        tell(whole)
        for number, path in enumerate(whole.disk.synced):
            story = Story(since=number)
            story.disk.fail_at = number
            with pytest.raises(CheckpointError, match="EIO"):
                tell(story)
            assert story.disk.synced[-1].name.split("-")[:2] == path.name.split("-")[:2]  # it was the last one
            story.save(40)
            story.save(60)
            story.retain(2)
            assert not story.broken, f"{tell.__name__}, fsync {number} of {path} failed: {story.broken}"
            assert not story.disk.held


def test_another_run_that_sweeps_while_this_one_saves_costs_a_save_and_no_more():
    """At any call: two runs in one root are a mistake, not a disaster."""
    for at in range(1, calls_of(the_same_step_again) + 1):
        story = Story()
        watch = story.look

        def sweep_once(story=story, watch=watch, at=at) -> None:
            watch()
            if story.disk.count == at and story.watching:
                story.watching = False
                Root(ROOT, story.disk).sweep()
                story.watching = True
                watch()

        story.disk.watch = sweep_once
        with warnings.catch_warnings(), contextlib.suppress(CheckpointError):
            warnings.simplefilter("ignore")  # both delete the same folder
            the_same_step_again(story)
        story.disk.watch = story.look
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            story.start_again()
        assert not story.broken, f"swept at call {at}: {story.broken}"


def appeared(is_folder: bool, skip: frozenset[int] = frozenset()) -> tuple[int, set[Any], set[Any]]:
    """Let a file replace another, or a folder appear.

    Returns:
        The number of fsyncs, the contents under the name after a crash at any moment, and after one at the end.
    """
    disk = CrashDisk((("run", () if is_folder else (("a", b"old"),)),), skip=skip, most_bytes=2)
    seen: set[Any] = set()

    def contents_now() -> set[Any]:
        return {dict(dict(tree)["run"]).get("a") for tree in disk.crashes()}

    disk.watch = lambda: seen.update(contents_now())
    with appearing(RUN / "a", replaces=not is_folder, files=disk) as unfinished:
        if is_folder:
            disk.make_folder(unfinished)
        fd = disk.create(unfinished / "file" if is_folder else unfinished)
        transfer_all(disk.pwrite, fd, memoryview(b"new"), 0)
        disk.close(fd)
    assert not disk.held
    return len(disk.synced), seen, contents_now()


@pytest.mark.parametrize("is_folder", [False, True])
def test_what_appears_is_whole_or_as_it_was_in_every_crash_state_and_each_fsync_is_needed(is_folder: bool):
    old, new = (None, (("file", b"new"),)) if is_folder else (b"old", b"new")
    count, seen, last = appeared(is_folder)
    assert (count, seen, last) == (2 + is_folder, {old, new}, {new})
    for number in range(count):
        _, seen, last = appeared(is_folder, frozenset({number}))
        assert (seen, last) != ({old, new}, {new}), f"nothing tells that fsync {number} is left out"


def test_an_exception_or_a_taken_name_leaves_the_folder_as_it_was(tmp_path):
    def write(replaces: bool) -> None:
        with appearing(tmp_path / "a", replaces=replaces) as unfinished:
            unfinished.mkdir()
            (unfinished / "b").touch()
            if replaces:
                raise KeyboardInterrupt

    (tmp_path / "a").write_text("old")
    for replaces, error in ((True, KeyboardInterrupt), (False, FileExistsError)):
        with pytest.raises(error):
            write(replaces)
        assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "old")]


# Every call fails in turn, once and for ever, over a real folder.


@contextlib.contextmanager
def leftovers_are_warned_of():
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        yield
    for warning in warned:
        assert "while removing it. It is no longer a checkpoint" in str(warning.message), warning.message


def live(root: Root, promised: dict[int, set[bytes]]) -> int:
    """A run's life: sweep, save, save again, remove. Returns how many of these failed; `promised` says what must be."""
    errors = 0
    for number, step in enumerate((None, 40, 40, 60, 0)):
        try:
            if step is None:
                root.sweep()
            elif step:
                new = contents(step, number)
                if step in promised:
                    promised[step].add(new)
                save(root, step, number)
                promised[step] = {new}
            else:
                seen = published(Root(root.path))  # with one, perhaps, that is whole and was not acknowledged
                for old in set(promised) - set(sorted(seen)[-2:]):
                    del promised[old]
                root.retain(2, multiples_of(None), lambda folder: accepted(root, folder) is not None)
        except CheckpointError as error:
            one_line(error, root.path.parent)
            errors += 1
    return errors


@pytest.fixture
def in_memory():
    """A folder where a file is durable at once, for thousands of files."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def test_the_nth_call_fails_and_the_last_good_one_is_intact(in_memory):
    """Each call fails once with EIO, and from every third one on the disk is full."""
    made = in_memory / "made" / "checkpoints"
    made.parent.mkdir()
    for step in (0, 20):
        save(Root(made), step)
    Root(made).begin(30)

    def one_life(number: int, disk: FaultyDisk) -> tuple[int, dict]:
        folder = in_memory / str(number)
        shutil.copytree(made.parent, folder)
        root, promised = Root(folder / "checkpoints", disk), {step: {contents(step, 1)} for step in (0, 20)}
        with leftovers_are_warned_of():
            errors = live(root, promised)
        after = Root(root.path)
        remaining = published(after)
        assert None not in remaining.values(), f"call {number} failing leaves something partial published"
        after.sweep()
        remaining = published(after)
        assert None not in remaining.values()
        lost = [step for step, allowed in promised.items() if remaining.get(step) not in allowed]
        assert not lost, f"call {number} failing loses steps {lost}"
        assert not [name for name in os.listdir(root.path) if name.startswith(".")]
        shutil.rmtree(folder)
        return errors, remaining

    undisturbed = FaultyDisk()
    assert one_life(0, undisturbed) == (0, {40: contents(40, 2), 60: contents(60, 3)})
    assert len(undisturbed.calls) > 100
    descriptors = os.listdir("/proc/self/fd")
    count = len(undisturbed.calls)
    disks = [FaultyDisk(fail(errno.EIO), at=at) for at in range(1, count + 1)]
    disks += [FaultyDisk(fail(errno.ENOSPC), at=at, on=True) for at in range(1, count + 1, 3)]
    failed = sum(one_life(number, disk)[0] > 0 for number, disk in enumerate(disks, 1))
    assert failed > len(disks) // 2
    assert os.listdir("/proc/self/fd") == descriptors


def test_nothing_is_ever_written_under_a_published_name(tmp_path):
    disk = FaultyDisk()
    root = Root(tmp_path / "checkpoints", disk)
    live(root, {})
    changing = [args[-1] for name, args in disk.calls if name in ("make_folder", "create", "unlink")]
    assert len(changing) > 15
    assert not [path for path in changing if path.parent.name.startswith("step-")]
    removed = [args[0] for name, args in disk.calls if name == "remove_folder"]
    assert removed
    assert all(path.name.startswith(".del-") for path in removed)


# What may lie in a root, and in a checkpoint.


@pytest.fixture
def root(tmp_path) -> Root:
    return Root(tmp_path / "checkpoints")


def test_what_is_made_belongs_to_its_owner_alone(root):
    before = os.umask(0)
    try:
        folder = save(root, 20)
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(root.path).st_mode) == 0o700
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    assert {stat.S_IMODE(os.stat(path).st_mode) for path in folder.iterdir()} == {0o600}
    files = {name(rank, 2) for rank in range(2) for name in (file_name, index_name)}
    assert {path.name for path in folder.iterdir()} == {MANIFEST_NAME, *files}


def test_steps_are_in_order_of_numbers(root):
    assert root.steps() == []
    for step in (10, 9, 100, 9_999_999_999, 0):
        save(root, step)
    assert root.steps() == [0, 9, 10, 100, 9_999_999_999]


JUNK = [
    "step-10",
    "step-0000000020 (copy)",
    "step-0000000020\n",
    "step-٠٠٠٠٠٠٠٠٢٠",
    ".tmp-0000000020-" + "0" * 16,
    ".old-0000000020-" + "0" * 15,
    ".del-0000000020-" + "0" * 16,
    "latest",
]


def test_junk_is_no_step_and_stays(root):
    folder = save(root, 9)
    save(root, 10)
    for name in JUNK:
        shutil.copytree(folder, root.path / name)
    (root.path / "step-0000000011").write_text("a file")
    (root.path / "step-0000000012").symlink_to(folder)
    (root.path / "step-0000000013").symlink_to("nowhere")
    os.mkfifo(root.path / "step-0000000014")
    assert root.steps() == list(range(9, 15))
    for step in range(11, 15):
        with pytest.raises(CheckpointError, match="is a link, or not a folder"):
            read_manifest(root.path / step_name(step), root.disk)
    root.sweep()
    root.retain(2, multiples_of(None), lambda folder: True)
    swept = {name for name in JUNK if name.startswith((".tmp-", ".del-"))}
    assert set(os.listdir(root.path)) == (set(JUNK) - swept) | {step_name(step) for step in range(9, 15)}


def test_links_are_not_swept_and_what_they_lead_to_least_of_all(root, tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.tex").write_text("x")
    save(root, 20)
    for kind in ("tmp", "old", "del"):
        (root.path / f".{kind}-0000000040-{'0' * 16}").symlink_to(precious)
    root.sweep()
    assert root.steps() == [20]
    assert (precious / "thesis.tex").exists()
    tmp = root.begin(60)
    tmp.rmdir()
    tmp.symlink_to(precious)
    root.abandon(tmp)
    assert (precious / "thesis.tex").exists()


@pytest.mark.parametrize(
    "put", [lambda path: path.write_text("x"), lambda path: path.symlink_to("/")], ids=["file", "link"]
)
def test_what_is_in_the_way_of_a_step_is_not_removed(root, put):
    save(root, 20)
    put(root.path / step_name(40))
    with pytest.raises(CheckpointError, match="step-0000000040: is not a folder, but a checkpoint needs this name"):
        save(root, 40)
    assert os.path.lexists(root.path / step_name(40))
    assert published(root) == {20: contents(20, 1), 40: None}
    assert not [name for name in os.listdir(root.path) if name.startswith(".")]


def test_the_root_is_made_and_what_is_above_it_is_not(tmp_path):
    with pytest.raises(CheckpointError, match=r"run/checkpoints: ENOENT .* while making it"):
        save(Root(tmp_path / "run" / "checkpoints"), 20)
    (tmp_path / "run").write_text("x")
    with pytest.raises(CheckpointError, match="ENOTDIR"):
        save(Root(tmp_path / "run" / "checkpoints"), 20)


def test_a_root_may_be_reached_through_a_link_and_by_a_relative_name(tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    (tmp_path / "checkpoints").symlink_to(tmp_path / "disk")
    monkeypatch.chdir(tmp_path)
    root = Root(Path("checkpoints"))
    save(root, 20)
    save(root, 20, 2)
    root.sweep()
    assert published(root) == {20: contents(20, 2)}
    assert os.listdir("disk") == ["step-0000000020"]


@pytest.mark.parametrize("linked", [False, True])
def test_a_world_writable_root_is_refused(tmp_path, linked):
    path = tmp_path / "disk"
    folder = save(Root(path), 20)
    if linked:
        (tmp_path / "link").symlink_to(path)
        path = tmp_path / "link"
    root = Root(path)
    for mode in (0o755, 0o775, 0o1777):
        path.chmod(mode)
        read_manifest(path / folder.name, root.disk)
    path.chmod(0o757)
    for look in (lambda: read_manifest(path / folder.name, root.disk), root.sweep, lambda: save(root, 40)):
        with pytest.raises(CheckpointError, match=rf"^{tmp_path}/\w+: every user may write to it\. .* chmod o-w"):
            look()
    assert os.listdir(path) == [folder.name]


def replaced(name: str, put: Callable[[Path], object]) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        (folder / name).rename(folder.parent / "elsewhere")
        put(folder / name)

    return damage


def grow(name: str, by: int) -> Callable[[Path], object]:
    return lambda folder: os.truncate(folder / name, os.path.getsize(folder / name) + by)


def retold(change: Callable[[Manifest], Manifest]) -> Callable[[Path], object]:
    """A manifest that is right in itself and wrong about the folder."""

    def damage(folder: Path) -> None:
        manifest = read_manifest(folder)
        (folder / MANIFEST_NAME).write_text(to_text(change(manifest)))

    return damage


def reworded(old: str, new: str) -> Callable[[Path], object]:
    """With a hash that fits: whoever damages a file on purpose can compute one."""

    def damage(folder: Path) -> None:
        text = (folder / MANIFEST_NAME).read_text()
        assert old in text
        head = text.replace(old, new).rpartition('"sha256"')[0]
        (folder / MANIFEST_NAME).write_text(f'{head}"sha256":"{sha256(head.encode()).hexdigest()}"}}\n')
        assert json.loads((folder / MANIFEST_NAME).read_text())

    return damage


A, B = file_name(0, WORLD), file_name(1, WORLD)
INDEX = index_name(1, WORLD)
DAMAGE = {
    "no manifest": (lambda folder: (folder / MANIFEST_NAME).unlink(), "has no manifest.json"),
    "an empty manifest": (
        lambda folder: os.truncate(folder / MANIFEST_NAME, 0),
        "manifest.json: the manifest is damaged",
    ),
    "a manifest and more": (grow(MANIFEST_NAME, 1), "manifest.json: the manifest is damaged"),
    "a manifest that fills the disk": (grow(MANIFEST_NAME, CAP_BYTES), f"more than the limit of {CAP_BYTES}"),
    "a FIFO as manifest": (replaced(MANIFEST_NAME, os.mkfifo), "manifest.json: EINVAL .not a regular file"),
    "a device as manifest": (
        replaced(MANIFEST_NAME, lambda path: path.symlink_to("/dev/zero")),
        "manifest.json: ELOOP",
    ),
    "a rank's index missing": (
        lambda folder: (folder / INDEX).unlink(),
        f"the files of 2 ranks are not complete: {INDEX} missing",
    ),
    "no rank's file": (lambda folder: [(folder / name).unlink() for name in (A, B)], f"{A}, {B} missing"),
    "something with a strange name": (lambda folder: (folder / "a\nb").mkdir(), r"'a\\nb', not in the manifest"),
    "many things": (lambda folder: [(folder / f"x{n}").mkdir() for n in range(9)], r"'x4' and 4 more, not in"),
    "a manifest of fewer ranks": (
        retold(lambda m: manifest(m.step, list(m.files[:1]), 1)),
        "rank-00000-of-00001.json",
    ),
    "a manifest of more ranks": (
        retold(lambda m: manifest(m.step, [m.files[0]] * 9, 9)),
        r"rank-00001-of-00009.json, .* and 13 more missing",
    ),
    "a manifest of another step": (
        retold(lambda m: m._replace(step=60)),
        "0020: holds step 60, not that",
    ),
    "a newer format": (reworded('"format":3', '"format":4'), "format 4, but this version of zero reads format 3"),
    "another name": (
        lambda folder: folder.rename(folder.parent / step_name(40)),
        "0040: holds step 20, not that of its name",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_what_is_not_whole_is_refused_in_one_line(root, name):
    damage, expected = DAMAGE[name]
    folder = save(root, 20)
    assert read_manifest(folder, root.disk).step == 20
    damage(folder)
    folder = root.path / step_name(root.steps()[-1])
    descriptors = os.listdir("/proc/self/fd")
    with pytest.raises(CheckpointError, match=expected) as refused:
        read_manifest(folder, root.disk)
    assert str(refused.value).startswith(str(root.path))
    assert "\n" not in str(refused.value)
    assert os.listdir("/proc/self/fd") == descriptors


def test_files_of_equal_size_that_changed_places_are_told_by_their_hashes(root):
    folder = save(root, 20)
    (folder / A).rename(root.path / "x")
    (folder / B).rename(folder / A)
    (root.path / "x").rename(folder / B)
    read_manifest(folder, root.disk)
    assert accepted(root, folder) is None


def test_a_link_to_a_checkpoint_is_none_and_a_folder_of_any_name_is(root, tmp_path):
    folder = save(root, 20)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(CheckpointError, match="link: is a link, or not a folder"):
        read_manifest(tmp_path / "link", root.disk)
    with pytest.raises(CheckpointError, match="nowhere: is a link, or not a folder"):
        read_manifest(tmp_path / "nowhere", root.disk)
    with pytest.raises(CheckpointError, match=r"manifest\.json: is a link, or not a folder"):
        read_manifest(folder / MANIFEST_NAME, root.disk)
    shutil.copytree(folder, tmp_path / "the best one")
    assert read_manifest(tmp_path / "the best one", root.disk).step == 20


def test_only_what_would_be_accepted_is_published(root):
    """A rank that wrote to a disk of its own, a manifest of another save."""
    save(root, 20)
    for spoil, expected in [
        (lambda tmp, text: ((tmp / B).unlink(), text)[1], f"{B} missing"),
        (lambda tmp, text: (os.truncate(tmp / A, 100), text)[1], "has 100 bytes"),
        (lambda tmp, text: ((tmp / "core").write_text("x"), text)[1], "'core', not in the manifest"),
        (lambda tmp, text: text[:-5], "damaged or cut short"),
        (lambda tmp, text: text.replace('"step":40', '"step":41'), "not the hash"),
    ]:
        tmp = root.begin(40)
        text = write_files(root, tmp, 40, 1)
        with pytest.raises(CheckpointError, match=expected):
            root.publish(tmp, 40, spoil(tmp, text))
        root.abandon(tmp)
        assert os.listdir(root.path) == [step_name(20)]


def test_abandoning_touches_nothing_but_what_was_begun(root):
    folder = save(root, 20)
    other = Root(root.path).begin(40)
    for path in (folder, other, root.path, root.path / "nothing"):
        root.abandon(path)
    assert folder.exists()
    assert other.exists()
    mine = root.begin(40)
    write_files(root, mine, 40, 1)
    root.abandon(mine)
    root.abandon(mine)
    assert not mine.exists()


def test_a_sweep_leaves_what_this_run_has_begun(root):
    dead = Root(root.path).begin(40)
    mine = root.begin(40)
    text = write_files(root, mine, 40, 1)
    root.sweep()
    assert not dead.exists()
    root.publish(mine, 40, text)
    assert published(root) == {40: contents(40, 1)}


def test_a_sweep_gives_an_old_one_its_name_back_only_where_there_is_no_new_one(root):
    save(root, 20).rename(root.path / f".old-0000000020-{'0' * 16}")
    assert root.steps() == []
    root.sweep()
    assert published(root) == {20: contents(20, 1)}
    shutil.copytree(root.path / step_name(20), root.path / f".old-0000000020-{'0' * 16}")
    shutil.rmtree(root.path / step_name(20))
    save(root, 20, 2)
    root.sweep()
    assert published(root) == {20: contents(20, 2)}
    assert os.listdir(root.path) == [step_name(20)]


def test_the_last_of_two_old_ones_is_what_comes_back(tmp_path):
    """The first could not be deleted when the second was published; then a run dies between the two renames."""
    made = Root(tmp_path / "made")
    save(made, 20, 1).rename(made.path / f".old-0000000020-{'0' * 16}")  # sorted, it is the first
    save(made, 20, 2)

    def one_life(number: int, disk: FaultyDisk) -> bytes | None:
        folder = tmp_path / str(number)
        shutil.copytree(made.path, folder)
        with contextlib.suppress(Killed):
            save(Root(folder, disk), 20, 3)
        Root(folder).sweep()
        return published(Root(folder))[20]

    undisturbed = FaultyDisk()
    assert one_life(0, undisturbed) == contents(20, 3)
    outcomes = [one_life(at, FaultyDisk(kill, at=at, on=True)) for at in range(1, len(undisturbed.calls) + 1)]
    assert set(outcomes) == {contents(20, 2), contents(20, 3)}


def test_where_the_new_one_cannot_take_the_name_the_old_one_has_it_back_at_once(root):
    class Refusing(Disk):
        def rename(self, old: Path, new: Path) -> None:
            if old.name.startswith(".tmp-"):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            super().rename(old, new)

    save(root, 40)
    with pytest.raises(CheckpointError, match=r"step-0000000040: EIO .* while publishing it"):
        save(Root(root.path, Refusing()), 40, 2)
    assert published(root) == {40: contents(40, 1)}
    assert os.listdir(root.path) == [step_name(40)]


def test_what_cannot_be_deleted_is_said_and_the_save_stands(root):
    save(root, 40)

    class Denying(Disk):
        def unlink(self, path: Path) -> None:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with pytest.warns(UserWarning, match=r"\.old-0000000040-.*: EACCES .* while removing it"):
        save(Root(root.path, Denying()), 40, 2)
    assert published(root) == {40: contents(40, 2)}


# Retention.


def test_what_cannot_be_judged_is_not_removed(root):
    for step in range(0, 100, 20):
        save(root, step)

    def judge(folder: Path) -> bool:
        if folder.name == step_name(60):
            raise CheckpointError("the disk is gone")
        return True

    with pytest.raises(CheckpointError, match="gone"):
        root.retain(2, multiples_of(None), judge)
    assert root.steps() == [0, 20, 40, 60, 80]


@settings(max_examples=300, deadline=None)
@given(
    steps=st.dictionaries(st.integers(0, 50), st.booleans(), max_size=12),
    keep=st.integers(2, 5),
    every=st.none() | st.integers(1, 20),
)
def test_retention_keeps_enough_valid_ones_and_removes_only_older_ones(steps, keep, every):
    tree = tuple(sorted((step_name(step), ()) for step in steps))
    root = Root(ROOT, CrashDisk((("run", (("checkpoints", tree),)),)))
    root.retain(keep, multiples_of(every), lambda folder: steps[int(folder.name[5:])])
    left = root.steps()
    valid = sorted(step for step, good in steps.items() if good)
    assert set(valid[-keep:]) <= set(left)
    removed = set(steps) - set(left)
    assert all(step < valid[-keep] for step in removed)
    assert not removed or len(valid) >= keep
    assert all(every is None or step % every for step in removed)
    oldest = valid[-keep] if len(valid) >= keep else -math.inf
    assert not [step for step in left if step < oldest and (every is None or step % every)]

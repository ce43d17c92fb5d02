"""Open a checkpoint: find the newest that is valid, read its manifest, compare every byte of it with its hashes.

Hashing is shared out over the ranks. A checkpoint that is open was whole; `Tensors` reads from it what `load` and the
exports ask for, through the CRC-32 of every MiB.
"""

import itertools
import random
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero.checkpoint.contents import PARAMETER, part_of
from zero.checkpoint.disk import Disk
from zero.checkpoint.hashes import BLOCK_BYTES
from zero.checkpoint.manifest import Entry, Manifest, Piece, file_name, step_name, step_of
from zero.checkpoint.publish import MANIFEST_NAME, Root
from zero.checkpoint.save import by_rank_0, gather_reports, join
from zero.checkpoint.shard import THREADS, ShardReader, compare
from zero.core.loss_scale import LossScale
from zero.distributed.world import World
from zero.engine.arguments import check_folder, check_world
from zero.errors import CheckpointError
from zero.platform.files import memory_of
from zero.progress import Progress, silent

FOLDER = "checkpoints"
"""Of a run, inside its folder, unless configured otherwise."""

OPEN_FILES = 8
"""Each keeps a descriptor and a MiB."""

Contents = tuple[tuple[tuple[Entry, Piece], ...], ...]
"""For each rank, the pieces in its file."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder whose every byte was compared with its hashes.

    Attributes:
        facts: what was given to `save`.
        step: steps tried until it was saved, skipped ones included.
    """

    folder: Path
    manifest: Manifest
    disk: Disk

    @property
    def facts(self) -> Mapping[str, Any]:
        return dict(self.manifest.facts.get("given", {}))

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def skipped(self) -> int:
        """How many of its steps changed nothing because a gradient was not finite."""
        return numbers_of(self.folder, self.manifest).scale.skipped


def open_checkpoint(
    world: World, folder: Path | str, disk: Disk | None = None, progress: Progress = silent
) -> Checkpoint:
    """Read the manifest in `folder` and compare all files with it. Collective.

    Args:
        world: the ranks, which share the work of comparing.
        folder: one checkpoint, such as `checkpoints/step-0000000100`.
        disk: the file calls, for tests; default: the file system's.
        progress: called with the bytes that this rank has compared.

    Raises:
        ConfigError: `world` is no world, or `folder` no path.
        CheckpointError: on every rank; the line names file and place of the first damage that some rank found.

    Returns:
        The checkpoint, for `load`; its `facts` are those that `save` was given.
    """
    check_world(world, "zero.open_checkpoint", "checkpoint = zero.open_checkpoint(world, folder)")
    check_folder(folder, "zero.open_checkpoint", "checkpoint = zero.open_checkpoint(world, folder)")
    folder, disk = Path(folder), disk or Disk()
    found: list[Manifest] = []

    def read() -> dict[str, Any]:
        found.append(Root(folder.parent, disk).read_manifest(folder))
        numbers_of(folder, found[0])
        return {"files": [file.sha256 for file in found[0].files]}

    reports = gather_reports(world, read)
    if any(report != reports[0] for report in reports):
        raise CheckpointError(f"{folder}: the ranks see different files under this name; give a folder that all share")
    checkpoint = Checkpoint(folder, found[0], disk)
    _verify(world, checkpoint, progress)
    return checkpoint


def open_latest(world: World, path: Path | str, *, progress: Progress = silent) -> tuple[Checkpoint | None, list[str]]:
    """The newest valid checkpoint under `path`, and why newer ones were rejected. Collective.

    Args:
        world: the ranks.
        path: the folder of checkpoints that `save` was given.
        progress: called with the bytes that this rank has compared.

    Returns:
        (checkpoint, rejected): the newest one that is whole, or None where there is none at all; and a line about each
        newer one that is not.

    Raises:
        ConfigError: `world` is no world, or `path` no path.
        CheckpointError: there are checkpoints, and none is valid.
    """
    check_world(world, "zero.open_latest", "checkpoint, rejected = zero.open_latest(world, folder)")
    check_folder(path, "zero.open_latest", "checkpoint, rejected = zero.open_latest(world, folder)")
    root = Root(Path(path))
    steps = by_rank_0(world, root.steps)
    return open_first(world, [root.path / step_name(step) for step in reversed(steps)], progress=progress)


def open_first(
    world: World, folders: Sequence[Path], *, suspect: Mapping[Path, str] | None = None, progress: Progress = silent
) -> tuple[Checkpoint | None, list[str]]:
    """The first of `folders` that is valid, and why those before it were rejected. Collective.

    Args:
        folders: the same on every rank.
        suspect: those that are not to be taken, and why.

    Raises:
        CheckpointError: there are some, and none is valid.
    """
    rejected: list[str] = []
    for folder in folders:
        if suspect and folder in suspect:
            rejected.append(f"{folder}: {suspect[folder]}")
            continue
        try:
            return open_checkpoint(world, folder, progress=progress), rejected
        except CheckpointError as error:
            rejected.append(str(error))
    if rejected:
        raise CheckpointError(
            f"{folders[0].parent}: none of its {len(rejected)} checkpoints is valid; the newest: {rejected[0]}; "
            "restore one, or train anew: in another folder, on the command line with resume=none"
        )
    return None, rejected


def open_at(world: World, path: Path, progress: Progress = silent) -> tuple[Checkpoint, list[str]]:
    """What a person means by `path`: a step's folder under any name, or the newest valid one of a run or a root.

    Returns:
        It, and why newer ones were rejected. Collective.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    if is_step(path):
        return open_checkpoint(world, path, progress=progress), []
    found, rejected = open_latest(world, path / FOLDER if (path / FOLDER).is_dir() else path, progress=progress)
    if found is None:
        example = by_rank_0(world, lambda: _newest_run(path))
        raise CheckpointError(f"{path}: there is no checkpoint; give a step, a run or a folder of checkpoints{example}")
    return found, rejected


def _newest_run(path: Path) -> str:
    """For those who gave the folder of all runs: of those that saved, the one that did so last."""
    saves_s = {root: last_save_s(root) for depth in ("*", "*/*") for root in path.glob(f"{depth}/{FOLDER}")}
    newest = max(saves_s, key=lambda root: saves_s[root], default=None)
    return f", such as {newest.parent}" if newest is not None and saves_s[newest] else ""


def last_save_s(root: Path) -> float:
    """When something was published there; 0: never."""
    last_s = 0.0
    for path in root.glob("step-*"):
        with suppress(FileNotFoundError):  # its run has removed it meanwhile
            last_s = max(last_s, path.lstat().st_mtime if step_of(path.name) is not None else 0.0)
    return last_s


def newest(world: World, folder: Path, *, below: bool) -> tuple[Checkpoint | None, list[str]]:
    """The newest valid checkpoint in `folder`, and `below` in the folders of its tags; why newer ones were rejected."""
    if is_step(folder):
        return open_checkpoint(world, folder), []
    found, notes = open_latest(world, folder)
    if found is not None or not below:
        return found, notes

    def newest_first() -> list[str]:
        tags = [one for one in folder.glob("*") if one.is_dir()]
        steps = [(step, str(tag / step_name(step))) for tag in tags for step in Root(tag).steps()]
        return [path for _, path in sorted(steps, reverse=True)]

    return open_first(world, [Path(path) for path in by_rank_0(world, newest_first)])


def is_step(path: Path) -> bool:
    """It is meant to be one checkpoint, not a folder of them."""
    return step_of(path.name) is not None or (path / MANIFEST_NAME).exists()


# -- whether it is whole -----------------------------------------------------------------------------------------------


def _verify(world: World, checkpoint: Checkpoint, progress: Progress) -> None:
    """Compare every byte with its hashes: each rank takes equally many blocks, and its threads share those.

    Raises:
        CheckpointError: on every rank.
    """
    files = checkpoint.manifest.files
    blocks = [(file, number) for file, one in enumerate(files) for number in range(-(-one.size // BLOCK_BYTES))]
    mine = blocks[world.rank * len(blocks) // world.size : (world.rank + 1) * len(blocks) // world.size]
    contents = checkpoint.manifest.contents()
    readers = [_Verifying(checkpoint, contents, mine[first::THREADS]) for first in range(min(THREADS, len(mine)))]

    def report_progress() -> None:
        done = sum(len(reader.digests) for reader in readers)
        progress(f"verifying {checkpoint.folder.name}", done * BLOCK_BYTES, len(mine) * BLOCK_BYTES)

    for reader in readers:
        reader.start()
    join(world, readers, report_progress)

    def found() -> dict[str, Any]:
        for reader in readers:
            if reader.error is not None:
                raise reader.error
        return {"digests": [readers[place % THREADS].digests[place // THREADS] for place in range(len(mine))]}

    digests = iter([bytes.fromhex(digest) for report in gather_reports(world, found) for digest in report["digests"]])
    for rank, file in enumerate(files):
        name = file_name(rank, checkpoint.manifest.world)
        compare(checkpoint.folder / name, file, itertools.islice(digests, -(-file.size // BLOCK_BYTES)))


class _Verifying(threading.Thread):
    """Reads and hashes some blocks of a checkpoint, file by file.

    Attributes:
        digests: hex, of the blocks that are done.
        error: what ended it before the last.
    """

    def __init__(self, checkpoint: Checkpoint, contents: Contents, blocks: Sequence[tuple[int, int]]) -> None:
        super().__init__(name="zero-verify", daemon=True)
        self._checkpoint, self._contents, self._blocks = checkpoint, contents, blocks
        self.digests: list[str] = []
        self.error: CheckpointError | None = None

    def run(self) -> None:
        one = self._checkpoint
        longest = max(one.manifest.files[file].size for file, _ in self._blocks)
        block = memoryview(bytearray(min(BLOCK_BYTES, longest)))
        try:
            for file, numbers in itertools.groupby(self._blocks, key=lambda block: block[0]):
                with _reader(one, file, self._contents) as reader:
                    self.digests += (reader.digest(number, block).hex() for _, number in numbers)
        except Exception as error:
            self.error = error if isinstance(error, CheckpointError) else CheckpointError(f"{one.folder}: {error!r}")


# -- its tensors -------------------------------------------------------------------------------------------------------


def weights_of(checkpoint: Checkpoint, weights: str) -> dict[str, Entry]:
    """By name, what stands for the parameters: those that were trained, or a mean of them.

    Raises:
        CheckpointError: it was trained without.
    """
    found = {entry.name: entry for entry in checkpoint.manifest.entries if entry.kind == weights}
    if not found and weights != PARAMETER:
        raise CheckpointError(
            f"{checkpoint.folder} has no {weights}; set optim.ema=0.999 where it is trained, in Python zero.with_ema"
        )
    return found


class Tensors(AbstractContextManager["Tensors"]):
    """The tensors of a checkpoint. Files are opened when they are needed, and the last few stay open with the block."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._contents = checkpoint.manifest.contents()
        self._readers: dict[int, ShardReader] = {}  # by rank, the one that was used last at the end

    def __exit__(self, *_: object) -> None:
        for reader in self._readers.values():
            reader.close()

    def read(self, entry: Entry, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of a tensor, row-major: 1-D, on the host, in the dtype that they were saved in."""
        dtype = getattr(torch, entry.dtype)
        values = torch.empty(stop - start, dtype=dtype)
        for piece in entry.pieces:
            first, last = max(start, piece.start), min(stop, piece.stop)
            if first < last:
                offset = piece.offset + (first - piece.start) * dtype.itemsize
                self._reader(piece.rank).read(offset, memory_of(values[first - start : last - start]))
        return values

    def _reader(self, rank: int) -> ShardReader:
        reader = self._readers.pop(rank, None) or _reader(self._checkpoint, rank, self._contents)
        self._readers[rank] = reader
        if len(self._readers) > OPEN_FILES:
            self._readers.pop(next(iter(self._readers))).close()
        return reader


def _reader(checkpoint: Checkpoint, rank: int, contents: Contents) -> ShardReader:
    parts = [
        part_of(entry.name, entry.kind, getattr(torch, entry.dtype), entry.shape, piece.stop - piece.start)
        for entry, piece in contents[rank]
    ]
    manifest = checkpoint.manifest
    path = checkpoint.folder / file_name(rank, manifest.world)
    return ShardReader(checkpoint.disk, path, manifest.files[rank], parts)


# -- what is not a tensor ----------------------------------------------------------------------------------------------


class Numbers(NamedTuple):
    """What a checkpoint holds beside tensors.

    Attributes:
        step: of the optimizer.
        scale, dynamic: of the loss, and whether it moved.
        rested: by name of a parameter, the steps in which it did not train.
        randoms: every rank's generators; none where another program wrote the checkpoint.
    """

    step: int
    scale: LossScale
    dynamic: bool
    rested: dict[str, int]
    randoms: list[Mapping[str, Any]]


def numbers_of(folder: Path, manifest: Manifest) -> Numbers:
    """From its manifest; refuses what no save writes."""
    facts = manifest.facts
    try:
        numbers, randoms = facts["state"], facts["random"]
        step, scale, dynamic = numbers["step"], LossScale(*numbers["scale"]), numbers["dynamic"]
        rested = numbers.get("rested", {})
        whole = (step, *scale[1:], *rested.values())
        sound = (
            all(type(number) is int and number >= 0 for number in whole)
            and step + scale.skipped == manifest.step
            and all(steps <= step for steps in rested.values())
            and type(scale.scale) in (int, float)
            and scale.scale > 0
            and type(dynamic) is bool
            and type(facts["given"]) is dict
            and type(randoms) is list
            and len(randoms) in (0, manifest.world)
        )
        for one in randoms if sound else []:
            set_random(one, random.Random(), torch.Generator())
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RuntimeError):
        sound = False
    if not sound:
        raise CheckpointError(f"{folder}: its manifest lacks step, loss scale or generators, or has others than a save")
    return Numbers(step, scale, dynamic, rested, randoms)


def set_random(state: Mapping[str, Any], python: Any = random, host: torch.Generator | None = None) -> None:
    """The opposite of `random_state`; or try it on these generators, which are nobody's."""
    version, internal, following = state["python"]
    python.setstate((version, tuple(internal), following))
    (torch.default_generator if host is None else host).set_state(_octets(state["torch"]))
    cuda = None if state["cuda"] is None else _octets(state["cuda"])
    if cuda is not None and host is None and torch.cuda.is_available():
        torch.cuda.set_rng_state(cuda)


def _octets(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)

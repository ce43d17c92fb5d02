"""Open a checkpoint: find the newest that is valid, read its manifest, compare every byte of it with its hashes.

Hashing is shared out over the ranks, and each reads the indexes of the files that it hashes. A checkpoint that is open
was whole; `Tensors` reads from it what `load` and the exports ask for, through the CRC-32 of every MiB.
"""

import itertools
import random
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero.checkpoint.contents import PARAMETER
from zero.checkpoint.disk import Disk, read_bytes
from zero.checkpoint.hashes import BLOCK_BYTES
from zero.checkpoint.manifest import (
    Entry,
    Index,
    Manifest,
    file_name,
    held,
    index_cap_bytes,
    index_from_text,
    index_name,
    step_name,
)
from zero.checkpoint.publish import Root
from zero.checkpoint.save import by_rank_0, gather_reports, join
from zero.checkpoint.shard import THREADS, ShardReader
from zero.core.loss_scale import LossScale
from zero.core.suggest import own_arguments
from zero.distributed.world import World
from zero.engine.arguments import check_folder, check_world
from zero.errors import CheckpointError
from zero.platform.files import memory_of
from zero.platform.safetensors_files import offsets
from zero.platform.step_folders import is_step, missing, root_at
from zero.progress import Progress, silent

OPEN_FILES = 8
"""Each keeps a descriptor and a MiB."""

Places = dict[tuple[str, str], tuple[int, int]]
"""Name and kind of a tensor -> its first element in a rank's file, and the byte where that lies."""


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


@own_arguments({"folder": "checkpoint = zero.open_checkpoint(world, folder)"})
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
        return {"files": sha256("".join(file.index_sha256 for file in found[0].files).encode()).hexdigest()}

    reports = gather_reports(world, read)
    if any(report != reports[0] for report in reports):
        raise CheckpointError(f"{folder}: the ranks see different files under this name; give a folder that all share")
    checkpoint = Checkpoint(folder, found[0], disk)
    _verify(world, checkpoint, progress)
    return checkpoint


@own_arguments({"path": "checkpoint, rejected = zero.open_latest(world, folder)"})
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
    checkpoint, rejected = open_latest(world, root_at(path), progress=progress)
    if checkpoint is None:
        raise CheckpointError(by_rank_0(world, lambda: missing(path)))
    return checkpoint, rejected


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


# -- whether it is whole -----------------------------------------------------------------------------------------------


def _verify(world: World, checkpoint: Checkpoint, progress: Progress) -> None:
    """Compare every byte with its hashes: each rank takes equally many blocks, and its threads share those.

    Raises:
        CheckpointError: on every rank.
    """
    files = checkpoint.manifest.files
    blocks = ((rank, number) for rank, file in enumerate(files) for number in range(-(-file.size // BLOCK_BYTES)))
    count = sum(-(-file.size // BLOCK_BYTES) for file in files)
    begin, stop = (rank * count // world.size for rank in (world.rank, world.rank + 1))
    mine = list(itertools.islice(blocks, begin, stop))
    readers = [_Verifying(checkpoint, mine[first::THREADS]) for first in range(min(THREADS, len(mine)))]

    def report_progress() -> None:
        done = sum(reader.done for reader in readers)
        progress(f"verifying {checkpoint.folder.name}", done * BLOCK_BYTES, len(mine) * BLOCK_BYTES)

    for reader in readers:
        reader.start()
    join(world, readers, report_progress)

    def raise_errors() -> dict[str, Any]:
        for reader in readers:
            if reader.error is not None:
                raise reader.error
        return {}

    gather_reports(world, raise_errors)


class _Verifying(threading.Thread):
    """Reads and compares some blocks of a checkpoint, file by file.

    Attributes:
        done: how many blocks are compared.
        error: what ended it before the last.
    """

    def __init__(self, checkpoint: Checkpoint, blocks: Sequence[tuple[int, int]]) -> None:
        super().__init__(name="zero-verify", daemon=True)
        self._checkpoint, self._blocks = checkpoint, blocks
        self.done = 0
        self.error: CheckpointError | None = None

    def run(self) -> None:
        one = self._checkpoint
        longest = max(one.manifest.files[file].size for file, _ in self._blocks)
        block = memoryview(bytearray(min(BLOCK_BYTES, longest)))
        try:
            for file, numbers in itertools.groupby(self._blocks, key=lambda block: block[0]):
                reader, _ = _opened(one, file)
                with reader:
                    for _, number in numbers:
                        reader.check(number, block)
                        self.done += 1
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
        self._files: dict[int, tuple[ShardReader, Places]] = {}  # by rank, the one that was used last at the end

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file[0].close()

    def read(self, entry: Entry, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of a tensor, row-major: 1-D, on the host, in the dtype that they were saved in."""
        values = torch.empty(stop - start, dtype=getattr(torch, entry.dtype))
        if start < stop:
            flat = self._checkpoint.manifest.flats[entry.flat]
            for rank, first, last in flat.holders(entry.start + start, entry.start + stop):
                reader, places = self._file(rank)
                begin, offset = places[entry.name, entry.kind]
                part = values[first - entry.start - start : last - entry.start - start]
                reader.read(offset + (first - entry.start - begin) * values.itemsize, memory_of(part))
        return values

    def _file(self, rank: int) -> tuple[ShardReader, Places]:
        file = self._files.pop(rank, None) or _opened(self._checkpoint, rank)
        self._files[rank] = file
        if len(self._files) > OPEN_FILES:
            reader, _ = self._files.pop(next(iter(self._files)))
            reader.close()
        return file


def _opened(checkpoint: Checkpoint, rank: int) -> tuple[ShardReader, Places]:
    """One rank's file, with its index read."""
    manifest = checkpoint.manifest
    pieces = held(manifest.flats, rank)
    parts = [piece.part for piece in pieces]
    path = checkpoint.folder / file_name(rank, manifest.world)
    reader = ShardReader(checkpoint.disk, path, index_of(checkpoint, rank).hashes, parts)
    begins = zip(pieces, offsets(parts), strict=True)
    return reader, {(piece.slot.name, piece.kind): (piece.start, offset) for piece, offset in begins}


def index_of(checkpoint: Checkpoint, rank: int) -> Index:
    """Read the index of a rank's file.

    Raises:
        CheckpointError: its hash is not that of the manifest, or it says what no save writes.
    """
    manifest, file = checkpoint.manifest, checkpoint.manifest.files[rank]
    path = checkpoint.folder / index_name(rank, manifest.world)
    text = read_bytes(checkpoint.disk, path, index_cap_bytes(file.size))
    if sha256(text).hexdigest() != file.index_sha256:
        raise CheckpointError(f"{path}: is damaged: it does not match the hash in the manifest")
    try:
        index = index_from_text(text, file.size)
        if index.random is not None:
            set_random(index.random, random.Random(), torch.Generator())
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise CheckpointError(f"{path}: the state of the generators is not that of a save") from error
    return index


# -- what is not a tensor ----------------------------------------------------------------------------------------------


class Numbers(NamedTuple):
    """What a checkpoint holds beside tensors.

    Attributes:
        step: of the optimizer.
        scale, dynamic: of the loss, and whether it moved.
        rested: by name of a parameter, the steps in which it did not train.
    """

    step: int
    scale: LossScale
    dynamic: bool
    rested: dict[str, int]


def numbers_of(folder: Path, manifest: Manifest) -> Numbers:
    """From its manifest; refuses what no save writes."""
    facts = manifest.facts
    try:
        numbers = facts["state"]
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
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise CheckpointError(f"{folder}: its manifest lacks step or loss scale, or has others than a save")
    return Numbers(step, scale, dynamic, rested)


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

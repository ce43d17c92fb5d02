"""Open a checkpoint: find the newest valid one, read its manifest, compare every byte with its hashes.

The ranks divide the blocks to hash, and each rank reads the indexes of the files that it hashes. `Tensors` reads values
from an open checkpoint for `load` and for exports, and compares the CRC-32 of every MiB again.
"""

import itertools
import json
import math
import random
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from zero.checkpoint.contents import PARAMETER
from zero.checkpoint.disk import Disk, read_bytes
from zero.checkpoint.hashes import BLOCK_BYTES
from zero.checkpoint.manifest import (
    Entry,
    Index,
    Manifest,
    Schema,
    checked_json,
    file_name,
    held,
    index_cap_bytes,
    index_from_text,
    index_name,
)
from zero.checkpoint.publish import Root, own_root, parts_in
from zero.checkpoint.save import by_rank_0, gather_reports, join_saving
from zero.checkpoint.shard import THREADS, ShardReader
from zero.core.codec import CODECS
from zero.core.loss_scale import LossScale
from zero.core.suggest import some
from zero.distributed.world import World
from zero.engine.arguments import check_folder, check_type
from zero.errors import CheckpointError
from zero.platform.files import memory_of
from zero.platform.safetensors_files import offsets
from zero.platform.step_folders import is_step, missing, root_at
from zero.progress import Progress, silent

OPEN_FILES = 128
"""Maximum number of files that `Tensors` keeps open. Each takes a file descriptor and 1 MiB of memory."""

Places = dict[tuple[str, str], tuple[int, int]]
"""(name, kind) of a tensor -> (number of its first element in a file, byte offset of that element there)."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk, every byte of which has been compared with its hashes.

    Attributes:
        facts: the `facts` that were passed to `save`.
        step: number of steps tried before the save, skipped steps included.
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
        """Return the number of steps that were skipped because a gradient was not finite."""
        return numbers_of(self.folder, self.manifest).scale.skipped


def open_checkpoint(
    world: World, folder: Path | str, disk: Disk | None = None, progress: Progress = silent
) -> Checkpoint:
    """Read the manifest in `folder` and verify all files of the checkpoint. Collective.

    Args:
        world: the ranks that divide the verification among themselves.
        folder: one checkpoint, such as `checkpoints/step-0000000100`.
        disk: a replacement for the file system calls, for tests.
        progress: called with the number of bytes that this rank has verified.

    Raises:
        ConfigError: `world` is not a World, or `folder` not a path.
        CheckpointError: the checkpoint is not valid. Raised on every rank; names file and offset of the first damage.
    """
    check_type(world, World, "zero.open_checkpoint", "checkpoint = zero.open_checkpoint(world, folder)")
    check_folder(folder, "zero.open_checkpoint", "checkpoint = zero.open_checkpoint(world, folder)")
    folder, disk = Path(folder), disk or Disk()
    manifests: list[Manifest] = []

    def read() -> dict[str, Any]:
        manifest = Root(folder.parent, disk).read_manifest(folder)
        numbers_of(folder, manifest)
        lineage_of(folder, manifest)
        manifests.append(manifest)
        return {"files": sha256("".join(file.index_sha256 for file in manifest.files).encode()).hexdigest()}

    reports = gather_reports(world, read)
    if any(report != reports[0] for report in reports):
        raise CheckpointError(
            f"{folder}: ranks read different files here. Pass a folder on a disk that all ranks share."
        )
    checkpoint = Checkpoint(folder, manifests[0], disk)
    _verify(world, checkpoint, progress)
    return checkpoint


def open_latest(world: World, path: Path | str, *, progress: Progress = silent) -> tuple[Checkpoint | None, list[str]]:
    """Open the valid checkpoint under `path` that was published last. Collective.

    It may have fewer steps than others, because the run went back to an earlier one. Checkpoints of earlier versions
    count as older than all others, in the order of their steps. With coordinates it is collective among all ranks of
    the run, and each opens the newest step that all have.

    Args:
        world: the ranks that divide the verification among themselves.
        path: the folder of checkpoints, the `root` of `save`; or one checkpoint.
        progress: called with the number of bytes that this rank has verified.

    Returns:
        (checkpoint, rejected): the newest valid checkpoint, or None if `path` has no checkpoints; and a line about each
        newer checkpoint that is not valid.

    Raises:
        ConfigError: `world` is not a World, or `path` not a path.
        CheckpointError: there are checkpoints, but none is valid, or none has the world's coordinates, or they are of
            runs that did not continue from one another.
    """
    check_type(world, World, "zero.open_latest", "checkpoint, rejected = zero.open_latest(world, folder)")
    check_folder(path, "zero.open_latest", "checkpoint, rejected = zero.open_latest(world, folder)")
    if world.coordinates:
        folders = _common_folders(world, own_root(Path(path), world))
        opened = open_first(world, folders, progress=progress)
    else:
        opened = newest(world, Path(path), progress=progress)
    if opened[0] is None and (parts := by_rank_0(world, lambda: parts_in(Path(path)))):
        raise CheckpointError(
            f"{path}: has checkpoints in {some(parts)}, of other coordinates than {dict(world.coordinates)}. Open the "
            "world with their dimensions, or train anew in another folder."
        )
    return opened


def _common_folders(world: World, root: Root) -> list[Path]:
    """Return the folders of the steps that all coordinates have saved, the last published first.

    Collective among all ranks of the run.

    Args:
        root: the checkpoints of this world's coordinates.

    Raises:
        CheckpointError: its parent is one checkpoint or holds some itself, or no step was saved by all.
    """
    path = root.path.parent

    def listed() -> dict[str, Any]:
        try:
            if is_step(path) or Root(path).steps():
                raise CheckpointError(f"{path}: is of one coordinate or of none. Pass the folder that zero.save got.")
            return {"folders": {step: str(folder) for step, folder in published_last([root])}}  # keys become texts
        except CheckpointError as error:  # raised after the collective, because other coordinates wait in it
            return {"error": str(error)}

    own = by_rank_0(world, listed)
    every = [json.loads(text) for text in world.whole.gather_texts(json.dumps(own), "steps of checkpoints")]
    for report in every:
        if "error" in report:
            raise CheckpointError(report["error"])
    common = set.intersection(*(set(report["folders"]) for report in every))
    if any(report["folders"] for report in every) and not common:
        raise CheckpointError(f"{path}: no step was saved by all ranks. Restore one, or train anew in another folder.")
    return [Path(own["folders"][step]) for step in every[0]["folders"] if step in common]


def published_last(roots: Iterable[Root], *, mixed: bool = False) -> list[tuple[int, Path]]:
    """Return step and folder of all checkpoints in `roots`, the last published first.

    Checkpoints without a lineage follow all others, sorted by their steps. A checkpoint whose manifest cannot be read
    counts as published after the one before it in its root, so that it is opened and rejected with a message.

    Args:
        mixed: allow checkpoints of several lineages.

    Raises:
        CheckpointError: there are checkpoints of several lineages.
    """
    order: list[tuple[int, int, Path]] = []
    newest = dict[str, tuple[int, int, Path]]()
    for root in roots:
        saved_ns = 0
        for step, folder in root.folders().items():
            try:
                lineage = lineage_of(folder, root.read_manifest(folder))
            except CheckpointError:
                lineage = None
            else:
                saved_ns = 0 if lineage is None else lineage.saved_ns
            order.append((saved_ns, step, folder))
            if lineage is not None:
                newest[lineage.name] = max(order[-1], newest.get(lineage.name, order[-1]))
    if len(newest) > 1 and not mixed:
        (*_, last), (*_, other), *_ = sorted(newest.values(), reverse=True)
        raise CheckpointError(
            f"{last} and {other}: two runs saved them, and neither continued from the other. Open one of the two, or "
            "move the checkpoints of one run to another folder."
        )
    return [(step, folder) for _, step, folder in sorted(order, reverse=True)]


def open_first(
    world: World, folders: Sequence[Path], *, suspect: Mapping[Path, str] | None = None, progress: Progress = silent
) -> tuple[Checkpoint | None, list[str]]:
    """Open the first valid checkpoint of `folders`; also return a line about each one rejected before it. Collective.

    Args:
        folders: the newest first; the same list on every rank.
        suspect: folder -> the reason to reject it without reading it.

    Raises:
        CheckpointError: there are folders, but none is a valid checkpoint.
    """
    rejected: list[str] = []
    for folder in folders:
        if suspect and folder in suspect:
            rejected.append(f"{folder}: {suspect[folder]}")
            continue
        checkpoint, fault = None, ""
        try:
            checkpoint = open_checkpoint(world, folder, progress=progress)
        except CheckpointError as error:
            fault = str(error)
        if world.coordinates:  # damaged on one is rejected by all
            number = "" if checkpoint is None else checkpoint.manifest.facts.get("save")
            texts = world.whole.gather_texts(json.dumps([fault, number]), "reports of a checkpoint")
            faults, numbers = zip(*map(json.loads, texts), strict=True)
            mixed = f"{folder}: other coordinates hold another save of this step" if len({*numbers}) > 1 else ""
            fault = next(filter(None, faults), mixed)
        if checkpoint is not None and not fault:
            return checkpoint, rejected
        rejected.append(fault)
    if rejected:
        raise CheckpointError(
            f"{folders[0].parent}: none of its {len(rejected)} checkpoints is valid. Restore one, or train anew in "
            f"another folder (on the command line: resume=none). The newest: {rejected[0]}"
        )
    return None, rejected


def open_at(world: World, path: Path, progress: Progress = silent) -> tuple[Checkpoint, list[str]]:
    """Open `path` if it is one checkpoint, else the newest valid checkpoint of that run or folder. Collective.

    Returns:
        The checkpoint, and a line about each newer checkpoint that is not valid.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    checkpoint, rejected = newest(world, root_at(path), progress=progress)
    if checkpoint is None:
        raise CheckpointError(by_rank_0(world, lambda: missing(path)))
    return checkpoint, rejected


def newest(
    world: World, folder: Path, *, below: bool = False, mixed: bool = False, progress: Progress = silent
) -> tuple[Checkpoint | None, list[str]]:
    """Open `folder` if it is one checkpoint, else the valid checkpoint in it that was published last. Collective.

    Args:
        below: also search the subfolders of `folder`, one for each tag.
        mixed: allow checkpoints of several lineages.

    Returns:
        The checkpoint, None if there is none; and a line about each newer checkpoint that is not valid.

    Raises:
        CheckpointError: there are checkpoints, but none is valid, or they are of several lineages.
    """
    if by_rank_0(world, lambda: is_step(folder)):
        return open_checkpoint(world, folder, progress=progress), []

    def newest_first() -> list[str]:
        roots = [folder, *(path for path in folder.glob("*") if path.is_dir())] if below else [folder]
        return [str(path) for _, path in published_last(map(Root, roots), mixed=mixed)]

    return open_first(world, [Path(path) for path in by_rank_0(world, newest_first)], progress=progress)


# -- verification ------------------------------------------------------------------------------------------------------


def _verify(world: World, checkpoint: Checkpoint, progress: Progress) -> None:
    """Compare every byte with its hashes. Each rank compares an equal number of blocks, divided among its threads.

    Raises:
        CheckpointError: a file is damaged; raised on every rank.
    """
    files = checkpoint.manifest.files
    blocks = ((place, number) for place, file in enumerate(files) for number in range(-(-file.size // BLOCK_BYTES)))
    count = sum(-(-file.size // BLOCK_BYTES) for file in files)
    begin, stop = (rank * count // world.size for rank in (world.rank, world.rank + 1))
    mine = list(itertools.islice(blocks, begin, stop))
    cuts = [place * len(mine) // THREADS for place in range(THREADS + 1)]
    done: list[int] = []
    errors: dict[int, Exception] = {}

    def compare(start: int, stop: int) -> None:
        try:
            for file, part in itertools.groupby(mine[start:stop], key=lambda block: block[0]):
                reader, _ = _opened(checkpoint, file)
                with reader:
                    for _file, block in part:
                        reader.check(block)
                        done.append(block)
        except Exception as error:
            errors[start] = error

    def raise_first() -> None:
        if errors:
            raise errors[min(errors)]

    threads = [threading.Thread(target=compare, args=ends, daemon=True) for ends in itertools.pairwise(cuts)]
    for thread in threads:
        thread.start()
    what, total = f"verifying {checkpoint.folder.name}", len(mine) * BLOCK_BYTES
    join_saving(world, threads, lambda: progress(what, len(done) * BLOCK_BYTES, total))
    gather_reports(world, raise_first)


# -- tensors -----------------------------------------------------------------------------------------------------------


def weights_of(checkpoint: Checkpoint, weights: str) -> dict[str, Entry]:
    """Return name -> entry of the tensors of kind `weights`, "parameter" or "ema", to be used as the parameters.

    Raises:
        CheckpointError: the checkpoint has no tensors of that kind.
    """
    by_name = {entry.name: entry for entry in checkpoint.manifest.entries if entry.kind == weights}
    if not by_name and weights != PARAMETER:
        raise CheckpointError(
            f"{checkpoint.folder} has no {weights}. Train with optim.ema=0.999, or in Python with zero.with_ema."
        )
    return by_name


def shape_of(checkpoint: Checkpoint, entry: Entry) -> tuple[int, ...]:
    """Return the shape of an entry's tensor; of codes, which are one string of bytes, the shape of their parameter.

    Raises:
        CheckpointError: the manifest has no shape that fits the codes.
    """
    if entry.kind not in CODECS:
        return entry.shape
    shapes = checkpoint.manifest.facts.get("coded")
    shape = shapes.get(entry.name) if isinstance(shapes, dict) else None
    shape = tuple(shape) if isinstance(shape, list) else ()
    sizes = all(type(size) is int and size >= 0 for size in shape)
    if not sizes or CODECS[entry.kind].nbytes(math.prod(shape)) != entry.numel:
        raise CheckpointError(f"{checkpoint.folder}: its manifest has no shape for the codes of {entry.name}")
    return shape


class Tensors(AbstractContextManager["Tensors"]):
    """Reader of a checkpoint's tensors, used in a `with` block.

    Files are opened when they are first needed. The last `OPEN_FILES` of them stay open until the end of the block. The
    index and the header of each file are read once.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._files = dict[int, tuple[ShardReader, Places]]()
        self._open = dict[int, ShardReader]()  # the most recently used file is last

    def __exit__(self, *_: object) -> None:
        for reader in self._open.values():
            reader.close()

    def read(self, entry: Entry, start: int, stop: int) -> Tensor:
        """Read elements [start, stop) of a tensor flattened in row-major order; return a 1-D CPU tensor as saved."""
        values = torch.empty(stop - start, dtype=getattr(torch, entry.dtype))
        if start < stop:
            manifest = self._checkpoint.manifest
            flat = manifest.flats[entry.flat]
            for rank, first, last in flat.holders(entry.start + start, entry.start + stop):
                reader, places = self._file(rank + manifest.world * flat.frozen)
                begin, offset = places[entry.name, entry.kind]
                part = values[first - entry.start - start : last - entry.start - start]
                reader.read(offset + (first - entry.start - begin) * values.itemsize, memory_of(part))
        return values

    def _file(self, number: int) -> tuple[ShardReader, Places]:
        if number not in self._files:
            self._files[number] = _opened(self._checkpoint, number)
        reader, places = self._files[number]
        self._open.pop(number, None)
        self._open[number] = reader
        reader.reopen()
        if len(self._open) > OPEN_FILES:
            self._open.pop(next(iter(self._open))).close()
        return reader, places


def _opened(checkpoint: Checkpoint, number: int) -> tuple[ShardReader, Places]:
    manifest = checkpoint.manifest
    pieces = held(manifest.flats, number, manifest.world)
    parts = [piece.part for piece in pieces]
    path = checkpoint.folder / file_name(number, manifest.world)
    reader = ShardReader(checkpoint.disk, path, index_of(checkpoint, number).hashes, parts)
    begins = zip(pieces, offsets(parts), strict=True)
    return reader, {(piece.slot.name, piece.kind): (piece.start, offset) for piece, offset in begins}


def index_of(checkpoint: Checkpoint, number: int) -> Index:
    """Read the index of a file.

    Raises:
        CheckpointError: the index does not match its hash in the manifest, or is not valid.
    """
    manifest, file = checkpoint.manifest, checkpoint.manifest.files[number]
    path = checkpoint.folder / index_name(number, manifest.world)
    text = read_bytes(checkpoint.disk, path, index_cap_bytes(file.size))
    if sha256(text).hexdigest() != file.index_sha256:
        raise CheckpointError(f"{path}: is damaged: it does not match the hash in the manifest")
    try:
        return index_from_text(text, file.size)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


# -- other values ------------------------------------------------------------------------------------------------------

Count = Annotated[int, Field(ge=0)]


class Numbers(Schema):
    """The part of a saved state that is not tensors: the facts of a manifest under "state".

    Attributes:
        step: number of updates made.
        scale, dynamic: the loss scale, and whether it is dynamic.
        rested: name of a parameter -> number of steps in which it was not updated; negative if it kept moments of more
            updates than `step` when an earlier checkpoint was loaded.
    """

    step: Count
    scale: LossScale
    dynamic: bool
    rested: dict[str, int] = Field({})


class LineageText(Schema):
    """The lineage of a checkpoint: the facts of a manifest under "lineage", see `Lineage`."""

    name: Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
    saved_ns: Count


def lineage_of(folder: Path, manifest: Manifest) -> LineageText | None:
    """Validate and return the lineage of a manifest; None if an older version of the library wrote it, or an import."""
    lineage = manifest.facts.get("lineage")
    return None if lineage is None else checked_json(LineageText, lineage, f"the facts of {folder}")


def numbers_of(folder: Path, manifest: Manifest) -> Numbers:
    """Validate and return the numbers of a manifest."""
    return checked_json(Numbers, manifest.facts.get("state"), f"the facts of {folder}")


def set_random(state: Mapping[str, Any]) -> None:
    """Restore the random generators of this rank from a result of `random_state`."""
    version, internal, following = state["python"]
    random.setstate((version, tuple(internal), following))
    torch.set_rng_state(_octets(state["torch"]))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_octets(state["cuda"]))


def _octets(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)

"""Load a checkpoint into any state of the same model: whatever the stage, tier, world, pages and units of either.

Opening reads the manifest and hashes every file, shared out over the ranks; a checkpoint that is open was whole. Only
then is anything of the state written: each rank reads the ranges that its own flats cover, through the CRC-32 of every
MiB, and lets them run through the sinks that first values go through.

Names have to match both ways, unless a pattern says that a tensor stays as it is.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from zero.checkpoint.contents import BUFFER, FROZEN, PARAMETER, part_of, tensors
from zero.checkpoint.disk import Disk
from zero.checkpoint.manifest import Entry, Manifest, file_name, step_name
from zero.checkpoint.publish import Root
from zero.checkpoint.save import force_all, told
from zero.checkpoint.shard import ShardReader
from zero.copied import buffers_of
from zero.device import memory_of
from zero.errors import CheckpointError
from zero.full import full_values
from zero.initialise import sinks_of
from zero.layout import Slot
from zero.precision import LossScale
from zero.progress import Progress, silent
from zero.state import State
from zero.world import World

SHOWN = 5
"""Names that an error lists before it only counts."""

Key = tuple[str, str]
"""Name and kind of a tensor."""


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


def open_checkpoint(
    world: World, folder: Path | str, disk: Disk | None = None, progress: Progress = silent
) -> Checkpoint:
    """Read the manifest in `folder` and compare all files with it. Collective.

    Args:
        progress: told the bytes that this rank has compared.

    Raises:
        CheckpointError: on every rank; the line names file and place of the first damage that some rank found.
    """
    folder, disk = Path(folder), disk or Disk()
    found: list[Manifest] = []

    def read() -> dict[str, Any]:
        found.append(Root(folder.parent, disk).read_manifest(folder))
        contents = found[0].contents()
        _numbers(folder, found[0])
        mine = range(world.rank, found[0].world, world.size)
        done, total = 0, sum(found[0].files[rank].size for rank in mine)

        def tell(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            progress(f"verifying {folder.name}", done, total)

        for rank in mine:
            with _reader(disk, folder, found[0], rank, contents[rank]) as reader:
                reader.verify(tell)
        return {"files": [file.sha256 for file in found[0].files]}

    reports = told(world, read)
    if any(report != reports[0] for report in reports):
        raise CheckpointError(f"{folder}: the ranks see different files under this name; give a folder that all share")
    return Checkpoint(folder, found[0], disk)


def open_latest(
    world: World,
    path: Path | str,
    disk: Disk | None = None,
    *,
    suspect: Mapping[int, str] = MappingProxyType({}),
    progress: Progress = silent,
) -> tuple[Checkpoint | None, list[str]]:
    """The newest valid checkpoint under `path`, and why newer ones were rejected. Collective.

    Args:
        suspect: steps that are not to be taken, and why.

    Raises:
        CheckpointError: there are checkpoints, and none is valid.
    """
    root = Root(Path(path), disk)
    steps = told(world, lambda: {"steps": root.steps() if world.rank == 0 else []})[0]["steps"]
    rejected: list[str] = []
    for step in reversed(steps):
        if step in suspect:
            rejected.append(f"{root.path / step_name(step)}: {suspect[step]}")
            continue
        try:
            return open_checkpoint(world, root.path / step_name(step), root.disk, progress), rejected
        except CheckpointError as error:
            rejected.append(str(error))
    if rejected:
        raise CheckpointError(
            f"{root.path}: none of its {len(rejected)} checkpoints is valid; the newest: {rejected[0]}; "
            "restore one, or set resume=none to start again"
        )
    return None, rejected


def load(
    state: State,
    checkpoint: Checkpoint,
    *,
    partial: Iterable[str] = (),
    convert: Iterable[str] = (),
    progress: Progress = silent,
) -> State:
    """`state` with the checkpoint's values; the one that was given is spent. Collective.

    Args:
        partial: names, or patterns such as `head.*`, of tensors that keep the values that they have: they may be
            missing on either side, or differ in shape.
        convert: names or patterns of tensors whose dtype may change: masters and moments are fp32.
        progress: told the units that are filled.

    Raises:
        CheckpointError: names, shapes or dtypes that do not match, and nothing was changed; or damage that came after
            the checkpoint was opened: then the state is spent.
    """
    machinery, plan = state.machinery, state.plan
    partial, convert = tuple(partial), tuple(convert)
    buffers = buffers_of(state.model)
    wanted = {(name, kind): (dtype, shape) for name, kind, dtype, shape in tensors(plan, buffers)}
    kept = {key for key in wanted if _named(key[0], partial)}
    _match(checkpoint, wanted, partial, convert)
    step, saved, dynamic, randoms = _numbers(checkpoint.folder, checkpoint.manifest)
    force_all(state)
    stays = _current(state, kept)
    following = state.restored(step=step, scale=plan.precision.scale.resumed(saved, dynamic=dynamic))
    told(plan.world, lambda: _fill(following, checkpoint, stays, buffers, kept, progress))
    for unit in machinery.units:
        unit.version += 1
        if unit.resident is not None:
            unit.resident.version = unit.version
    if len(randoms) == plan.world.size:
        set_random(randoms[plan.world.rank])
    return following


# -- what belongs together ---------------------------------------------------------------------------------------------


def _match(
    checkpoint: Checkpoint,
    wanted: Mapping[Key, tuple[torch.dtype, tuple[int, ...]]],
    partial: Sequence[str],
    convert: Sequence[str],
) -> None:
    there = {(entry.name, entry.kind): entry for entry in checkpoint.manifest.entries}
    both = {key: (there[key], *wanted[key]) for key in wanted if key in there and not _named(key[0], partial)}
    complaints = [
        ("missing", [_words(key) for key in wanted if key not in there and not _named(key[0], partial)]),
        ("not in the model", [_words(key) for key in there if key not in wanted and not _named(key[0], partial)]),
        (
            "of another shape",
            [
                f"{_words(key)} {entry.shape} for {shape}"
                for key, (entry, _, shape) in both.items()
                if entry.shape != shape
            ],
        ),
        (
            "of another dtype",
            [
                f"{_words(key)} {entry.dtype}"
                for key, (entry, dtype, _) in both.items()
                if not _may_become(entry, dtype) and not _named(key[0], convert)
            ],
        ),
    ]
    told_ = [f"{_some(names)} {what}" for what, names in complaints if names]
    if told_:
        keys = "checkpoint.convert" if complaints[-1][1] and len(told_) == 1 else "checkpoint.partial"
        raise CheckpointError(f"{checkpoint.folder}: {'; '.join(told_)}; name them in {keys} if that is meant")


def _may_become(entry: Entry, dtype: torch.dtype) -> bool:
    """Frozen parameters and statistics are held in the dtype of compute, which may be another one; the rest is not."""
    if entry.kind == FROZEN or (entry.kind == BUFFER and dtype.is_floating_point):
        return "float" in entry.dtype
    return entry.dtype == str(dtype).removeprefix("torch.")


def _named(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _words(key: Key) -> str:
    name, kind = key
    name = name if name.isprintable() else repr(name)  # a checkpoint may come from anybody
    return name if kind == PARAMETER else f"{name} ({kind})"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more + (" is" if len(names) == 1 else " are")


# -- what goes where ---------------------------------------------------------------------------------------------------


def _fill(
    state: State,
    checkpoint: Checkpoint,
    stays: Mapping[Key, Tensor],
    buffers: Mapping[str, Tensor],
    kept: set[Key],
    progress: Progress,
) -> dict[str, Any]:
    plan, store = state.plan, state.machinery.store
    entries = {(entry.name, entry.kind): entry for entry in checkpoint.manifest.entries}
    with Tensors(checkpoint) as files, torch.no_grad():

        def values(slot: Slot, kind: str, start: int, stop: int) -> Tensor:
            key = (slot.name, kind)
            return stays[key].view(-1)[start:stop] if key in stays else files.read(entries[key], start, stop)

        for unit in state.machinery.units:
            for kind in (PARAMETER, *plan.optimizer.moments, FROZEN):
                layout = unit.spec.frozen if kind == FROZEN else unit.spec.trainable
                sinks = sinks_of(plan, store, unit, "param" if kind == PARAMETER else kind, at=None)
                first, last = min(sink.start for sink in sinks), max(sink.stop for sink in sinks)
                for start in range(first, last, plan.page_numel):
                    stop = min(start + plan.page_numel, last)
                    page_K = torch.zeros(stop - start)
                    for slot, a, b, place in layout.pieces(start, stop):
                        page_K[place : place + b - a].copy_(values(slot, kind, a, b))
                    for sink in sinks:
                        sink.take(page_K)
            progress("loading", unit.spec.index + 1, len(state.machinery.units))
        for name, buffer in buffers.items():
            if (name, BUFFER) not in kept:
                buffer.copy_(files.read(entries[name, BUFFER], 0, buffer.numel()).view(buffer.shape))
    return {}


def _current(state: State, kept: set[Key]) -> dict[Key, Tensor]:
    """The values that stay, whole, on the host."""
    found = {}
    for kind in dict.fromkeys(kind for _, kind in kept if kind != BUFFER):
        names = {name for name, other in kept if other == kind}
        source = {PARAMETER: "param", FROZEN: "param"}.get(kind, kind)
        for name, tensor in full_values(state, source):
            if name in names:
                found[name, kind] = tensor
    return found


class Tensors(AbstractContextManager["Tensors"]):
    """The tensors of a checkpoint. Files are opened when they are first needed, and closed with the block."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint, self._closing = checkpoint, ExitStack()
        self._contents = checkpoint.manifest.contents()
        self._readers: dict[int, ShardReader] = {}

    def __exit__(self, *_: object) -> None:
        self._closing.close()

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
        if rank not in self._readers:
            one = self._checkpoint
            reader = _reader(one.disk, one.folder, one.manifest, rank, self._contents[rank])
            self._readers[rank] = self._closing.enter_context(reader)
        return self._readers[rank]


def _reader(disk: Disk, folder: Path, manifest: Manifest, rank: int, contents: Any) -> ShardReader:
    parts = [
        part_of(entry.name, entry.kind, getattr(torch, entry.dtype), entry.shape, piece.stop - piece.start)
        for entry, piece in contents
    ]
    return ShardReader(disk, folder / file_name(rank, manifest.world), manifest.files[rank], parts)


# -- what is not a tensor ----------------------------------------------------------------------------------------------


def _numbers(folder: Path, manifest: Manifest) -> tuple[int, LossScale, bool, list[Mapping[str, Any]]]:
    """The step, the loss scale and whether it moved, and every rank's generators; none from another program."""
    facts = manifest.facts
    try:
        numbers, randoms = facts["state"], facts["random"]
        step, scale, dynamic = numbers["step"], LossScale(*numbers["scale"]), numbers["dynamic"]
        whole = (step, *scale[1:])
        sound = (
            all(type(number) is int and number >= 0 for number in whole)
            and step + scale.skipped == manifest.step
            and type(scale.scale) in (int, float)
            and scale.scale > 0
            and type(dynamic) is bool
            and type(facts["given"]) is dict
            and type(randoms) is list
            and len(randoms) in (0, manifest.world)
        )
        for one in randoms if sound else []:
            set_random(one, random.Random(), torch.Generator())
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError):
        sound = False
    if not sound:
        raise CheckpointError(f"{folder}: its manifest lacks step, loss scale or generators, or has others than a save")
    return step, scale, dynamic, randoms


def set_random(told_: Mapping[str, Any], python: Any = random, host: torch.Generator | None = None) -> None:
    """The opposite of `random_state`; or try it on these generators, which are nobody's."""
    version, internal, following = told_["python"]
    python.setstate((version, tuple(internal), following))
    (torch.default_generator if host is None else host).set_state(_octets(told_["torch"]))
    cuda = None if told_["cuda"] is None else _octets(told_["cuda"])
    if cuda is not None and host is None and torch.cuda.is_available():
        torch.cuda.set_rng_state(cuda)


def _octets(text: str) -> Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)

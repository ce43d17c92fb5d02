"""Load a checkpoint into any state of the same model, whatever the stage, tier, world, pages and units of either.

Opening reads the manifest and hashes every file, shared out over the ranks; a checkpoint that is open was whole. Only
then is anything of the state written: each rank reads the ranges that its own flats cover, through the CRC-32 of every
MiB, and lets them run through the sinks that first values go through.

Names have to match both ways, unless a pattern says that a tensor stays as it is.
"""

import itertools
import random
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero.checkpoint.contents import BUFFER, FROZEN, PARAMETER, part_of, tensors
from zero.checkpoint.disk import Disk
from zero.checkpoint.hashes import BLOCK_BYTES
from zero.checkpoint.manifest import Entry, Manifest, Piece, file_name, step_name, step_of
from zero.checkpoint.publish import MANIFEST_NAME, Root
from zero.checkpoint.save import by_rank_0, gather_reports, join
from zero.checkpoint.shard import THREADS, ShardReader, compare
from zero.core.layout import Slot
from zero.core.loss_scale import LossScale
from zero.core.suggest import some
from zero.distributed.world import World
from zero.engine.arguments import check_state, kind_of
from zero.engine.first_values import sinks_of
from zero.engine.full import full_values
from zero.engine.module_copy import buffers_of
from zero.engine.plan import Plan
from zero.engine.state import State
from zero.errors import CheckpointError, ConfigError
from zero.platform.files import memory_of
from zero.progress import Progress, reported, silent

FOLDER = "checkpoints"
"""Of a run, inside its folder, unless configured otherwise."""

OPEN_FILES = 8
"""Each keeps a descriptor and a MiB."""

Contents = tuple[tuple[tuple[Entry, Piece], ...], ...]
"""For each rank, the pieces in its file."""

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
        world: the ranks, which share the work of comparing.
        folder: one checkpoint, such as `checkpoints/step-0000000100`.
        disk: the file calls, for tests; default: the file system's.
        progress: called with the bytes that this rank has compared.

    Raises:
        CheckpointError: on every rank; the line names file and place of the first damage that some rank found.

    Returns:
        The checkpoint, for `load`; its `facts` are those that `save` was given.
    """
    folder, disk = Path(folder), disk or Disk()
    found: list[Manifest] = []

    def read() -> dict[str, Any]:
        found.append(Root(folder.parent, disk).read_manifest(folder))
        _numbers(folder, found[0])
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
        CheckpointError: there are checkpoints, and none is valid.
    """
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
            "restore one, or set resume=none to start again"
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


def load(
    state: State,
    checkpoint: Checkpoint,
    *,
    partial: Iterable[str] = (),
    convert: Iterable[str] = (),
    moments: bool = True,
    weights: str = PARAMETER,
    note: Callable[[str], None] = lambda text: None,
    progress: Progress = silent,
) -> State:
    """`state` with the checkpoint's values; the one that was given is spent. Collective.

    Args:
        state: of the same model, of any stage, tier and world.
        checkpoint: what `open_checkpoint` or `open_latest` returned.
        partial: names, or patterns such as `head.*`, of tensors that keep the values that they have: they may be
            missing on either side, or differ in shape. With its kind in front, such as `nu/*`, of that kind only.
        convert: names or patterns of tensors whose dtype may change; moments may go from any form to any.
        moments: False leaves the optimizer's as they are, whatever the checkpoint has: for a state that is not trained.
        weights: "parameter" (default), or "ema": the parameters get the running mean of what they were.
        note: called with which tensors keep their values because of `partial`.
        progress: called with the units that are filled.

    Raises:
        CheckpointError: names, shapes or dtypes that do not match, a pattern of `partial` that names nothing, or no
            such `weights`, and nothing was changed; or damage that came after the checkpoint was opened: then the state
            is spent.
    """
    check_state(state, "zero.load", "state = zero.load(state, checkpoint)")
    if not isinstance(checkpoint, Checkpoint):
        raise ConfigError(
            f"zero.load takes a Checkpoint second, and this is {kind_of(checkpoint)}; write "
            "state = zero.load(state, zero.open_checkpoint(world, folder))"
        )
    runtime, plan = state.runtime, state.plan
    runtime.come_to_rest()
    partial, convert = tuple(partial), tuple(convert)
    buffers = buffers_of(state.model)
    wanted = {(name, kind): (dtype, shape) for name, kind, dtype, shape in tensors(plan, buffers)}
    there = _entries(checkpoint, wanted)
    begun = _begun(plan, wanted, there) if moments else {}
    if begun:
        note(f"{checkpoint.folder} has no {', '.join(plan.optimizer.copies)}: it begins as the parameters")
    there, mean = {**there, **begun}, weights_of(checkpoint, weights)
    there |= {key: mean[key[0]] for key in there if key[1] in (PARAMETER, FROZEN) and key[0] in mean}

    def stays_out(key: Key) -> bool:
        return _named(key, partial) or not (moments or key[1] in (PARAMETER, FROZEN, BUFFER))

    for pattern in partial:
        if not any(_named(key, (pattern,)) for key in (*wanted, *there)):
            raise CheckpointError(
                f"checkpoint.partial={pattern}: the model has no such tensor, nor {checkpoint.folder}"
            )
    kept = {key for key in wanted if stays_out(key)}
    _match(checkpoint.folder, {key: one for key, one in there.items() if not stays_out(key)}, wanted, kept, convert)
    step, saved, dynamic, rested, randoms = _numbers(checkpoint.folder, checkpoint.manifest)
    if partial:
        named = [_words(key) for key in wanted if _named(key, partial)]
        note(f"checkpoint.partial: {len(named)} of {len(wanted)} tensors keep the values they have" + _listed(named))
        if left := [_words(key) for key in there if key not in wanted and _named(key, partial)]:
            note(f"checkpoint.partial: {len(left)} tensors of the checkpoint are left behind" + _listed(left))
    stays = _current(state, kept - _untouched(plan, kept))
    following = state.restored(step=step, scale=plan.precision.scale.resumed(saved, dynamic=dynamic))
    gather_reports(plan.world, lambda: _fill(following, checkpoint, there, stays, buffers, kept, progress))
    runtime.updater.resume(rested)
    for unit in runtime.units:
        unit.mark_changed(resident=True, frozen=True)
    if len(randoms) == plan.world.size:
        set_random(randoms[plan.world.rank])
    return following


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


# -- what belongs together ---------------------------------------------------------------------------------------------


def _entries(checkpoint: Checkpoint, wanted: Iterable[Key]) -> dict[Key, Entry]:
    """By name and kind; what was trained then and is frozen now, or the other way round, by the kind that is wanted."""
    found = {(entry.name, entry.kind): entry for entry in checkpoint.manifest.entries}
    for name, kind in wanted:
        other = (name, {PARAMETER: FROZEN, FROZEN: PARAMETER}.get(kind, kind))
        if (name, kind) not in found and other in found:
            found[name, kind] = found.pop(other)
    return found


def one_sided(state: State, checkpoint: Checkpoint) -> tuple[str, ...]:
    """What only the model or only the checkpoint has, as patterns for `partial`."""
    wanted = {(name, kind) for name, kind, *_ in tensors(state.plan, buffers_of(state.model))}
    return tuple(sorted(escape(f"{kind}/{name}") for name, kind in wanted ^ _entries(checkpoint, wanted).keys()))


def weights_of(checkpoint: Checkpoint, weights: str) -> dict[str, Entry]:
    """By name, what stands for the parameters: those that were trained, or a mean of them.

    Raises:
        CheckpointError: it was trained without.
    """
    found = {entry.name: entry for entry in checkpoint.manifest.entries if entry.kind == weights}
    if not found and weights != PARAMETER:
        raise CheckpointError(f"{checkpoint.folder} has no {weights}; set optim.ema=0.999 where it is trained")
    return found


def _begun(plan: Plan, wanted: Iterable[Key], there: Mapping[Key, Entry]) -> dict[Key, Entry]:
    """What begins as the parameters and is not in the checkpoint, with the parameter's entry."""
    lacking = [key for key in wanted if key[1] in plan.optimizer.copies and key not in there]
    return {key: there[key[0], PARAMETER] for key in lacking if (key[0], PARAMETER) in there}


def _match(
    folder: Path,
    there: Mapping[Key, Entry],
    wanted: Mapping[Key, tuple[torch.dtype, tuple[int, ...]]],
    kept: set[Key],
    convert: Sequence[str],
) -> None:
    missing = [_words(key) for key in wanted if key not in there and key not in kept]
    unknown = [_words(key) for key in there if key not in wanted]
    reshaped, recast = list[str](), list[str]()
    for key in filter(there.__contains__, wanted):
        entry, (dtype, shape) = there[key], wanted[key]
        if entry.shape != shape:
            reshaped.append(f"{_words(key)} {entry.shape} for {shape}")
        if not _may_become(key[1], entry.dtype, dtype) and not _named(key, convert):
            recast.append(f"{_words(key)} {entry.dtype}")
    wrong = {
        "missing": missing,
        "not in the model": unknown,
        "of another shape": reshaped,
        "of another dtype": recast,
    }
    refused = [f"{some(names)} {'is' if len(names) == 1 else 'are'} {what}" for what, names in wrong.items() if names]
    if refused:
        keys = "checkpoint.convert" if recast and len(refused) == 1 else "checkpoint.partial"
        raise CheckpointError(f"{folder}: {'; '.join(refused)}; name them in {keys} if that is meant")


def _may_become(kind: str, saved: str, dtype: torch.dtype) -> bool:
    """Frozen parameters and statistics are held in the dtype of compute, and moments in fp32 or bf16 (those in 8 bits
    as fp32), which may be another one than before; the rest is not."""
    if kind == FROZEN or (kind == BUFFER and dtype.is_floating_point):
        return "float" in saved
    if kind not in (PARAMETER, BUFFER):
        return saved in ("float32", "bfloat16")
    return saved == str(dtype).removeprefix("torch.")


def _named(key: Key, patterns: Sequence[str]) -> bool:
    name, kind = key
    return any(fnmatchcase(name, pattern) or fnmatchcase(f"{kind}/{name}", pattern) for pattern in patterns)


def _listed(names: Sequence[str]) -> str:
    return f": {some(names)}" if names else ""


def _words(key: Key) -> str:
    name, kind = key
    return name if kind in (PARAMETER, FROZEN) else f"{kind}/{name}"


# -- what goes where ---------------------------------------------------------------------------------------------------


def _untouched(plan: Plan, kept: set[Key]) -> set[Key]:
    """Of what stays, the flats of which everything does: nothing is read or written there."""
    flats = [(unit.trainable, kind) for unit in plan.units for kind in (PARAMETER, *plan.optimizer.moments)]
    flats += [(unit.frozen, FROZEN) for unit in plan.units]
    held = [{(slot.name, kind) for slot in layout.slots} for layout, kind in flats]
    return {key for keys in held if keys <= kept for key in keys}


def _fill(
    state: State,
    checkpoint: Checkpoint,
    entries: Mapping[Key, Entry],
    stays: Mapping[Key, Tensor],
    buffers: Mapping[str, Tensor],
    kept: set[Key],
    progress: Progress,
) -> dict[str, Any]:
    plan, store = state.plan, state.runtime.store
    untouched = _untouched(plan, kept)
    with Tensors(checkpoint) as files, torch.no_grad():

        def values(slot: Slot, kind: str, start: int, stop: int) -> Tensor:
            key = (slot.name, kind)
            return stays[key].view(-1)[start:stop] if key in stays else files.read(entries[key], start, stop)

        for unit in reported(state.runtime.units, "loading", progress):
            for kind in (PARAMETER, *plan.optimizer.moments, FROZEN):
                layout = unit.spec.frozen if kind == FROZEN else unit.spec.trainable
                if any((slot.name, kind) in untouched for slot in layout.slots):
                    continue
                sinks = sinks_of(plan, store, unit, "param" if kind == PARAMETER else kind, at=None)
                first, last = min(sink.start for sink in sinks), max(sink.stop for sink in sinks)
                for start in range(first, last, plan.page_numel):
                    stop = min(start + plan.page_numel, last)
                    page_K = plan.world.compute.host.zeros(stop - start, torch.float32)
                    for slot, a, b, place in layout.pieces(start, stop):
                        page_K[place : place + b - a].copy_(values(slot, kind, a, b))
                    for sink in sinks:
                        sink.take(page_K)
        for name, buffer in buffers.items():
            if (name, BUFFER) not in kept:
                buffer.copy_(files.read(entries[name, BUFFER], 0, buffer.numel()).view(buffer.shape))
    return {}


def _current(state: State, kept: Set[Key]) -> dict[Key, Tensor]:
    """The values that stay, whole, on the host. Collective: a set's own order is another one in each process."""
    found = {}
    for kind in sorted({kind for _, kind in kept if kind != BUFFER}):
        names = {name for name, other in kept if other == kind}
        source = {PARAMETER: "param", FROZEN: "param"}.get(kind, kind)
        for name, tensor in full_values(state, source):
            if name in names:
                found[name, kind] = tensor
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


def _numbers(folder: Path, manifest: Manifest) -> tuple[int, LossScale, bool, dict[str, int], list[Mapping[str, Any]]]:
    """The step, the loss scale and whether it moved, the steps in which parameters did not train, and every rank's
    generators; none from another program."""
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
    return step, scale, dynamic, rested, randoms


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

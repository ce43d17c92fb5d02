"""Import what other libraries wrote as a checkpoint that loads like one of ours.

A source has names and values. What it does not have is decided here: which names are parameters, frozen or buffers;
moments that it lacks are zeros; its generators and loss scale begin anew. Whether names and shapes are those of a
model, loading says.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from zero.checkpoint import Root
from zero.checkpoint.contents import BUFFER, FROZEN, PARAMETER, lone
from zero.checkpoint.hashes import FileHash
from zero.checkpoint.manifest import FORMAT, UNWRITTEN, Index, Manifest, file_name, held, step_name, to_text
from zero.checkpoint.save import facts_of
from zero.checkpoint.shard import ShardWriter
from zero.core.precision import Precision
from zero.core.suggest import some
from zero.errors import CheckpointError, ConfigError, if_it_fails
from zero.formats.hf import read as read_hf
from zero.formats.stream import Source, Stream, counted
from zero.formats.torch_file import read as read_torch
from zero.formats.universal import read as read_deepspeed
from zero.platform.files import memory_of, naming
from zero.platform.safetensors_files import NAMES, Part, header
from zero.progress import Progress, silent

FORMATS = ("hf", "torch", "dcp", "deepspeed")

STATISTICS = ("*.running_mean", "*.running_var", "*.num_batches_tracked")
"""Names that torch's own buffers have."""


Value = tuple[str, str, Stream]
"""Name, kind and values of one tensor of the checkpoint."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """What a source does not state.

    Attributes:
        prefix: only names that begin with it are taken, without it.
        moments: what the optimizer will want of each parameter: mu and nu for Adam, mu for Lion and momentum.
        frozen: names or patterns of parameters that will not be trained.
        buffers: names or patterns of buffers, beside what is no floating-point tensor or named as torch's own.
        ties: further name -> name. Both are compared, and one is kept.
        step: updates made; None: what the source states, or 0 where it has no moments.
    """

    prefix: str = ""
    moments: tuple[str, ...] = ("mu", "nu")
    frozen: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    ties: Mapping[str, str] = dataclasses.field(default_factory=dict)
    step: int | None = None


class Imported(NamedTuple):
    """The published folder, and lines for a person on what the source did not have."""

    folder: Path
    notes: list[str]


def read_source(from_: str, path: Path) -> Source:
    """Find what is there; values are read later.

    Raises:
        CheckpointError: it is not what `from_` says, or holds more than tensors.
        ConfigError: an unknown format.
    """
    if from_ not in FORMATS:
        raise ConfigError(f"--from {from_}; known: {', '.join(FORMATS)}")
    with naming(path):
        path.stat()
    read: dict[str, Callable[[Path], Source]] = {"hf": read_hf, "torch": read_torch, "deepspeed": read_deepspeed}
    if from_ == "dcp":
        from zero.formats.dcp import read as read_dcp  # half a second and 50 MB, for this format alone

        read["dcp"] = read_dcp
    source = read[from_](path)
    for name in (*source.tensors, *source.ties, *source.ties.values()):
        if type(name) is not str or not name or not name.isprintable():
            raise CheckpointError(f"{path}: a tensor's name is {repr(name)[:80]}; expected text that can be printed")
    return source


def import_checkpoint(source: Source, root: Path, choice: Choice = Choice(), progress: Progress = silent) -> Imported:
    """Write a checkpoint of world 1 under `root`, and publish it.

    Args:
        root: its parent exists.
        progress: called with the bytes that are written.

    Raises:
        CheckpointError: ties that are none, values that cannot be read, a step that is there already; nothing was
            published.
        ConfigError: a name or pattern that fits no tensor.
    """
    source = _under(source, choice.prefix)
    ties = {**source.ties, **choice.ties}
    _check_ties(source, ties)
    kinds = _kinds(source, ties, choice)
    step = choice.step if choice.step is not None else source.step
    if step is None:
        if source.moments:
            raise CheckpointError("the source has moments and does not say after how many steps; give --step")
        step = 0
    values = _values(source, kinds, choice.moments)
    folder = _publish(Root(root), values, ties, step, source.skipped, progress)
    return Imported(folder, list(_notes(source, kinds, choice, ties)))


def _under(source: Source, prefix: str) -> Source:
    def taken(names: Iterable[str]) -> dict[str, str]:
        return {name: name.removeprefix(prefix) for name in names if name.startswith(prefix)}

    names, further = taken(source.tensors), taken(source.ties)
    if not names:
        there = next(iter(source.tensors), "no tensor")
        raise ConfigError(f"--prefix {prefix!r}: no tensor's name begins with it; there is {there}")
    return dataclasses.replace(
        source,
        tensors={short: source.tensors[name] for name, short in names.items()},
        ties={short: names[source.ties[name]] for name, short in further.items() if source.ties[name] in names},
        moments={(names[name], kind): one for (name, kind), one in source.moments.items() if name in names},
        kinds={names[name]: kind for name, kind in source.kinds.items() if name in names},
        left=tuple(source.left) + tuple(name for name in source.tensors if name not in names),
    )


# -- what is what ------------------------------------------------------------------------------------------------------


def _check_ties(source: Source, ties: Mapping[str, str]) -> None:
    """The source may have the values under the further name too; then they must be the same."""
    for name, owner in ties.items():
        if owner not in source.tensors or owner in ties:
            raise ConfigError(f"{name} is tied to {owner}, which is not a tensor of the source")
        other = source.tensors.get(name)
        if other is not None and not _equal(other, source.tensors[owner], name):
            raise CheckpointError(f"{name} and {owner} are to be tied, but their values differ; leave the tie out")


def _equal(one: Stream, other: Stream, what: str) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    pairs = zip_longest(one.blocks(what), other.blocks(what))
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def _kinds(source: Source, ties: Mapping[str, str], choice: Choice) -> dict[str, str]:
    """What each tensor is; further names of others are left out."""
    names = [name for name in source.tensors if name not in ties]
    for key, patterns in (("--frozen", choice.frozen), ("--buffers", choice.buffers)):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ConfigError(f"{key} {pattern}: fits no tensor; the first is {names[0]}")

    def kind(name: str) -> str:
        buffers = (*choice.buffers, *STATISTICS)
        if not source.tensors[name].dtype.is_floating_point or any(fnmatchcase(name, one) for one in buffers):
            return BUFFER
        if any(fnmatchcase(name, one) for one in choice.frozen):
            return FROZEN
        return source.kinds.get(name, PARAMETER)

    return {name: kind(name) for name in names}


def _values(source: Source, kinds: Mapping[str, str], moments: tuple[str, ...]) -> list[Value]:
    """Everything that the checkpoint will hold: masters and moments are fp32."""
    found = []
    for name, kind in kinds.items():
        stream = source.tensors[name]
        is_float8 = stream.dtype.is_floating_point and stream.dtype.itemsize == 1  # its scale is another tensor
        if stream.dtype not in NAMES or is_float8:
            raise CheckpointError(f"{name} ({kind}): is {stream.dtype}, which is not imported; import a bf16 copy")
        found.append((name, kind, stream.to(torch.float32, name) if kind == PARAMETER else stream))
        for moment in moments if kind == PARAMETER else ():
            own = source.moments.get((name, moment), Stream.read_by(torch.float32, stream.shape, _zeros))
            if own.shape != stream.shape:
                raise CheckpointError(f"{name}: its {moment} has shape {own.shape}, itself {stream.shape}")
            found.append((name, moment, own.to(torch.float32, f"{moment} of {name}")))
    return found


def _zeros(start: int, stop: int) -> Tensor:
    return torch.zeros(stop - start)


def _notes(source: Source, kinds: Mapping[str, str], choice: Choice, ties: Mapping[str, str]) -> Iterator[str]:
    """What a person would not expect."""
    parameters = [name for name, kind in kinds.items() if kind == PARAMETER]
    for kind in choice.moments:
        missing = sum((name, kind) not in source.moments for name in parameters)
        if missing:
            yield f"{kind} begins at zero for {missing} of {len(parameters)} parameters: the source does not have it"
    unused = sorted({kind for _, kind in source.moments} - set(choice.moments))
    if unused:
        yield f"left out: the source's {', '.join(unused)}, which --moments does not name"
    if ties:
        yield f"tied: {some([f'{name} = {owner}' for name, owner in ties.items()])}"
    if source.left:
        yield f"left out: {some(source.left)}"


# -- the checkpoint ----------------------------------------------------------------------------------------------------


def _publish(
    root: Root, values: list[Value], ties: Mapping[str, str], step: int, skipped: int, progress: Progress
) -> Path:
    number = step + skipped
    name = step_name(number)
    if number in root.steps():
        raise CheckpointError(f"{root.path / name}: exists; give --step or another --out")
    scale = Precision("fp32").scale.start()._replace(skipped=skipped)  # whoever loads it begins with one of its own
    manifest = Manifest(
        format=FORMAT,
        step=number,
        world=1,
        flats=tuple(lone(name, kind, stream.dtype, stream.shape) for name, kind, stream in values),
        files=(UNWRITTEN,),
        finite=False,
        facts={**facts_of(step, scale, dynamic=False, ties=ties), "given": {}},
    )
    pieces = held(manifest.flats, 0)
    parts = [piece.part for piece in pieces]
    header(parts)  # an error before the folder is made
    to_text(manifest)
    folder = root.begin(number)
    with if_it_fails(partial(root.abandon, folder)):
        filled = [values[piece.flat][2] for piece in pieces]
        streams = counted(filled, "importing", progress)
        named = zip((f"{piece.slot.name} ({piece.kind})" for piece in pieces), streams, strict=True)
        hashes, finite = _write(root, folder / file_name(0, 1), parts, named)
        file = root.write_index(folder, 0, 1, Index(hashes, None))
        return root.publish(folder, number, to_text(manifest._replace(files=(file,), finite=finite)))


def _write(root: Root, path: Path, parts: list[Part], streams: Iterable[tuple[str, Stream]]) -> tuple[FileHash, bool]:
    finite = True
    with ShardWriter(root.disk, path, parts) as writer:
        for what, stream in streams:
            for block in stream.blocks(what):
                finite = finite and bool(block.isfinite().all())
                writer.write(memory_of(block))
        return writer.finish(), finite

"""Import files of other libraries as a checkpoint.

A source has names and values. `ImportChoice` adds what the files do not say, such as which tensors are buffers. Missing
moments are written as zeros. Random generators and loss scale start anew. `zero.load` later compares names and shapes
with the model.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zero.checkpoint import Root
from zero.checkpoint.contents import BUFFER, FROZEN, PARAMETER, lone
from zero.checkpoint.files.shard import ShardWriter
from zero.checkpoint.format.facts import saved_facts
from zero.checkpoint.format.manifest import Index, Manifest, file_name, files_of, held, step_name
from zero.checkpoint.format.texts import FORMAT, to_text
from zero.core.precision import Precision
from zero.core.suggest import some
from zero.errors import CheckpointError, ConfigError, if_it_fails
from zero.formats.safetensors_folder import read as read_hf
from zero.formats.stream import Stream, TensorSource, counted
from zero.formats.torch_file import read as read_torch
from zero.formats.universal import read as read_deepspeed
from zero.platform.files import memory_of, naming
from zero.platform.safetensors_files import DTYPE_NAMES
from zero.progress import Progress, silent

IMPORT_FORMATS = ("hf", "torch", "dcp", "deepspeed")

STATISTICS = ("*.running_mean", "*.running_var", "*.num_batches_tracked")
"""Patterns for the names of the buffers of torch's normalization layers."""

SavedValue = tuple[str, str, Stream]
"""(name, kind, values) of one tensor of the new checkpoint."""


@dataclasses.dataclass(frozen=True)
class ImportChoice:
    """The options of an import: facts that the source does not state.

    Attributes:
        prefix: import only tensors whose names begin with this prefix, and strip it.
        moments: kinds of the optimizer's moments: mu and nu for Adam, mu for Lion and momentum.
        frozen: names or patterns of parameters that will not be trained.
        buffers: names or patterns of buffers. Integer tensors and `STATISTICS` are buffers in any case.
        ties: alias of a tied tensor -> name of the tensor. If the source has both, their values must be equal.
        step: number of updates made. None: as stated by the source, or 0 if it has no moments.
    """

    prefix: str = ""
    moments: tuple[str, ...] = ("mu", "nu")
    frozen: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    ties: Mapping[str, str] = dataclasses.field(default_factory=dict)
    step: int | None = None


class Imported(NamedTuple):
    """The result of an import: the published folder, and lines about missing and unused values."""

    folder: Path
    notes: list[str]


def open_source(from_: str, path: Path) -> TensorSource:
    """Return the tensors of a file or folder; their values are read later.

    Args:
        from_: the format, one of `IMPORT_FORMATS`.

    Raises:
        CheckpointError: the path is not of the format `from_`, is damaged, or contains objects that are not allowed.
        ConfigError: the format is unknown.
    """
    if from_ not in IMPORT_FORMATS:
        raise ConfigError(f"--from {from_} does not exist. Choose from {', '.join(IMPORT_FORMATS)}.")
    with naming(path):
        path.stat()
    read: dict[str, Callable[[Path], TensorSource]] = {"hf": read_hf, "torch": read_torch, "deepspeed": read_deepspeed}
    if from_ == "dcp":
        from zero.formats.dcp import read as read_dcp  # here, because the import takes 0.5 s and 50 MB

        read["dcp"] = read_dcp
    source = read[from_](path)
    for name in (*source.tensors, *source.ties, *source.ties.values()):
        if type(name) is not str or not name or not name.isprintable():
            raise CheckpointError(f"{path}: a tensor's name is {repr(name)[:80]}, not printable text")
    return source


def import_checkpoint(
    source: TensorSource, root: Path, choice: ImportChoice = ImportChoice(), progress: Progress = silent
) -> Imported:
    """Write a source as a checkpoint with the file of one rank under `root`, and publish it.

    Args:
        root: the folder of checkpoints; made if its parent exists.
        progress: called with the number of bytes written.

    Raises:
        CheckpointError: tied values differ, values cannot be read, or the step exists; nothing was published.
        ConfigError: a name or pattern matches no tensor.
    """
    source = _under(source, choice.prefix)
    ties = {**source.ties, **choice.ties}
    _check_ties(source, ties)
    kinds = _kinds(source, ties, choice)
    step = choice.step if choice.step is not None else source.step
    if step is None:
        if source.moments:
            raise CheckpointError("the source has moments, but not their number of steps. Give --step.")
        step = 0
    values = _values(source, kinds, choice.moments)
    begun = {
        name: 0 for name, kind in kinds.items() if kind == PARAMETER and _lacks_moments(source, name, choice.moments)
    }
    rested = {name: step - updates for name, updates in {**source.updates, **begun}.items() if updates != step}
    numbers = saved_facts(step, START._replace(skipped=source.skipped), dynamic=False, ties=ties, rested=rested)
    folder = _publish(Root(root), values, step + source.skipped, numbers, progress)
    return Imported(folder, list(_notes(source, kinds, choice, ties)))


def _under(source: TensorSource, prefix: str) -> TensorSource:
    """Return a source with only the names that begin with `prefix`, which is stripped."""

    def stripped(names: Iterable[str]) -> dict[str, str]:
        return {name: name.removeprefix(prefix) for name in names if name.startswith(prefix)}

    names, further = stripped(source.tensors), stripped(source.ties)
    if not names:
        first = next(iter(source.tensors), "no tensor")
        raise ConfigError(f"--prefix {prefix!r}: no tensor's name begins with this. The source has {first}.")
    return dataclasses.replace(
        source,
        tensors={short: source.tensors[name] for name, short in names.items()},
        ties={short: names[source.ties[name]] for name, short in further.items() if source.ties[name] in names},
        moments={(names[name], kind): moment for (name, kind), moment in source.moments.items() if name in names},
        kinds={names[name]: kind for name, kind in source.kinds.items() if name in names},
        updates={names[name]: count for name, count in source.updates.items() if name in names},
        left=tuple(source.left) + tuple(name for name in source.tensors if name not in names),
    )


# -- kinds -------------------------------------------------------------------------------------------------------------


def _check_ties(source: TensorSource, ties: Mapping[str, str]) -> None:
    """Check that the tensor of each tie exists, and that its alias has equal values if the source has both.

    Raises:
        ConfigError: an alias is tied to a name that the source does not have.
        CheckpointError: the values differ.
    """
    for name, owner in ties.items():
        if owner not in source.tensors or owner in ties:
            raise ConfigError(f"{name} is tied to {owner}, which is not a tensor of the source")
        other = source.tensors.get(name)
        if other is not None and not _equal(other, source.tensors[owner], name):
            raise CheckpointError(f"{name} and {owner} cannot be tied, because their values differ. Leave the tie out.")


def _equal(first: Stream, second: Stream, what: str) -> bool:
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    pairs = zip(first.blocks(what), second.blocks(what), strict=True)  # all blocks but the last have equal sizes
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def _kinds(source: TensorSource, ties: Mapping[str, str], choice: ImportChoice) -> dict[str, str]:
    """Return name -> kind of each tensor, without the aliases of tied tensors."""
    names = [name for name in source.tensors if name not in ties]
    for key, patterns in (("--frozen", choice.frozen), ("--buffers", choice.buffers)):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ConfigError(f"{key} {pattern}: matches no tensor. The first is {names[0]}.")

    def kind(name: str) -> str:
        buffers = (*choice.buffers, *STATISTICS)
        if not source.tensors[name].dtype.is_floating_point or any(fnmatchcase(name, pattern) for pattern in buffers):
            return BUFFER
        if any(fnmatchcase(name, pattern) for pattern in choice.frozen):
            return FROZEN
        return source.kinds.get(name, PARAMETER)

    return {name: kind(name) for name in names}


def _values(source: TensorSource, kinds: Mapping[str, str], moments: tuple[str, ...]) -> list[SavedValue]:
    """List the tensors of the new checkpoint; parameters and moments are fp32, other tensors keep their dtype."""
    values = []
    for name, kind in kinds.items():
        stream = source.tensors[name]
        is_float8 = stream.dtype.is_floating_point and stream.dtype.itemsize == 1  # the scale is a separate tensor
        if stream.dtype not in DTYPE_NAMES or is_float8:
            raise CheckpointError(f"{name} ({kind}): {stream.dtype} cannot be imported. Import a bf16 copy.")
        values.append((name, kind, stream.to(torch.float32, name) if kind == PARAMETER else stream))
        zeros = Stream.read_by(torch.float32, stream.shape, lambda start, stop: torch.zeros(stop - start))
        for moment in moments if kind == PARAMETER else ():
            saved = source.moments.get((name, moment), zeros)
            if saved.shape != stream.shape:
                raise CheckpointError(
                    f"{name}: its {moment} has shape {saved.shape}, but the tensor has {stream.shape}"
                )
            values.append((name, moment, saved.to(torch.float32, f"{moment} of {name}")))
    return values


def _lacks_moments(source: TensorSource, name: str, moments: tuple[str, ...]) -> bool:
    return any((name, moment) not in source.moments for moment in moments)


def _notes(
    source: TensorSource, kinds: Mapping[str, str], choice: ImportChoice, ties: Mapping[str, str]
) -> Iterator[str]:
    """Yield a line about each kind of value that the source lacks or the checkpoint leaves out."""
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


START = Precision("fp32").scale.start()  # a load starts with the run's own scale


def _publish(root: Root, values: list[SavedValue], number: int, numbers: Mapping[str, Any], progress: Progress) -> Path:
    name = step_name(number)
    if number in root.steps():
        raise CheckpointError(f"{root.path / name}: exists already. Give --step or another --out.")
    manifest = Manifest(
        format=FORMAT,
        step=number,
        world=1,
        flats=tuple(lone(name, kind, stream.dtype, stream.shape) for name, kind, stream in values),
        files=(),
        finite=False,
        facts={**numbers, "given": {}},
    )
    pieces = {file: held(manifest.flats, file, 1) for file in files_of(manifest.flats, 0, 1)}
    folder = root.begin(number)
    with if_it_fails(partial(root.abandon, folder)):
        inputs = [values[piece.flat][2] for several in pieces.values() for piece in several]
        streams, finite, files = iter(counted(inputs, "importing", progress)), True, []
        for file, several in pieces.items():
            with ShardWriter(root.disk, folder / file_name(file, 1), [piece.part for piece in several]) as writer:
                for piece in several:
                    for block in next(streams).blocks(f"{piece.slot.name} ({piece.kind})"):
                        finite = finite and bool(block.isfinite().all())
                        writer.write(memory_of(block))
                files.append(root.write_index(folder, file, 1, Index(writer.finish(), None)))
        return root.publish(folder, number, to_text(manifest._replace(files=tuple(files), finite=finite)))

"""An import raises one line, or has the values of the source.

`benchmarks/fuzz_checkpoint.py --foreign` runs the second part with any number of cases.
"""

import contextlib
import json
import os
import pickle
import re
import resource
import shutil
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as torch_checkpoint
from hypothesis import given, strategies as st
from torch.distributed.checkpoint import metadata

from tests.conftest import SEED
from zero.checkpoint import Tensors, open_checkpoint
from zero.distributed.world import World
from zero.errors import CheckpointError, ZeroError
from zero.formats import ImportChoice, import_checkpoint, open_source
from zero.formats.dcp import _Piece, is_whole

SHAPES = {"a": (40, 24), "b": (40, 24), "c.d": (24, 40), "c.e": (77,), "f": (3, 5, 7), "g": ()}


def values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def imported(from_: str, path: Path, root: Path, moments: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint that is made of the file."""
    checkpoint = open_checkpoint(
        World.solo(), import_checkpoint(open_source(from_, path), root, ImportChoice(moments=moments)).folder
    )
    with Tensors(checkpoint) as files:
        return {
            f"{entry.name} ({entry.kind})": files.read(entry, 0, entry.numel).view(entry.shape)
            for entry in checkpoint.manifest.entries
        }


# -- pieces of a tensor ------------------------------------------------------------------------------------------------


def span(length: int) -> st.SearchStrategy[tuple[int, int]]:
    """(start, size), mostly inside."""
    return st.tuples(st.integers(-1, length), st.integers(-1, length + 1))


@given(st.data())
def test_pieces_are_whole_if_and_only_if_every_element_is_in_one_of_them(data):
    """Compared with counting the elements of every piece."""
    shape = tuple(data.draw(st.lists(st.integers(0, 3), max_size=3)))
    if data.draw(st.booleans()):
        boxes = list(cut(data, (0,) * len(shape), shape))
        if boxes and data.draw(st.booleans()):
            del boxes[data.draw(st.integers(0, len(boxes) - 1))]
    else:
        boxes = [tuple(zip(*(data.draw(span(n)) for n in shape), strict=True)) or ((), ()) for _ in range(2)]
    counts = torch.zeros([n + 12 for n in shape])  # room for what is outside
    sound = True
    for start, sizes in boxes:
        sound = sound and all(size >= 0 for size in sizes)
        counts[tuple(slice(a + 4, a + 4 + max(n, 0)) for a, n in zip(start, sizes, strict=True))] += 1
    wanted = torch.zeros_like(counts)
    wanted[tuple(slice(4, 4 + n) for n in shape)] = 1
    assert is_whole(shape, [_Piece(*box, None) for box in boxes]) == (sound and torch.equal(counts, wanted))


def cut(data, start: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """A box, or what is left of it after some cuts."""
    axes = [axis for axis, size in enumerate(sizes) if size > 1]
    if not axes or data.draw(st.integers(0, 2)) == 0:
        yield start, sizes
        return
    axis = data.draw(st.sampled_from(axes))
    at = data.draw(st.integers(1, sizes[axis] - 1))
    yield from cut(data, start, (*sizes[:axis], at, *sizes[axis + 1 :]))
    rest = (*sizes[:axis], sizes[axis] - at, *sizes[axis + 1 :])
    yield from cut(data, (*start[:axis], start[axis] + at, *start[axis + 1 :]), rest)


def entry(dcp_metadata: Any) -> Any:
    return dcp_metadata.state_dict_metadata["a"]


def place(name: str) -> Any:
    return metadata.MetadataIndex(name, [0, 0])


LIES: dict[str, Callable[[Any], object]] = {
    "no properties": lambda dcp_metadata: setattr(entry(dcp_metadata), "properties", None),
    "a number for a size": lambda dcp_metadata: setattr(entry(dcp_metadata), "size", 5),
    "a size beyond memory": lambda dcp_metadata: setattr(entry(dcp_metadata), "size", torch.Size([2**50])),
    "a number for a name": lambda dcp_metadata: dcp_metadata.state_dict_metadata.update(
        {5: dcp_metadata.state_dict_metadata.pop("a")}
    ),
    "sizes below zero": lambda dcp_metadata: reshape(entry(dcp_metadata), [-40, -24]),
    "no pieces": lambda dcp_metadata: entry(dcp_metadata).chunks.clear(),
    "a hole": lambda dcp_metadata: setattr(entry(dcp_metadata).chunks[0], "sizes", torch.Size([40, 12])),
    "a piece outside": lambda dcp_metadata: setattr(entry(dcp_metadata).chunks[0], "offsets", torch.Size([1, 0])),
    "a piece twice": lambda dcp_metadata: entry(dcp_metadata).chunks.extend(entry(dcp_metadata).chunks),
    "a piece in no file": lambda dcp_metadata: dcp_metadata.storage_data.pop(place("a")),
    "a file elsewhere": lambda dcp_metadata: setattr(
        dcp_metadata.storage_data[place("a")], "relative_path", "../secret"
    ),
    "two in one place": lambda dcp_metadata: dcp_metadata.storage_data.update(
        {place("a"): dcp_metadata.storage_data[place("b")]}
    ),
    "another dtype": lambda dcp_metadata: setattr(entry(dcp_metadata).properties, "dtype", torch.bfloat16),
    "another shape": lambda dcp_metadata: reshape(entry(dcp_metadata), [24, 40]),
}


def reshape(tensor: Any, sizes: list[int]) -> None:
    tensor.size = tensor.chunks[0].sizes = torch.Size(sizes)


@pytest.mark.parametrize("lie", LIES)
def test_metadata_of_dcp_that_lies_is_refused_and_nothing_is_published(lie: str, tmp_path: Path):
    folder = written("dcp", tmp_path / "dcp")
    change_metadata(folder, LIES[lie])
    with pytest.raises(CheckpointError) as caught:
        imported("dcp", folder, tmp_path / "root")
    assert re.search(r"'a'|\.metadata", str(caught.value))
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("root/*"))


def test_a_tensor_in_pieces_is_put_together(tmp_path: Path):
    """As ranks write it: cut along both axes."""
    folder = written("dcp", tmp_path / "dcp")

    def cut_up(dcp_metadata: Any) -> None:
        tensor_metadata = dcp_metadata.state_dict_metadata["a"]
        tensor_metadata.chunks.clear()
        for number, (rows, columns) in enumerate([(0, 0), (0, 10), (25, 0), (25, 10)]):
            part = values()["a"][rows : 25 if rows == 0 else 40, columns : 10 if columns == 0 else 24].clone()
            torch.save(part, folder / f"part{number}")
            home = type(next(iter(dcp_metadata.storage_data.values())))(
                f"part{number}", 0, (folder / f"part{number}").stat().st_size
            )
            tensor_metadata.chunks.append(metadata.ChunkStorageMetadata(torch.Size([rows, columns]), part.shape))
            dcp_metadata.storage_data[metadata.MetadataIndex("a", [rows, columns])] = home

    change_metadata(folder, cut_up)
    assert torch.equal(imported("dcp", folder, tmp_path / "root")["a (parameter)"], values()["a"])


class Call:
    """Unpickled, it is what a function returns."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (Call(os.system, "true"), "its pickle asks for posix.system"),
        (Call(eval, "1"), "its pickle asks for eval"),
        (torch.nn.Linear(2, 2), "its pickle asks for torch.nn.modules.linear.Linear"),
        (Call(torch.Size, 1, 2), "TypeError: tuple expected at most 1 argument, got 2"),
    ],
)
def test_what_a_refused_pickle_asks_for_is_named_in_a_line(tmp_path: Path, value: object, said: str) -> None:
    """torch has a paragraph for it, and how to switch its restriction off."""
    path = tmp_path / "model.pt"
    torch.save({"a": value}, path)
    with pytest.raises(CheckpointError) as caught:
        open_source("torch", path)
    trust = "Such a file may hold only tensors, and you must trust its author."
    assert str(caught.value) == f"{path}: rejected: {said}. {trust}"


def test_a_number_in_a_pickle_does_not_say_how_much_memory_it_takes(tmp_path: Path):
    """LONG_BINPUT keeps an object under a number, for which the C library grows a table."""
    (tmp_path / ".metadata").write_bytes(b"\x80\x02Nr" + (2**31).to_bytes(4, "little") + b".")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match="not metadata of DCP"):
        open_source("dcp", tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**17  # KiB


# -- tensors that are views --------------------------------------------------------------------------------------------


def test_values_are_those_of_the_view_and_not_the_memory_behind_it(tmp_path: Path):
    line = torch.arange(12.0)
    views = {
        "strided": line[::3],
        "transposed": line.view(3, 4).T,
        "expanded": line[5:6].expand(7),
        "negative": torch.imag(torch.view_as_complex(line.view(6, 2)).conj()),
    }
    assert views["negative"].is_neg()
    torch.save(views, tmp_path / "model.pt")
    tensors = imported("torch", tmp_path / "model.pt", tmp_path / "root")
    for name, value in views.items():
        assert torch.equal(tensors[f"{name} (parameter)"], value), name


def endless() -> dict[str, Any]:
    cyclic: dict[str, Any] = {"a": torch.ones(2)}
    cyclic["again"] = cyclic
    return cyclic


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ({"a": torch.empty(3, device="meta")}, "meta"),
        (endless(), "without end"),
        ({"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}}, "twice"),
        ({"a\nb": torch.ones(2)}, r"a\\nb"),
    ],
    ids=["no values", "endless", "one name twice", "no name to print"],
)
def test_what_a_file_of_torch_should_not_hold_is_refused(value: Any, word: str, tmp_path: Path):
    torch.save(value, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=word) as caught:
        imported("torch", tmp_path / "model.pt", tmp_path / "root")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("root/*"))


@pytest.mark.parametrize("from_", ["torch", "dcp", "deepspeed"])
def test_a_flipped_bit_of_a_value_is_found_where_the_format_has_a_checksum(from_: str, tmp_path: Path):
    path = written(from_, tmp_path / from_)
    needle = values()["a"].numpy().tobytes()
    files = [path] if path.is_file() else sorted(candidate for candidate in path.rglob("*") if candidate.is_file())
    (file,) = [candidate for candidate in files if needle in candidate.read_bytes()]
    octets = bytearray(file.read_bytes())
    octets[octets.index(needle) + Random(SEED).randrange(len(needle))] ^= 16
    file.write_bytes(octets)
    with pytest.raises(CheckpointError, match="CRC-32"):
        imported(from_, path, tmp_path / "root")


# -- anything at all ---------------------------------------------------------------------------------------------------


def written(from_: str, path: Path) -> Path:
    """`values`, as somebody else writes them."""
    held = values()
    if from_ == "torch":
        torch.save({**held, "epoch": 3, "groups": [{"lr": 0.1}]}, path)
    elif from_ == "dcp":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that there is no process group
            torch_checkpoint.save(held, checkpoint_id=path, no_dist=True)
    elif from_ == "hf":
        path.mkdir()
        names = sorted(held)
        files = {f"model-{n:05d}-of-00002.safetensors": names[n - 1 :: 2] for n in (1, 2)}
        for file, own in files.items():
            safetensors.torch.save_file({name: held[name] for name in own}, path / file)
        weight_map = {name: file for file, own in files.items() for name in own}
        body = {"metadata": {"total_size": 0, "ties": {"h": "a"}}, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(body))
    else:
        for name, value in held.items():
            home = path / "zero" / name
            home.mkdir(parents=True)
            for theirs, tensor in (("fp32", value), ("exp_avg", value + 1), ("exp_avg_sq", value + 2)):
                torch.save({"param": tensor, "cat_dim": 0}, home / f"{theirs}.pt")
            torch.save(torch.tensor(4.0), home / "step.pt")
        states = {
            "module": {},
            "buffer_names": [],
            "param_shapes": [{name: value.shape for name, value in held.items()}],
            "shared_params": {"h": "a"},
            "global_steps": 6,
            "skipped_steps": 2,
        }
        torch.save(states, path / "mp_rank_00_model_states.pt")
    return path


def change_metadata(folder: Path, change: Callable[[Any], object]) -> None:
    dcp_metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(dcp_metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(dcp_metadata))


def change_json(path: Path, change: Callable[[Any], object]) -> None:
    body = json.loads(path.read_text())
    change(body)
    path.write_text(json.dumps(body))


def change_header(path: Path, change: Callable[[Any], object]) -> None:
    octets = path.read_bytes()
    end = 8 + int.from_bytes(octets[:8], "little")
    body = json.loads(octets[8:end])
    change(body)
    text = json.dumps(body).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + octets[end:])


def change_pt(path: Path, change: Callable[[Any], object]) -> None:
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)


TREES: dict[str, tuple[tuple[str, Callable[[Path, Callable[[Any], object]], None]], ...]] = {
    "hf": (("model.safetensors.index.json", change_json), ("model-00001-of-00002.safetensors", change_header)),
    "torch": (("", change_pt),),
    "dcp": (("", change_metadata),),
    "deepspeed": (("mp_rank_00_model_states.pt", change_pt),),
}
"""The files to damage in each format, and the function that changes one."""

JUNK = (None, -1, 0, 7, 2**70, 1.5, float("nan"), "x", "", "a\nb", [], {}, [1], [-2, -2], True, torch.float16)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(what, key or index or attribute) of everything below."""
    if isinstance(value, dict):
        below = list(value.items())
    elif isinstance(value, list):
        below = list(enumerate(value))
    elif type(value).__module__.startswith("torch.distributed"):
        below = list(vars(value).items())
    else:
        return
    for key, inner in below:
        yield value, key
        yield from places(inner)


def got(holder: Any, key: Any) -> Any:
    return holder[key] if isinstance(holder, dict | list) else getattr(holder, key)


def spoil(random: Random, tree: Any) -> None:
    """Replace, rename or remove one thing; or put a copy of another one in its place.

    But a tensor under another's name is no damage: it is what the file says.
    """
    positions = list(places(tree))
    if not positions:
        return
    holder, key = random.choice(positions)
    others = [got(*place) for place in positions]
    others = [other for other in others if not isinstance(other, torch.Tensor)]
    way = random.choice(("junk", "copy", "remove", "rename"))
    if way == "remove" and isinstance(holder, dict | list):
        del holder[key]
    elif way == "rename" and isinstance(holder, dict) and not isinstance(holder[key], torch.Tensor):
        holder[random.choice(("x", "a", "a\nb", 5))] = holder.pop(key)
    else:
        value = random.choice(others if way == "copy" else JUNK)
        if isinstance(holder, dict | list):
            holder[key] = value
        else:
            object.__setattr__(holder, key, value)


def spoil_bytes(random: Random, file: Path) -> None:
    """Damage what is not a value: of those hf has no checksum."""
    octets = bytearray(file.read_bytes())
    held = [value.numpy().tobytes() for value in values().values()]
    spans = [(octets.find(needle), octets.find(needle) + len(needle)) for needle in held if needle in octets]
    free = [at for at in range(len(octets)) if not any(start <= at < stop for start, stop in spans)]
    at = random.choice(free)
    way = random.randrange(4)
    if way == 0:
        octets[at] ^= 1 << random.randrange(8)
    elif way == 1:
        octets[at] = random.randrange(256)
    elif way == 2:
        del octets[at:]
    else:
        octets[at:at] = random.randbytes(random.randrange(1, 9))
    file.write_bytes(octets)


def fuzzed(from_: str, seed: int, good: Path, folder: Path) -> tuple[str, str]:
    """(verdict, line) of one spoiled copy: "refused", "equal", or something that must not be."""
    random = Random(seed)
    bad, root = folder / "bad", folder / "root"
    for old in (bad, root):
        shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
    shutil.copytree(good, bad) if good.is_dir() else shutil.copy(good, bad)
    if random.random() < 0.5:
        files = [bad] if bad.is_file() else sorted(candidate for candidate in bad.rglob("*") if candidate.is_file())
        spoil_bytes(random, random.choice(files))
    else:
        name, change = random.choice(TREES[from_])
        with contextlib.suppress(
            RuntimeError, ValueError, TypeError, AttributeError
        ):  # what cannot be written is no case
            change(bad / name if name else bad, partial(spoil, random))
    wanted = {f"{name} (parameter)": value for name, value in values().items()}
    if from_ == "deepspeed":
        for kind, more in (("mu", 1), ("nu", 2)):
            wanted |= {f"{name} ({kind})": value + more for name, value in values().items()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tensors = imported(from_, bad, root, ("mu", "nu") if from_ == "deepspeed" else ())
    except ZeroError as error:
        left = sorted(path.name for path in root.glob("*"))
        return ("refused" if "\n" not in str(error) and not left else "wrong"), f"{error} {left or ''}"
    except Exception as error:
        return "wrong", repr(error)
    for name, value in tensors.items():  # what has another name or shape fits no model, and loading says so
        other = wanted.get(name, value)
        begins_at_zero = name.endswith(("(mu)", "(nu)")) and not value.any()  # and that was said
        if other.shape == value.shape and not torch.equal(other, value) and not begins_at_zero:
            return "silent", name
    return "equal", ""


@pytest.mark.parametrize("from_", TREES)
def test_whatever_is_spoiled_is_refused_in_one_line_or_changes_no_value(from_: str, tmp_path: Path):
    good = written(from_, tmp_path / "good")
    seeds = range(1000 * SEED, 1000 * SEED + 30)
    print(f"seeds {seeds}")
    told = {seed: fuzzed(from_, seed, good, tmp_path) for seed in seeds}
    assert not {seed: outcome for seed, outcome in told.items() if outcome[0] not in ("refused", "equal")}
    assert sum(verdict == "refused" for verdict, _ in told.values()) > 10

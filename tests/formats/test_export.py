"""An export is read by other libraries and imported bit by bit; no pickle runs code."""

import ast
import contextlib
import importlib.machinery
import importlib.util
import io
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as torch_checkpoint
from hypothesis import given, strategies as st
from rich.console import Console

import train
import zero
from tests.common.small import Setting, Small, slice_of, small_batch, small_loss
from tests.conftest import LONG_S
from zero.checkpoint import load, open_checkpoint, save
from zero.checkpoint.format.texts import from_text, to_text
from zero.engine.model.takeover import buffers_of
from zero.engine.whole.read import full_state_dict
from zero.errors import CheckpointError, ConfigError, ZeroError
from zero.formats import (
    ImportChoice,
    export_checkpoint,
    import_checkpoint,
    open_newest,
    open_source,
    progress_bar,
    safetensors_folder,
    torch_file,
)
from zero.formats.safetensors_folder import names_by_file
from zero.formats.stream import Stream, TensorSource
from zero.testing import run_ranks
from zero.trainer import checks, cli, job
from zero.trainer.data.text import decode_bytes

ROOT = Path(__file__).resolve().parents[2]
FORMATS = ("hf", "torch", "dcp")
FROZEN = ("blocks.0.linear.bias", "blocks.2.*")
TIE = {"head.weight": "embed.weight"}
CHOICE = ImportChoice(frozen=FROZEN, ties=TIE)


@contextlib.contextmanager
def opened(world, setting):
    plan = setting.plan(world)
    with contextlib.closing(zero.open_store(plan)) as store:
        yield zero.init(plan, store, seed=setting.seed), zero.make_step(plan, small_loss)
        store.drain()


def values_of(state):
    """Parameters and buffers by name."""
    buffers = {name: buffer.detach().cpu().clone() for name, buffer in buffers_of(state.model).items()}
    return full_state_dict(state) | buffers


def saved(world, setting, folder):
    """Two steps, a save; the values and the published folder."""
    with opened(world, setting) as (state, step):
        for number in range(2):
            state, _ = step(state, slice_of(small_batch(number, 24), world, 1))
        return values_of(state), save(state, folder)


def loaded(world, setting, path):
    """Values, moments and step after loading into a state of other values."""
    with opened(world, setting.but(seed=7)) as (state, _):
        state = load(state, open_checkpoint(world, path))
        return values_of(state), {kind: full_state_dict(state, kind) for kind in ("mu", "nu")}, state.step


def same(actual, wanted):
    assert actual.keys() == wanted.keys()
    for name, value in wanted.items():
        assert actual[name].dtype == value.dtype, name
        assert torch.equal(actual[name], value), name


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Values of trained models by precision, and the checkpoints that two ranks saved."""
    root = tmp_path_factory.mktemp("kept")
    return {it: run_ranks(2, saved, Setting(precision=it), root / it)[0] for it in ("fp32", "bf16")}


@pytest.fixture
def trained(kept, tmp_path):
    """Values of the fp32 model, with the tied name too, and a copy of its checkpoint."""
    values, path = kept["fp32"]
    folder = shutil.copytree(path, tmp_path / "checkpoints" / path.name)
    return values | {name: values[owner] for name, owner in TIE.items()}, open_newest(folder)[0]


# -- there and back ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("to", FORMATS)
def test_out_and_in_again_is_bitwise_the_same_whoever_loads(to: str, precision: str, kept, tmp_path: Path):
    was, path = kept[precision]
    export_checkpoint(open_newest(path)[0], to, tmp_path / "out")
    done = import_checkpoint(open_source(to, tmp_path / "out"), tmp_path / "again", CHOICE)
    for stage, size in ((3, 2), (0, 1)):
        now, moments, step = run_ranks(size, loaded, Setting(stage=stage, precision=precision), done.folder)[0]
        same(now, was)
        assert step == 0
        assert not any(value.any() for values in moments.values() for value in values.values())
    assert [line for line in done.notes if line.startswith("mu begins at zero")], "what was invented is said"


@pytest.mark.parametrize("to", ["hf", "torch"])
def test_these_formats_remember_the_ties_themselves(to: str, trained, tmp_path: Path):
    export_checkpoint(trained[1], to, tmp_path / "out")
    source = open_source(to, tmp_path / "out")
    assert source.ties == TIE
    again = import_checkpoint(source, tmp_path / "again", ImportChoice(frozen=FROZEN)).folder
    assert export_checkpoint(open_newest(again)[0], to, tmp_path / "twice").ties == TIE


def test_the_newest_valid_checkpoint_of_a_run_is_taken_and_damage_is_named(trained, tmp_path: Path):
    folder = trained[1].folder
    newer = folder.with_name("step-0000000009")
    newer.mkdir(mode=0o700)
    newest, rejected = open_newest(tmp_path)
    assert newest.folder == folder
    assert len(rejected) == 1
    assert "step-0000000009" in rejected[0]
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        open_newest(tmp_path / "nothing")


def test_other_checkpoints_are_named_where_the_wanted_one_is_damaged(trained, tmp_path: Path):
    wanted = trained[1].folder
    for step in (7, 8):
        shutil.copytree(wanted, wanted.with_name(f"step-000000000{step}"))
    path = next(wanted.glob("*.safetensors"))
    *octets, last = path.read_bytes()
    path.write_bytes(bytes([*octets, last ^ 1]))
    named = r"\.safetensors: .*\. Other checkpoints beside it: step-0000000008, step-0000000007\.$"
    with pytest.raises(CheckpointError, match=named):
        open_newest(wanted)
    with pytest.raises(CheckpointError, match=r"is a link, or not a folder\. [^.]*\. Other checkpoints beside it: "):
        open_newest(wanted.with_name("step-0000000001"))


# -- what other libraries find -----------------------------------------------------------------------------------------


def test_paths_are_texts_too(trained, tmp_path: Path):
    exported = export_checkpoint(open_newest(str(trained[1].folder))[0], "torch", str(tmp_path / "out.pt"))
    assert torch.load(tmp_path / "out.pt", weights_only=True).keys() == trained[0].keys()
    assert exported.tensors == len(trained[0])


def test_safetensors_opens_every_file_and_the_index_names_every_name_of_the_model(trained, tmp_path: Path):
    values, checkpoint = trained
    out = tmp_path / "out"
    export_checkpoint(checkpoint, "hf", out, shard_bytes=1000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) > 2
    assert files == [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    tensors = {}
    for file in files:
        held = safetensors.torch.load_file(out / file)
        assert all(index["weight_map"][name] == file for name in held)
        assert len(held) == 1 or sum(value.nbytes for value in held.values()) <= 1000
        tensors |= held
        with safetensors.safe_open(out / file, framework="pt") as opened_file:
            assert opened_file.metadata() == {"format": "pt"}
    same(tensors, values)
    assert index["weight_map"].keys() == tensors.keys() == Small().state_dict().keys()
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in tensors.values())
    into_the_model(tensors)


def into_the_model(tensors):
    """The reference model takes it strictly, and its tie survives."""
    model = Small()
    model.load_state_dict(tensors)
    assert model.head.weight is model.embed.weight
    same(dict(model.state_dict()), tensors)


def test_names_of_any_script_are_those_that_safetensors_reads(tmp_path: Path):
    """A header is UTF-8, as safetensors writes it; the index is ASCII, so that it is read in any locale."""
    values = {name: torch.full((2,), float(n)) for n, name in enumerate(["größe.weight", "层.0.weight", "😀.bias"])}
    streams = {name: Stream.of(tensor.dtype, (2,), lambda tensor=tensor: tensor) for name, tensor in values.items()}
    safetensors_folder.write(tmp_path, streams, {"层.1.weight": "层.0.weight"}, 2**30)
    tensors = safetensors.torch.load_file(next(tmp_path.glob("*.safetensors")))
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
        name: tensor.tolist() for name, tensor in values.items()
    }
    index = (tmp_path / "model.safetensors.index.json").read_bytes()
    assert index.isascii()
    assert set(json.loads(index)["weight_map"]) == set(values)


def test_torch_loads_the_file_restricted_and_mapped_and_ties_share_their_memory(trained, tmp_path: Path):
    values, checkpoint = trained
    out = tmp_path / "model.pt"
    export_checkpoint(checkpoint, "torch", out)
    for mapped in (True, False):
        tensors = torch.load(out, weights_only=True, mmap=mapped)
        same(tensors, values)
        assert tensors["head.weight"].data_ptr() == tensors["embed.weight"].data_ptr()
    mapped_ones = torch.load(out, weights_only=True, mmap=True).values()
    assert all(value.data_ptr() % 64 == 0 for value in mapped_ones), "as torch aligns them"
    assert zipfile.ZipFile(out).testzip() is None
    into_the_model(tensors)


def test_dcp_loads_the_folder(trained, tmp_path: Path):
    values, checkpoint = trained
    export_checkpoint(checkpoint, "dcp", tmp_path / "out")
    tensors = {name: torch.empty_like(value) for name, value in values.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there is no process group
        torch_checkpoint.load(tensors, checkpoint_id=tmp_path / "out", no_dist=True)
    same(tensors, values)
    into_the_model(tensors)


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_parameters_are_rounded_as_torch_rounds_and_buffers_are_not(to: str, dtype, trained, tmp_path: Path):
    values, checkpoint = trained
    buffers = [entry.name for entry in checkpoint.manifest.entries if entry.kind == "buffer"]
    assert len(buffers) == 9
    export_checkpoint(checkpoint, to, tmp_path / "out", dtype=dtype)
    source = open_source(to, tmp_path / "out")
    tensors = {name: whole(stream) for name, stream in source.tensors.items()}
    same(tensors, {name: value if name in buffers else value.to(dtype) for name, value in values.items()})


def whole(stream: Stream) -> torch.Tensor:
    blocks = list(stream.blocks("it"))
    return torch.cat(blocks).view(stream.shape) if blocks else torch.empty(stream.shape, dtype=stream.dtype)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.integers(1, 60))
def test_a_file_is_full_before_the_next_begins_and_only_a_larger_tensor_makes_a_larger_file(sizes, most):
    tensors = {str(number): Stream(torch.uint8, (size,), lambda: iter(())) for number, size in enumerate(sizes)}
    files = names_by_file(tensors, most)
    assert [name for names in files for name in names] == list(tensors)
    for number, names in enumerate(files):
        filled = sum(tensors[name].nbytes for name in names)
        assert filled <= most or len([name for name in names if tensors[name].nbytes]) == 1
        if number + 1 < len(files):
            assert filled + tensors[files[number + 1][0]].nbytes > most


# -- what other libraries wrote ----------------------------------------------------------------------------------------


def test_what_the_libraries_themselves_write_is_read(tmp_path: Path):
    torch.manual_seed(3)
    model = Small()
    with torch.no_grad():
        for block in model.blocks:
            block.gain.fill_(1.5)
            block.unused.fill_(2.5)
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    safetensors.torch.save_model(model, tmp_path / "model.safetensors")  # keeps one name of a tie
    torch.save({"model": model.state_dict(), "epoch": 3}, tmp_path / "model.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_checkpoint.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    kept = next(iter(name for name in TIE if name not in safetensors.torch.load_file(tmp_path / "model.safetensors")))
    assert kept == "head.weight"
    for from_, path, prefix in (
        ("hf", tmp_path / "model.safetensors", ""),
        ("hf", tmp_path, ""),
        ("torch", tmp_path / "model.pt", "model."),
        ("dcp", tmp_path / "dcp", "model."),
    ):
        root = tmp_path / f"root-{from_}-{path.name}"
        ties = TIE if from_ == "dcp" else {}
        done = import_checkpoint(
            open_source(from_, path), root, ImportChoice(prefix=prefix, frozen=FROZEN, ties=ties, step=5)
        )
        now, _, step = loaded(zero.open_world(), Setting(), done.folder)
        same(now, {name: value for name, value in wanted.items() if name != "head.weight"})
        assert step == 5
        assert done.folder.name == "step-0000000005"


def universal(folder: Path, values, stage: int) -> dict[str, dict[str, torch.Tensor]]:
    """A folder as DeepSpeed 0.19.8 was seen to write it, for a model with a tie, a buffer and a frozen bias."""
    generator = torch.Generator().manual_seed(1)
    moments = {kind: {} for kind in ("mu", "nu")}
    trained = {name: value for name, value in values.items() if is_trained(name)}
    frozen = {name: value for name, value in values.items() if is_parameter(name) and not is_trained(name)}
    buffers = {name: value for name, value in values.items() if not is_parameter(name)}
    for name, value in trained.items():
        home = folder / "zero" / name
        home.mkdir(parents=True)
        for kind, theirs in (("param", "fp32"), ("mu", "exp_avg"), ("nu", "exp_avg_sq")):
            tensor = value if kind == "param" else torch.rand(value.shape, generator=generator)
            moments.setdefault(kind, {})[name] = tensor
            torch.save(tensor.flatten() if stage == 3 else {"param": tensor, "cat_dim": 0}, home / f"{theirs}.pt")
        if stage < 3:
            torch.save(torch.tensor(4.0), home / "step.pt")
    if stage < 3:
        for name, value in (frozen | buffers | {"head.weight": values["embed.weight"]}).items():
            (folder / "zero" / name).mkdir(parents=True)
            torch.save({"param": value.float()}, folder / "zero" / name / "fp32.pt")
    for rank in range(2 if stage == 3 else 1):
        padded = {
            name: torch.nn.functional.pad(tensor.flatten(), (0, tensor.numel() % 2)) for name, tensor in frozen.items()
        }
        states = {
            "module": {**buffers, "embed.weight": torch.empty(0)},
            "buffer_names": list(buffers),
            "param_shapes": [{name: value.shape for name, value in trained.items()}],
            "frozen_param_shapes": {name: tensor.shape for name, tensor in frozen.items()} if stage == 3 else None,
            "frozen_param_fragments": {
                name: tensor.chunk(2)[rank].clone() for name, tensor in padded.items() if tensor.numel()
            }
            | {name: tensor for name, tensor in padded.items() if not tensor.numel()}
            if stage == 3
            else None,
            "shared_params": dict(TIE),
            "global_steps": 6,
            "skipped_steps": 2,
        }
        torch.save(states, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    return {kind: moments[kind] for kind in ("mu", "nu")}


def is_parameter(name: str) -> bool:
    return not re.search(r"running_|num_batches", name)


def is_trained(name: str) -> bool:
    return is_parameter(name) and name != FROZEN[0] and not name.startswith("blocks.2.")


@pytest.mark.parametrize("stage", [1, 3])
def test_a_universal_checkpoint_of_deepspeed_brings_moments_and_steps(stage: int, trained, tmp_path: Path):
    values = {name: value for name, value in trained[0].items() if name not in TIE}
    moments = universal(tmp_path / "uni", values, stage)
    done = import_checkpoint(open_source("deepspeed", tmp_path / "uni"), tmp_path / "root")
    now, loaded_moments, step = loaded(zero.open_world(), Setting(), done.folder)
    same(now, values)
    assert step == 4
    assert done.folder.name == "step-0000000006", "skipped steps count in a checkpoint's name"
    for kind in ("mu", "nu"):
        same(loaded_moments[kind], moments[kind])
    assert not [line for line in done.notes if "zero" in line]
    assert export_checkpoint(open_newest(done.folder)[0], "torch", tmp_path / "model.pt").ties == TIE


def rested(folder: Path) -> dict[str, int]:
    return open_newest(folder)[0].manifest.facts["state"].get("rested", {})


def test_an_import_keeps_each_parameters_number_of_updates(trained, tmp_path: Path):
    """A parameter whose moments begin at zero counts its updates from 0, as in torch."""
    universal(tmp_path / "uni", {name: value for name, value in trained[0].items() if name not in TIE}, 1)
    homes = tmp_path / "uni" / "zero"
    torch.save(torch.tensor(3.0), homes / "norm.bias" / "step.pt")
    (homes / "norm.weight" / "exp_avg.pt").unlink()
    done = import_checkpoint(open_source("deepspeed", tmp_path / "uni"), tmp_path / "root")
    assert rested(done.folder) == {"norm.bias": 1, "norm.weight": 4}
    source = TensorSource({"a": of(torch.ones(3)), "b": of(torch.ones(3))}, moments={("a", "mu"): of(torch.ones(3))})
    done = import_checkpoint(source, tmp_path / "given", ImportChoice(moments=("mu",), step=5))
    assert rested(done.folder) == {"b": 5}


def test_moments_without_a_step_are_not_believed(tmp_path: Path):
    source = TensorSource({"a": of(torch.ones(3))}, moments={("a", "mu"): of(torch.ones(3))})
    with pytest.raises(CheckpointError, match="--step"):
        import_checkpoint(source, tmp_path / "root")


# -- memory ------------------------------------------------------------------------------------------------------------

MEASURED = """
import re, sys, threading
from pathlib import Path
import torch
from zero.formats import ImportChoice, export_checkpoint, import_checkpoint, open_newest, open_source
from zero.formats.stream import Stream, TensorSource

def resident():
    text = Path("/proc/self/status").read_text()
    return sum(int(kb) * 1024 for kb in re.findall(r"Rss(?:Anon|Shmem):\\s*(\\d+)", text))  # mapped files are a cache

class Peak:
    def __enter__(self):
        self.before = self.most = resident()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self
    def watch(self):
        while not self.over.wait(0.002):
            self.most = max(self.most, resident())
    def __exit__(self, *_):
        self.over.set()
        self.thread.join()

def cut():
    for start in range(0, 3_125_000, 1_000_000):
        yield torch.arange(start, min(start + 1_000_000, 3_125_000), dtype=torch.float32)

def checkpoint(name, count):
    tensors = {{f"layer.{{n}}": Stream(torch.float32, (3_125_000,), cut) for n in range(count)}}
    return open_newest(import_checkpoint(TensorSource(tensors), folder / name, ImportChoice(moments=())).folder)[0]

folder = Path({folder!r})
first, many = checkpoint("first", 1), checkpoint("root", 8)
for to in {formats}:
    export_checkpoint(first, to, folder / f"warm-{{to}}")  # what is imported or allocated once
    with Peak() as out:
        export_checkpoint(many, to, folder / to)
    with Peak() as back:
        import_checkpoint(open_source(to, folder / to), folder / f"again-{{to}}", ImportChoice(moments=()))
    print(to, out.most - out.before, back.most - back.before)
"""


def test_100_megabytes_pass_through_a_few_blocks_or_one_tensor(tmp_path: Path):
    code = MEASURED.format(folder=str(tmp_path), formats=FORMATS)
    frees = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**20)}  # a tensor's memory goes back to the system with it
    done = subprocess.run(
        [sys.executable, "-c", code], env=frees, cwd=ROOT, capture_output=True, text=True, timeout=LONG_S
    )
    assert done.returncode == 0, done.stderr[-2000:]
    print(done.stdout)
    for to, *peaks in (line.split() for line in done.stdout.splitlines()[-len(FORMATS) :]):
        out, back = (int(peak) / 1e6 for peak in peaks)
        tensors, blocks, noise = 3 * 12.5 if to == "dcp" else 0, 4 * 16.8, 24
        assert out < tensors + noise, to
        assert back < tensors + blocks + noise, to  # the writer of a checkpoint keeps four blocks


# -- what must not happen ----------------------------------------------------------------------------------------------


class Crafted:
    """Unpickled without restriction, it makes a folder."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_the_crafted_pickle_works_where_nothing_is_restricted(tmp_path: Path):
    pickle.loads(pickle.dumps(Crafted(tmp_path / "marker")))
    assert (tmp_path / "marker").exists()


def crafted_torch(folder: Path, bad) -> Path:
    torch.save({"a": torch.ones(2), "b": bad}, folder / "model.pt")
    return folder / "model.pt"


def crafted_legacy(folder: Path, bad) -> Path:
    torch.save({"a": bad}, folder / "model.pt", _use_new_zipfile_serialization=False)
    return folder / "model.pt"


def crafted_metadata(folder: Path, bad) -> Path:
    (folder / ".metadata").write_bytes(pickle.dumps(bad))
    return folder


def crafted_inner_metadata(folder: Path, bad) -> Path:
    folder = dcp_folder(folder)
    dcp_metadata = pickle.loads((folder / ".metadata").read_bytes())
    dcp_metadata.planner_data = bad
    (folder / ".metadata").write_bytes(pickle.dumps(dcp_metadata))
    return folder


def crafted_data(folder: Path, bad) -> Path:
    folder = dcp_folder(folder)
    torch.save(bad, folder / "__0_0.distcp")
    dcp_metadata = pickle.loads((folder / ".metadata").read_bytes())
    next(iter(dcp_metadata.storage_data.values())).length = (folder / "__0_0.distcp").stat().st_size
    (folder / ".metadata").write_bytes(pickle.dumps(dcp_metadata))
    return folder


def dcp_folder(folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_checkpoint.save({"a": torch.ones(2)}, checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"


def crafted_fp32(folder: Path, bad) -> Path:
    (folder / "zero" / "a").mkdir(parents=True)
    torch.save({"param": bad}, folder / "zero" / "a" / "fp32.pt")
    torch.save({"param_shapes": [{"a": torch.Size([2])}]}, folder / "mp_rank_00_model_states.pt")
    return folder


def crafted_states(folder: Path, bad) -> Path:
    crafted_fp32(folder, torch.ones(2))
    torch.save({"param_shapes": bad}, folder / "mp_rank_00_model_states.pt")
    return folder


def crafted_step(folder: Path, bad) -> Path:
    crafted_fp32(folder, torch.ones(2))
    for name in ("exp_avg", "step"):
        torch.save(bad if name == "step" else torch.ones(2), folder / "zero" / "a" / f"{name}.pt")
    return folder


CRAFTED = [
    ("torch", crafted_torch),
    ("torch", crafted_legacy),
    ("dcp", crafted_metadata),
    ("dcp", crafted_inner_metadata),
    ("dcp", crafted_data),
    ("deepspeed", crafted_fp32),
    ("deepspeed", crafted_states),
    ("deepspeed", crafted_step),
]


@pytest.mark.parametrize(("from_", "craft"), CRAFTED, ids=lambda value: getattr(value, "__name__", value))
def test_a_crafted_pickle_is_refused_in_one_line_and_not_run(from_: str, craft, tmp_path: Path):
    marker = tmp_path / "marker"
    path = craft(tmp_path, Crafted(marker))
    with pytest.raises(CheckpointError, match="trust") as caught:
        import_checkpoint(open_source(from_, path), tmp_path / "root")
    assert "\n" not in str(caught.value)
    assert not marker.exists()
    assert not list(tmp_path.glob("root/*")), "nothing is left, published or not"


def test_no_other_file_of_the_library_knows_pickles():
    for path in (ROOT / "zero").rglob("*.py"):
        tree = ast.parse(path.read_text())
        used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_torch(node.value)}
        known = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        known |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        if path.parent.name not in (
            "formats",
            "testing",
        ):  # ranks under test are processes, and send each other pickles
            assert not {"pickle", "marshal", "shelve"} & known, path
            reads_pickles = ("zero.formats.torch_file", "zero.formats.imports", "zero.formats.dcp")
            if path.name != "import_checkpoint.py":  # the command that somebody types to read one
                assert not [name for name in known if name.startswith(reads_pickles)], path
            assert not {"load", "save"} & used, path


def is_torch(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "torch"


# -- what does not fit -------------------------------------------------------------------------------------------------


def refused(kind, work, *words: str) -> None:
    with pytest.raises(kind) as caught:
        work()
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text


def test_values_that_fp16_has_no_room_for_are_refused_and_nothing_is_left(tmp_path: Path):
    source = TensorSource({"a": of(torch.ones(3)), "b": of(torch.tensor([1.0, 7e4]))})
    checkpoint = open_newest(import_checkpoint(source, tmp_path / "root").folder)[0]
    for to in FORMATS:
        refused(
            CheckpointError,
            lambda to=to: export_checkpoint(checkpoint, to, tmp_path / "out", dtype=torch.float16),
            *("b", "float16", "bf16"),
        )
        assert [path.name for path in tmp_path.iterdir()] == ["root"]


def of(value: torch.Tensor) -> Stream:
    return Stream.of(value.dtype, tuple(value.shape), lambda: value)


@pytest.mark.parametrize("to", FORMATS)
def test_damage_that_comes_after_opening_is_found_and_nothing_is_left(to: str, trained, tmp_path: Path):
    checkpoint = trained[1]
    file = next(checkpoint.folder.glob("rank-*"))
    octets = bytearray(file.read_bytes())
    for place in range(4200, len(octets), 500):  # it holds moments too, which are not read: every MiB is
        octets[place] ^= 1
    file.write_bytes(octets)
    before = sorted(tmp_path.iterdir())
    refused(CheckpointError, lambda: export_checkpoint(checkpoint, to, tmp_path / "out"), file.name, "CRC")
    assert sorted(tmp_path.iterdir()) == before


def test_what_is_there_is_not_written_over(trained, tmp_path: Path):
    (tmp_path / "out").mkdir()
    refused(ConfigError, lambda: export_checkpoint(trained[1], "hf", tmp_path / "out"), "out", "exists")
    source = TensorSource({"a": of(torch.ones(3))})
    import_checkpoint(source, tmp_path / "root")
    refused(CheckpointError, lambda: import_checkpoint(source, tmp_path / "root"), "step-0000000000", "exists")


def test_a_tie_of_tensors_that_differ_is_refused(tmp_path: Path):
    source = TensorSource({"a": of(torch.zeros(3)), "b": of(-torch.zeros(3)), "c": of(torch.zeros(2))})
    for other in ("b", "c"):
        choice = ImportChoice(ties={other: "a"})
        refused(
            CheckpointError, lambda choice=choice: import_checkpoint(source, tmp_path / "root", choice), other, "differ"
        )
    refused(ConfigError, lambda: import_checkpoint(source, tmp_path / "root", ImportChoice(ties={"a": "z"})), "a", "z")


def bad_index(folder: Path, **changes) -> Path:
    safetensors.torch.save_file({"a": torch.ones(2)}, folder / "model-00001-of-00001.safetensors")
    body = {"metadata": {}, "weight_map": {"a": "model-00001-of-00001.safetensors"}} | changes
    (folder / "model.safetensors.index.json").write_text(json.dumps(body))
    return folder


def index_of(folder: Path, body) -> Path:
    (folder / "model.safetensors.index.json").write_text(json.dumps(body))
    return folder


def cut_short(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:-3])
    return path


def a_pt(folder: Path, value) -> Path:
    torch.save(value, folder / "model.pt")
    return folder / "model.pt"


def a_float8(folder: Path) -> Path:
    tensors = {"a": torch.ones(2).to(torch.float8_e4m3fn), "a_scale": torch.ones(1)}
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    return folder


def without_states(folder: Path) -> Path:
    (folder / "mp_rank_00_model_states.pt").unlink()
    return folder


WRONG = {
    "no such folder": ("hf", lambda f: f / "nothing", "nothing"),
    "an empty folder": ("hf", lambda f: f, "model.safetensors"),
    "a way out": ("hf", lambda f: bad_index(f, weight_map={"a": "../x.safetensors"}), "../x.safetensors"),
    "an index that is a list": ("hf", lambda f: index_of(f, []), "index"),
    "no names": ("hf", lambda f: bad_index(f, weight_map={"a": 3}), "index"),
    "a name too many": ("hf", lambda f: bad_index(f, weight_map={"b": "model-00001-of-00001.safetensors"}), "'b'"),
    "a file too few": ("hf", lambda f: bad_index(f, weight_map={"b": "other.safetensors"}), "other.safetensors"),
    "a short file": ("hf", lambda f: cut_short(bad_index(f) / "model-00001-of-00001.safetensors"), "00001"),
    "a short zip": ("torch", lambda f: cut_short(a_pt(f, {"a": torch.ones(9)})), "model.pt"),
    "no tensor": ("torch", lambda f: a_pt(f, {"a": 3}), "no tensor"),
    "a sparse tensor": ("torch", lambda f: a_pt(f, {"a": torch.eye(2).to_sparse()}), "dense"),
    "complex numbers": ("torch", lambda f: a_pt(f, {"a": torch.ones(2, dtype=torch.complex128)}), "complex"),
    "float8 without its scale": ("hf", a_float8, "a (parameter): torch.float8_e4m3fn cannot be imported"),
    "no metadata": ("dcp", lambda f: f, ".metadata"),
    "not universal": ("deepspeed", lambda f: f, "ds_to_universal"),
    "states missing": ("deepspeed", lambda f: without_states(crafted_fp32(f, torch.ones(2))), "no *_model_states.pt"),
    "no states": ("deepspeed", lambda f: crafted_states(f, 3), "_model_states.pt"),
    "no number": ("deepspeed", lambda f: crafted_step(f, "four"), "step.pt"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_source_gets_one_line_and_leaves_nothing(what: str, tmp_path: Path):
    from_, make, word = WRONG[what]
    path = make(tmp_path)
    refused(ZeroError, lambda: import_checkpoint(open_source(from_, path), tmp_path / "root"), word)
    assert not list(tmp_path.glob("root/*"))


def test_a_dtype_that_torch_saves_otherwise_is_refused_before_the_file_exists(tmp_path: Path):
    values = torch.ones(2).to(torch.float8_e4m3fn)
    tensors = {"table": Stream.of(values.dtype, (2,), lambda: values)}
    refused(
        CheckpointError, lambda: torch_file.write(tmp_path / "a.pt", tensors, {}), "table: torch.save cannot", "--to hf"
    )
    assert not list(tmp_path.iterdir())


def test_a_conjugate_that_is_a_mere_mark_is_read_by_value(tmp_path: Path):
    values = torch.tensor([1 + 2j, 3j], dtype=torch.complex64).conj()
    source = open_source("torch", a_pt(tmp_path, {"table": values}))
    assert source.tensors["table"].whole("table").view(torch.float32).tolist() == [1.0, -2.0, 0.0, -3.0]


def test_a_manifest_that_ties_names_to_nothing_is_refused(trained, tmp_path: Path):
    checkpoint = trained[1]
    assert checkpoint.manifest.facts["ties"] == TIE
    checkpoint.manifest.facts["ties"] = {"x": "nothing"}
    refused(CheckpointError, lambda: export_checkpoint(checkpoint, "hf", tmp_path / "out"), "ties")


# -- the scripts -------------------------------------------------------------------------------------------------------


def script(name: str, monkeypatch, *words: object) -> int:
    """Its `main`, in this process."""
    loader = importlib.machinery.SourceFileLoader(f"script_{name}", str(ROOT / "scripts" / name))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
    loader.exec_module(module)
    return int(module.main())


def test_the_scripts_say_what_they_did_and_what_was_missing(trained, tmp_path: Path, monkeypatch, capsys):
    values = trained[0]
    assert script("export", monkeypatch, tmp_path, "--to", "hf", "--out", tmp_path / "out", "--shard-size", "1KB") == 0
    assert "head.weight is tied to embed.weight" in capsys.readouterr().out
    frozen = [word for pattern in FROZEN for word in ("--frozen", pattern)]
    assert script("import", monkeypatch, "--from", "hf", tmp_path / "out", "--out", tmp_path / "root", *frozen) == 0
    told = capsys.readouterr().out
    assert "mu begins at zero" in told
    now, *_ = loaded(zero.open_world(), Setting(), tmp_path / "root" / "step-0000000000")
    same(now, {name: value for name, value in values.items() if name not in TIE})


def with_mean(*args, **how):
    return zero.with_ema(zero.adamw(*args, **how), 0.5)


def test_the_mean_of_the_parameters_is_exported_and_loaded_in_their_place(trained, tmp_path: Path, monkeypatch, capsys):
    """Frozen parameters and buffers are exported as they are."""
    world, setting = zero.open_world(), Setting(optimizer=with_mean, precision="bf16")
    with opened(world, setting) as (state, step):
        for number in range(3):
            state, _ = step(state, slice_of(small_batch(number, 24), world, 1))
        path, wanted = save(state, tmp_path / "kept"), values_of(state) | full_state_dict(state, "ema")
    assert script("export", monkeypatch, path, "--to", "hf", "--out", tmp_path / "out", "--weights", "ema") == 0
    exported = {
        name: whole(stream) for name, stream in open_source("hf", tmp_path / "out").tensors.items() if name not in TIE
    }
    same(exported, wanted)
    with opened(world, Setting(precision="bf16", seed=7)) as (state, _):  # an optimizer without a mean
        same(values_of(load(state, open_checkpoint(world, path), moments=False, weights="ema")), wanted)
    capsys.readouterr()
    assert (
        script("export", monkeypatch, trained[1].folder, "--to", "hf", "--out", tmp_path / "no", "--weights", "ema")
        == 4
    )
    assert "has no ema. Train with optim.ema=0.999" in capsys.readouterr().err


@pytest.mark.parametrize("given_as", [".", "checkpoints", "checkpoints/step-0000000002"])
def test_an_export_goes_beside_the_checkpoints_unless_it_is_told_otherwise(
    given_as: str, trained, tmp_path: Path, monkeypatch, capsys
):
    assert script("export", monkeypatch, tmp_path / given_as, "--to", "hf") == 0
    same({name: whole(it) for name, it in open_source("hf", tmp_path / "exported-hf").tensors.items()}, trained[0])
    before = {path: path.read_bytes() for path in (tmp_path / "exported-hf").iterdir()}
    capsys.readouterr()
    assert script("export", monkeypatch, tmp_path / given_as, "--to", "hf") == ConfigError.exit_code
    said = capsys.readouterr().err
    assert "exported-hf: exists" in said
    assert said.count("\n") == 1
    assert before == {path: path.read_bytes() for path in (tmp_path / "exported-hf").iterdir()}


@pytest.mark.parametrize("to", FORMATS)
def test_long_work_says_how_far_it_is(to: str, trained, tmp_path: Path):
    told: dict[str, list[tuple[int, int]]] = {}

    def tell(what: str, done: int, total: int) -> None:
        told.setdefault(what.split()[0], []).append((done, total))

    checkpoint, _ = open_newest(trained[1].folder, tell)
    export_checkpoint(checkpoint, to, tmp_path / "out", progress=tell)
    import_checkpoint(open_source(to, tmp_path / "out"), tmp_path / "again", CHOICE, tell)
    assert told.keys() == {"verifying", "exporting", "importing"}
    for steps in told.values():
        assert [done for done, _ in steps] == sorted({done for done, _ in steps}), "it goes on"
        assert [done == total for done, total in steps] == [False] * (len(steps) - 1) + [True], "and ends once"


def test_a_terminal_gets_a_bar_with_the_time_left_and_a_pipe_nothing():
    for terminal in (True, False):
        stream = io.StringIO()
        with progress_bar(Console(file=stream, force_terminal=terminal, width=100)) as tell:
            for done in range(1, 5):
                tell("exporting [it]", done, 4)
        said = stream.getvalue()
        assert ("exporting [it]" in said and "100%" in said and "0:00:00" in said) if terminal else not said


@pytest.mark.parametrize(
    ("name", "words", "seen"),
    [
        ("export", ["nothing", "--to", "hf", "--out", "out"], "there is no checkpoint"),
        ("import", ["nothing", "--from", "torch", "--out", "root"], "ENOENT"),
    ],
)
def test_the_scripts_refuse_in_one_line(name: str, words, seen: str, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert script(name, monkeypatch, *words) == 4
    told = capsys.readouterr().err
    assert seen in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("export", "from_pretrained loads nothing, because transformers has no class for this model"),
        ("import", "only files that you trust"),
    ],
)
def test_the_scripts_say_what_is_unsafe_or_impossible_before_it_is_typed(name: str, words: str, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        script(name, monkeypatch, "--help")
    assert words in " ".join(capsys.readouterr().out.split())


# -- a sample ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The folder of a run that learned from text."""
    top = tmp_path_factory.mktemp("run")
    (top / "text").mkdir()
    for number in range(20):
        (top / "text" / f"{number}.txt").write_text("to be or not to be, that is the question. " * 20)
    settings = ["debug=tiny", "tracker.console=none", "sample.tokens=0", "val.every=0", "checkpoint.every=4"]
    plain = cli.settings_in(cli.compose([*settings, "data=text", f"data.folder={top / 'text'}"]))
    job.run(train.train, checks.parse_config(plain), top / "run")
    return top / "run"


def test_a_sample_is_the_text_and_nothing_else(run: Path, monkeypatch, capsys):
    assert script("sample", monkeypatch, run, "to be", "--tokens", 5, "--temperature", 0) == 0
    out, err = capsys.readouterr()
    assert out.startswith("to be")
    assert "resuming" not in out + err, "it reads"
    assert "step-0000000004" in err
    assert script("sample", monkeypatch, run, "to be", "--tokens", 0) == 0
    assert capsys.readouterr().out == "to be\n"


def test_an_export_of_our_own_model_has_its_sizes_beside_the_weights(run: Path, tmp_path: Path, monkeypatch, capsys):
    assert script("export", monkeypatch, run, "--to", "hf", "--out", tmp_path / "out") == 0
    assert "transformers has no class for this model" in capsys.readouterr().out
    told = json.loads((tmp_path / "out" / "config.json").read_text())
    sizes = {name: told[name] for name in told if name not in ("architectures", "model_type")}
    model = zero.trainer.models.GPT(zero.trainer.models.GPTConfig(**sizes))
    stored = open_source("hf", tmp_path / "out").tensors
    assert {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} == {
        name: tuple(tensor.shape) for name, tensor in stored.items()
    }


def test_an_export_without_the_models_settings_leaves_nothing_and_fails_alike_again(
    run: Path, tmp_path: Path, monkeypatch, capsys
):
    folder = shutil.copytree(run / "checkpoints" / "step-0000000004", tmp_path / "step-0000000004")
    manifest = from_text((folder / "manifest.json").read_bytes())
    manifest.facts["given"]["config"] = {"model": {"name": "hf", "path": "nowhere/no-model"}}
    (folder / "manifest.json").write_text(to_text(manifest))
    for _ in range(2):
        assert script("export", monkeypatch, folder, "--to", "hf", "--out", tmp_path / "out") == ConfigError.exit_code
        said = capsys.readouterr().err
        assert "nowhere/no-model" in said
        assert "exists already" not in said
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


@pytest.mark.parametrize(
    "words",
    [("--tokens", "-3"), ("--temperature", "-1"), ("--temperature", "nan"), ("--seed", "1e99"), ("--seed", "-1")],
)
def test_a_sample_of_impossible_length_or_heat_is_refused(words, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        script("sample", monkeypatch, "run", "to be", *words)
    assert capsys.readouterr().err.startswith(f"{words[0]}: ")


@pytest.mark.parametrize(
    ("name", "words", "line"),
    [
        ("sample", ["run"], "prompt: missing. scripts/sample --help explains the arguments."),
        ("sample", ["run", "a", "--heat", "1"], "--heat 1: not an argument of this command. scripts/sample --help"),
        ("sample", ["run", "a", "--tokens", "x"], "--tokens: 'x' is not a whole number >= 0. scripts/sample --help"),
        ("export", ["run", "--to", "gguf"], "--to: invalid choice: 'gguf' (choose from "),
        ("export", ["run", "--to", "hf", "--shard-size", "3x"], "--shard-size: '3x' is not a size. Write 5GB, 500MB"),
    ],
)
def test_a_mistake_in_a_command_is_one_line(name: str, words, line: str, monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        script(name, monkeypatch, *words)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(line)
    assert said.count("\n") == 1


@pytest.mark.parametrize(("config", "word"), [([1], "model"), ({"model": 3}, "model"), ({}, "shape")])
def test_settings_that_are_none_are_refused_in_one_line(config, word: str, run: Path, tmp_path, monkeypatch, capsys):
    folder = shutil.copytree(run / "checkpoints" / "step-0000000004", tmp_path / "step-0000000004")
    manifest = from_text((folder / "manifest.json").read_bytes())
    manifest.facts["given"]["config"] = config
    (folder / "manifest.json").write_text(to_text(manifest))
    assert script("sample", monkeypatch, folder, "to be") > 0
    said = capsys.readouterr()
    assert not said.out
    assert word in said.err.splitlines()[-1]
    assert "Traceback" not in said.err


def test_a_token_that_is_no_byte_is_shown_as_what_it_is_not():
    assert decode_bytes(torch.tensor([72, 105, 300])) == "Hi\N{REPLACEMENT CHARACTER}"

"""A checkpoint loads anywhere: any stage, tier, world, precision, page and choice of units gives the same state."""

import contextlib
import gc
import itertools
import json
import os
import random
import re
import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import zero
from tests.common.small import (
    Setting,
    Small,
    adamw_in_8bit,
    adamw_in_bf16,
    in_bf16,
    opened,
    slice_of,
    small_batch,
    small_loss,
)
from tests.conftest import LONG_S
from tests.faults.crash import Killed, kill
from zero.checkpoint import Root, Saving, Tensors, load, open_at, open_checkpoint, open_latest, save, snapshot_bytes
from zero.checkpoint.agreement import by_rank_0, check_shared
from zero.checkpoint.files.disk import Disk
from zero.checkpoint.files.shard import ShardReader, ShardWriter
from zero.checkpoint.format.facts import version
from zero.checkpoint.format.manifest import held
from zero.checkpoint.format.texts import from_text, to_text
from zero.engine.model.takeover import buffers_of
from zero.engine.runtime import Runtime
from zero.engine.whole.read import digest, full_state_dict
from zero.errors import CheckpointError, StaleStateError
from zero.platform.safetensors_files import DTYPE_NAMES, offsets
from zero.testing import run_processes, run_ranks
from zero.testing.thread_world import Threads
from zero.tracker import Tracker
from zero.trainer.config import Config
from zero.trainer.run.resume import open_named
from zero.trainer.run.saver import Saver

PRESETS = ("none", "cpu", "nvme", "infinity", "auto")
CELLS = [
    Setting(stage=stage, offload=(("preset", preset),))
    for stage, preset in itertools.product(range(4), PRESETS)
    if preset != "infinity" or stage == 3
]


def trained(world, state, step, steps, accumulate=1):
    """Steps of a global batch of 12 rows, which is cut alike for every world."""
    told = []
    for number in steps:
        state, metrics = step(state, slice_of(small_batch(number, 24), world, accumulate))
        told.append(metrics)
    return state, told


def saved(world, setting, folder, steps=2, build=Small):
    """Train, save; returns the digest and the published folder."""
    with opened(world, setting, build) as (state, step):
        state, _ = trained(world, state, step, range(steps), setting.accumulate)
        path = save(state, folder, {"note": "mine"})
        return digest(state), path


def loaded(world, setting, path, **options):
    """The digest after loading into a state of other values."""
    with opened(world, setting.but(seed=7)) as (state, _):
        checkpoint = open_checkpoint(world, path)
        return digest(load(state, checkpoint, **options))


# -- any to any --------------------------------------------------------------------------------------------------------


@pytest.mark.slow(keep=9)
@pytest.mark.parametrize("number", range(len(CELLS)), ids=lambda n: f"{CELLS[n].stage}-{CELLS[n].offload[0][1]}")
def test_every_stage_and_tier_loads_others(number: int, tmp_path: Path):
    """Each saves and loads two others: another stage with its tier, and another tier of a far stage."""
    (was, path), *_ = run_ranks(2, saved, CELLS[number], tmp_path)
    for offset in (5, 11):
        other = CELLS[(number + offset) % len(CELLS)]
        assert run_ranks(2, loaded, other, path)[0] == was, f"stage {other.stage}, {other.offload}"


def test_every_world_loads_every_other(tmp_path: Path):
    for size in range(1, 5):
        (was, path), *_ = run_ranks(size, saved, Setting(precision="bf16"), tmp_path / str(size))
        for other in range(1, 5):
            setting = Setting(stage=other - 1, precision="bf16")
            assert run_ranks(other, loaded, setting, path)[0] == was, f"{size} ranks to {other}"


def test_what_shapes_the_state_in_memory_is_not_in_the_file(tmp_path: Path):
    start = Setting(offload=(("preset", "nvme"),))
    _, path = run_ranks(2, saved, start, tmp_path)[0]
    kinds = ("param", "compute", "mu", "nu")
    expected = run_ranks(2, values_of, start, path, *kinds)[0]
    for change in (
        {"page_bytes": 4096, "prefetch": 0},
        {"page_bytes": 1 << 20, "update": "serial"},
        {"units": ("Small",), "activations": "remat"},
        {"units": ("Linear", "Embedding"), "accumulate": 2},
        {"bucket": 2048},
    ):
        assert not differing(run_ranks(2, values_of, start.but(**change), path, *kinds)[0], expected), change


def values_of(world, setting, path, *kinds):
    """Return the values of a loaded state by kind and name, whatever its units."""
    with opened(world, setting.but(seed=7)) as (state, _):
        state = load(state, open_checkpoint(world, path))
        return {(kind, name): value for kind in kinds for name, value in full_state_dict(state, kind).items()}


def differing(actual, wanted):
    """The names of values that are not the same bit by bit."""
    assert actual.keys() == wanted.keys()
    return [name for name, value in wanted.items() if not torch.equal(actual[name], value)]


@pytest.mark.parametrize(("wrote", "reads"), [("fp32", "bf16"), ("bf16", "fp16"), ("fp16", "fp32")])
def test_another_precision_of_compute_reads_the_same_masters(wrote: str, reads: str, tmp_path: Path):
    (_, path), *_ = run_ranks(2, saved, Setting(precision=wrote), tmp_path)
    kept, now = (run_ranks(2, values_of, Setting(precision=it), path, "param", "compute")[0] for it in (wrote, reads))
    compute = zero.Precision(reads).compute
    trained = [
        name for kind, name in now if kind == "param" and not name.startswith(("blocks.0.linear.bias", "blocks.2."))
    ]
    for name in trained:
        assert torch.equal(now["param", name], kept["param", name]), name
        assert torch.equal(now["compute", name], now["param", name].to(compute).float()), name


# -- resume = never stopped --------------------------------------------------------------------------------------------


def whole_run(world, setting, steps):
    with opened(world, setting) as (state, step):
        state, told = trained(world, state, step, range(steps), setting.accumulate)
        return digest(state), told


def first_half(world, setting, folder, at):
    with opened(world, setting) as (state, step):
        state, told = trained(world, state, step, range(at), setting.accumulate)
        return save(state, folder, {"note": "mine"}), told


def second_half(world, setting, path, steps):
    with opened(world, setting.but(seed=3)) as (state, step):
        checkpoint = open_checkpoint(world, path)
        assert checkpoint.facts == {"note": "mine"}
        state = load(state, checkpoint)
        state, told = trained(world, state, step, range(checkpoint.step, steps), setting.accumulate)
        return digest(state), told


def test_moments_of_all_forms_load_each_other(tmp_path: Path):
    """A file holds them to the bit, those in 8 bits in fp32; what is read into fewer bits is the nearest."""
    forms = {"fp32": Setting(), "bf16": Setting(optimizer=adamw_in_bf16), "8bit": Setting(optimizer=adamw_in_8bit)}
    for wrote, setting in forms.items():
        (was, path), *_ = run_ranks(2, saved, setting, tmp_path / wrote)
        assert run_ranks(2, loaded, setting, path)[0] == was
        kept = run_ranks(2, values_of, setting, path, "mu", "nu")[0]
        with safe_open(next(path.glob("*.safetensors")), "pt") as file:
            dtypes = {file.get_tensor(name).dtype for name in list(file.keys()) if name.startswith(("mu/", "nu/"))}
        assert dtypes == {torch.bfloat16 if wrote == "bf16" else torch.float32}
        for reads, other in forms.items():
            if reads == wrote:
                continue
            values = run_ranks(2, values_of, other, path, "mu", "nu")[0]
            for name, value in kept.items():
                if reads == "fp32":
                    assert torch.equal(values[name], value), name
                elif reads == "bf16":
                    assert torch.equal(values[name], in_bf16(value)), name
                else:
                    assert (
                        (values[name] - value).abs() <= value.abs().amax() / 16 if value.numel() else value
                    ).all(), name


FORMS = [("fp32", adamw_in_8bit), ("fp32", zero.adamw), ("fp16", adamw_in_bf16)]


@pytest.mark.slow(keep=9)
@pytest.mark.parametrize("number", range(len(CELLS)), ids=lambda n: f"{CELLS[n].stage}-{CELLS[n].offload[0][1]}")
def test_a_resumed_run_ends_as_the_one_that_never_stopped(number: int, tmp_path: Path):
    precision, optimizer = FORMS[number % 3]
    setting = CELLS[number].but(precision=precision, optimizer=optimizer, clip=0.5, accumulate=2)
    steps, at = 4, 1 + number % 3
    was, told = run_ranks(2, whole_run, setting, steps)[0]
    path, before = run_ranks(2, first_half, setting, tmp_path, at)[0]
    now, after = run_ranks(2, second_half, setting, path, steps)[0]
    assert before + after == told
    assert now == was


class TiedAcross(nn.Module):
    """An embedding tied to the head, and layers of which two share a weight: units that wait for a second use."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 16), nn.Linear(16, 11, bias=False)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head.weight, self.layers[2].weight = self.embed.weight, self.layers[0].weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def tied_run(world, stage, folder, stop):
    """The losses and the digest of four steps; with `stop`, the last ones are another run's, from a checkpoint."""
    setting, history = Setting(stage=stage), []

    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch[:, 0]), batch[:, 1])

    state, step = setting.start(world, TiedAcross, loss)
    for number in range(4):
        if number == stop:
            path = save(state, folder)
            state.runtime.store.close()
            state, step = setting.but(seed=7).start(world, TiedAcross, loss)
            state = load(state, open_checkpoint(world, path))
        state, metrics = step(state, slice_of(small_batch(number, 6 * world.size), world, 1))
        history.append((metrics.loss, metrics.grad_norm))
    with contextlib.closing(state.runtime.store):
        return history, digest(state)


@pytest.mark.parametrize(("world", "stage"), [(5, 3), (8, 0)])
def test_a_resumed_run_of_tied_units_is_the_one_that_never_stopped(world, stage, tmp_path: Path):
    """In these worlds all units are of one size once they are padded."""
    whole = run_ranks(world, tied_run, stage, tmp_path, None)
    for stop in (1, 2):
        assert run_ranks(world, tied_run, stage, tmp_path / str(stop), stop) == whole


@pytest.mark.process
def test_the_same_holds_for_fresh_processes(tmp_path: Path):
    setting = Setting(offload=(("preset", "infinity"),), precision="bf16")
    was, _ = run_processes(2, whole_run, setting, 4)[0]
    path, _ = run_processes(2, first_half, setting, tmp_path, 2)[0]
    assert run_processes(2, second_half, setting, path, 4)[0][0] == was


def test_saving_and_loading_twenty_times_changes_nothing(tmp_path: Path):
    setting, world = Setting(offload=(("preset", "nvme"),)), zero.open_world()
    was, _ = whole_run(world, setting, 3)
    held: list[tuple[int, int]] = []
    with opened(world, setting) as (state, step):
        state, _ = trained(world, state, step, range(2))
        for number in range(20):
            path = save(state, tmp_path / str(number % 2))
            state = load(state, open_checkpoint(world, path))
            if number in (4, 19):
                gc.collect()
                tensors = sum(issubclass(type(value), torch.Tensor) for value in gc.get_objects())
                held.append((tensors, resident_bytes()))
        (tensors, resident), (tensors_after, resident_after) = held
        assert tensors_after == tensors
        assert resident_after - resident < 8 * 2**20  # a leaked block or MiB of a reader would make fifteen or more
        state, _ = trained(world, state, step, range(2, 3))
        assert digest(state) == was


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# -- the file ----------------------------------------------------------------------------------------------------------


def test_each_file_is_plain_safetensors(tmp_path: Path):
    (_, path), *_ = run_ranks(2, saved, Setting(precision="bf16"), tmp_path)
    values = run_ranks(2, values_of, Setting(precision="bf16"), path, "param")[0]
    flats = json.loads((path / "manifest.json").read_text())["flats"]
    names = {(tensor["name"], kind) for flat in flats for kind in flat["kinds"] for tensor in flat["tensors"]}
    assert {name for name, kind in names if kind == "mu"} == {name for name, kind in names if kind == "parameter"}
    stored: dict[str, torch.Tensor] = {}
    for part, rank in itertools.product(("rank", "frozen"), range(2)):
        with safe_open(path / f"{part}-0000{rank}-of-00002.safetensors", framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - no mapping
                stored[key] = torch.cat([stored.get(key, torch.zeros(0)), file.get_tensor(key).view(-1).float()])
    for (_, name), value in values.items():
        key = f"parameter/{name}" if f"parameter/{name}" in stored else f"frozen/{name}"
        if value.numel():
            assert torch.equal(stored[key], value.view(-1)), name


# -- what does not fit -------------------------------------------------------------------------------------------------


class Longer(Small):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(3, 3)


class Wider(Small):
    def __init__(self) -> None:
        super().__init__(vocab=12)


def refusal_of(world, path, build, optimizer=zero.adamw, **options):
    """Return the message of `load`, which changes nothing."""
    with opened(world, Setting(optimizer=optimizer), build) as (state, _):
        before = digest(state)
        with pytest.raises(CheckpointError) as caught:
            load(state, open_checkpoint(world, path), **options)
        assert digest(state) == before
        return str(caught.value)


def test_a_model_with_more_less_or_other_tensors_is_refused_by_name(tmp_path: Path):
    world = zero.open_world()
    _, path = saved(world, Setting(), tmp_path / "a")
    _, longer = saved(world, Setting(), tmp_path / "b", build=LongerRun)
    missing = refusal_of(world, path, Longer)
    for words in ("extra.weight, extra.bias, ", "missing", "partial=[...] of zero.load, or in checkpoint.partial"):
        assert words in missing
    unknown = refusal_of(world, longer, Small)
    assert "extra.weight" in unknown
    assert "not in the model" in unknown
    assert "(11, 13) for (12, 13)" in refusal_of(world, path, Wider)
    assert "\n" not in missing


class LongerRun(Longer):
    def forward(self, x):
        return super().forward(x)


def test_partial_keeps_what_it_names(tmp_path: Path):
    world = zero.open_world()
    _, path = saved(world, Setting(), tmp_path)
    with opened(world, Setting(seed=5), Longer) as (state, _):
        fresh, said = full_state_dict(state), []
        checkpoint = open_checkpoint(world, path)
        with pytest.raises(CheckpointError, match=r"partial .*: extar\.\* matches no tensor of the model or of"):
            load(state, checkpoint, partial=["extra.*", "extar.*"])
        state = load(state, checkpoint, partial=["extra.*", "blocks.0.*"], note=said.append)
        assert re.match(r"checkpoint\.partial: \d+ of \d+ tensors keep the values they have: ", said[0])
        now = full_state_dict(state)
    with opened(world, Setting()) as (state, _):
        there = full_state_dict(load(state, open_checkpoint(world, path)))
    for name, value in now.items():
        kept = name.startswith(("extra.", "blocks.0."))
        assert torch.equal(value, fresh[name] if kept else there[name]), name


def test_all_ranks_read_what_stays_in_one_order_whatever_the_order_of_their_sets(monkeypatch):
    """Strings hash differently in each process, and reading is collective: ranks in different orders would hang."""
    from zero.checkpoint import load as module

    asked = []
    monkeypatch.setattr(sys.modules[module.__module__], "full_values", lambda state, kind: asked.append(kind) or ())
    kinds = ["parameter", "mu", "nu", "frozen"]
    for order in itertools.permutations(kinds):
        asked.clear()
        sys.modules[module.__module__]._current(None, dict.fromkeys(("w", kind) for kind in order).keys())
        assert asked == ["param", "mu", "nu", "param"], order


def test_partial_may_name_a_kind_so_another_optimizer_takes_over(tmp_path: Path):
    world = zero.open_world()
    _, path = saved(world, Setting(), tmp_path)
    lion = Setting(optimizer=zero.lion)
    assert "mu/embed.weight" not in refusal_of(world, path, Small, optimizer=zero.lion)
    assert "nu/embed.weight" in refusal_of(world, path, Small, optimizer=zero.lion)
    _, written_by_lion = saved(world, lion, tmp_path / "lion")
    for setting, source in ((lion, path), (Setting(), written_by_lion)):
        with opened(world, setting.but(seed=5)) as (state, _), opened(world, setting.but(seed=5)) as (fresh, _):
            state = load(state, open_checkpoint(world, source), partial=["nu/*"])
            there = values_of_kind(source, "mu")
            assert all(torch.equal(value, there[name]) for name, value in full_state_dict(state, "mu").items())
            if "nu" in state.plan.optimizer.moments:
                untouched = full_state_dict(fresh, "nu")
                assert all(torch.equal(value, untouched[name]) for name, value in full_state_dict(state, "nu").items())


def values_of_kind(path: Path, kind: str) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(zero.open_world(), path)
    with Tensors(checkpoint) as files:
        return {
            entry.name: files.read(entry, 0, entry.numel).view(entry.shape)
            for entry in checkpoint.manifest.entries
            if entry.kind == kind
        }


def test_without_moments_any_optimizers_checkpoint_is_evaluated(tmp_path: Path):
    world = zero.open_world()
    _, path = saved(world, Setting(), tmp_path)
    for optimizer in (zero.lion, zero.sgd):
        with opened(world, Setting(seed=5, optimizer=optimizer)) as (state, _):
            state = load(state, open_checkpoint(world, path), moments=False)
            there = values_of_kind(path, "parameter")
            assert all(torch.equal(full_state_dict(state)[name], value) for name, value in there.items())


class Frozen(Small):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].linear.weight.requires_grad_(False)


def test_what_was_trained_may_be_frozen_and_the_other_way_round(tmp_path: Path):
    world, name = zero.open_world(), "blocks.0.linear.weight"
    _, trained_path = saved(world, Setting(), tmp_path / "trained")
    _, frozen_path = saved(world, Setting(), tmp_path / "frozen", build=Frozen)
    assert f"mu/{name}, nu/{name} are not in the model" in refusal_of(world, trained_path, Frozen)
    assert f"mu/{name}, nu/{name} are missing" in refusal_of(world, frozen_path, Small)
    for path, build, kind in ((trained_path, Frozen, "parameter"), (frozen_path, Small, "frozen")):
        with opened(world, Setting(seed=5), build) as (state, _):
            state = load(state, open_checkpoint(world, path), partial=[f"mu/{name}", f"nu/{name}"])
            assert torch.equal(full_state_dict(state)[name], values_of_kind(path, kind)[name])


# -- what goes wrong on one rank ---------------------------------------------------------------------------------------


SAVED = [dtype for dtype in DTYPE_NAMES if dtype not in (torch.bool, torch.float64)]


def test_a_buffer_of_every_dtype_that_safetensors_has_is_loaded_to_the_bit(tmp_path: Path):
    class Table(Small):
        def __init__(self) -> None:
            super().__init__()
            for number, dtype in enumerate(SAVED):
                self.register_buffer(f"table{number}", torch.arange(3).to(dtype))
            self.register_buffer("lazy", (torch.arange(3) * 1j).conj())

    def bits(buffer: Tensor) -> list[int]:
        return buffer.resolve_conj().view(-1).view(torch.uint8).tolist()

    with opened(zero.open_world(), Setting(), Table) as (state, _):
        model = state.model
        expected = {name: bits(buffer) for name, buffer in model.named_buffers()}
        path = save(state, tmp_path)
        for buffer in model.buffers():
            buffer.zero_()
        load(state, open_checkpoint(zero.open_world(), path))
        assert {name: bits(buffer) for name, buffer in model.named_buffers()} == expected
    theirs = load_file(path / "rank-00000-of-00001.safetensors")
    assert {name: bits(theirs[f"buffer/{name}"]) for name in expected} == expected


def saver_of(world, plan, folder, **keys):
    config = Config.model_validate({"checkpoint": {"dir": str(folder), **keys}})
    return Saver(config, plan, folder.parent, Tracker(), facts=dict, stop_requested=lambda: False)


def test_a_later_buffer_that_no_file_holds_is_refused_by_every_rank_and_leaves_no_folder(tmp_path: Path):
    root = tmp_path / "root"

    def go(world):
        with opened(world, Setting()) as (state, step):
            state.model.register_buffer("freqs", torch.ones(4, dtype=torch.complex128))
            with pytest.raises(CheckpointError, match=r"freqs.*complex128"):
                save(state, root)
            saver = saver_of(world, state.plan, root, on_failure="continue")
            saver.save(state)
            assert saver.last_published is None
            trained(world, state, step, range(1))  # together
            return True

    assert run_ranks(2, go) == [True, True]
    assert not root.exists()


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ("zero.checkpoint.format.texts.CAP_BYTES", "the manifest would have"),
        ("zero.platform.safetensors_files.MOST_HEADER_BYTES", "parts need a header of"),
    ],
)
def test_a_save_over_a_limit_fails_on_every_rank_and_leaves_nothing(limit, said, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(limit, 1000)

    def go(world):
        with opened(world, Setting()) as (state, _):
            before = digest(state)
            with pytest.raises(CheckpointError, match=said):
                save(state, tmp_path / "root")
            return digest(state) == before

    assert run_ranks(2, go) == [True, True]
    assert not list((tmp_path / "root").iterdir())


@pytest.mark.parametrize("behind", [False, True])
def test_whatever_goes_wrong_while_one_rank_writes_all_ranks_hear_of(behind: bool, tmp_path: Path, monkeypatch):
    real = ShardWriter.write

    def write(writer, view):
        if "rank-00001" in writer._path.name:
            raise MemoryError("no memory for a block\nand more")
        real(writer, view)

    monkeypatch.setattr(ShardWriter, "write", write)

    def go(world):
        with opened(world, Setting()) as (state, _):
            with pytest.raises(CheckpointError) as caught:
                Saving(state, tmp_path, behind=behind).finish()
            return str(caught.value)

    said = "rank 1: MemoryError: no memory for a block and more"
    assert run_ranks(2, go) == [said, said]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("setting", CELLS, ids=lambda cell: f"{cell.stage}-{cell.offload[0][1]}")
def test_a_save_behind_has_the_bytes_of_its_step_though_it_copies_while_the_next_one_runs(
    setting, tmp_path: Path, monkeypatch
):
    """The thread copies only when training asks for the end of the copies, before its next update."""
    asked = threading.Event()
    real, wait = ShardWriter.write, Runtime.await_copies
    monkeypatch.setattr(Runtime, "await_copies", lambda runtime: (runtime.copying and asked.set(), wait(runtime)))

    def write(writer, view):
        assert writer._behind is None or writer._given == 0 or asked.wait(LONG_S)
        real(writer, view)

    monkeypatch.setattr(ShardWriter, "write", write)
    world = zero.open_world()
    with opened(world, setting) as (state, step):
        for number in range(2):
            state, _ = trained(world, state, step, [number])
            wanted = save(state, tmp_path / "waited for")
            asked.clear()
            saving = Saving(state, tmp_path / "behind", behind=True)
            state, _ = trained(world, state, step, [number + 1])
            assert asked.is_set()
            path = saving.finish()
            names = sorted(file.name for file in wanted.glob("*.safetensors"))
            assert names == ["frozen-00000-of-00001.safetensors", "rank-00000-of-00001.safetensors"]
            for name in names:
                assert (path / name).read_bytes() == (wanted / name).read_bytes()


class SlowDisk(Disk):
    """Every transfer of more than a page takes a while."""

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s

    def pread(self, fd, view, offset):
        time.sleep(self.delay_s * (len(view) > 4096))
        return super().pread(fd, view, offset)

    def pwrite(self, fd, view, offset):
        time.sleep(self.delay_s * (len(view) > 4096))
        return super().pwrite(fd, view, offset)


def test_the_deadline_is_for_waits_and_not_for_work(tmp_path: Path):
    """One rank writes or reads for longer than any wait may take; the other one waits for it."""
    (_, alone), *_ = run_ranks(1, saved, Setting(), tmp_path / "alone")
    assert len(list(alone.glob("rank-*.safetensors"))) == 1
    timeout_s, slow = 0.6, SlowDisk(1.5)

    def go(world):
        checkpoint = open_checkpoint(world, alone, slow)
        with opened(world, Setting()) as (state, _):
            saving = Saving(state, Root(tmp_path / "root", slow if world.rank else None), behind=True)
            return checkpoint.step, saving.finish().name

    worlds = [zero.World(rank) for rank in Threads.all_ranks(2, timeout_s=timeout_s)]
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(go, worlds)) == [(2, "step-0000000000")] * 2


def test_blocks_are_shared_by_ranks_and_threads_and_damage_is_found_wherever_it_is(tmp_path: Path, monkeypatch):
    for module in ("format.hashes", "format.texts", "files.shard", "open"):
        monkeypatch.setattr(sys.modules[f"zero.checkpoint.{module}"], "HASH_BLOCK_BYTES", 2**20)
    _, path = saved(zero.open_world(), Setting(), tmp_path, steps=0, build=lambda: Small(width=500))
    (file,), (frozen,) = path.glob("rank-*.safetensors"), path.glob("frozen-*.safetensors")
    whole = file.read_bytes()
    assert len(whole) > 5 * 2**20 > 2**20 > frozen.stat().st_size
    read: list[int] = []
    real = ShardReader.check
    monkeypatch.setattr(ShardReader, "check", lambda reader, number: read.append(number) or real(reader, number))

    def look(world):
        try:
            return open_checkpoint(world, path).step
        except CheckpointError as error:
            return str(error)

    for size in (1, 2, 3, 20):
        read.clear()
        assert run_ranks(size, look) == [0] * size
        assert sorted(read) == [0, *range(-(-len(whole) // 2**20))], "each block once"
    parts = [piece.part for piece in held(from_text((path / "manifest.json").read_bytes()).flats, 0, 1)]
    begins = list(zip(offsets(parts), (part.key for part in parts), strict=True))
    place = random.randrange(begins[0][0], len(whole))
    mib = place // 2**20 * 2**20
    first = max([begins[0], *(begin for begin in begins if begin[0] <= mib)])[1]
    file.write_bytes(whole[:place] + bytes([whole[place] ^ 8]) + whole[place + 1 :])
    for size in (1, 3):
        for line in run_ranks(size, look):
            assert f"{file}: bytes {mib} to" in line, place
            assert f"in '{first}' or after it" in line, place


def test_few_files_are_open_at_once_and_each_index_is_read_once(tmp_path: Path, monkeypatch):
    """Also where the tensors are read in turn from more files than may be open."""
    (_, path), *_ = run_ranks(12, saved, Setting(), tmp_path, 0)
    checkpoint = open_checkpoint(zero.open_world(), path)
    before, names, real = len(os.listdir("/proc/self/fd")), [], Disk.open
    monkeypatch.setattr(Disk, "open", lambda disk, path, *flags: (names.append(path.name), real(disk, path, *flags))[1])

    def read(most):
        monkeypatch.setattr("zero.checkpoint.tensors.OPEN_FILES", most)
        names.clear()
        with Tensors(checkpoint) as files:
            for entry in checkpoint.manifest.entries:
                yield files.read(entry, 0, entry.numel)
                assert len(os.listdir("/proc/self/fd")) - before <= most
        assert len(os.listdir("/proc/self/fd")) == before
        indexes = [name for name in names if name.endswith(".json")]
        assert len(indexes) == len(set(indexes)) > 8

    whole = list(read(20))
    assert len(names) == len(set(names))
    assert all(map(torch.equal, read(4), whole))
    assert len(names) > len(set(names))  # files were closed and opened again


def test_a_result_of_rank_0_is_not_as_long_on_the_wire_as_the_world_is_wide(monkeypatch):
    numels, real = [], Threads.gather

    def gather(world, shard_S, full_P, *rest):
        numels.append(full_P.numel())
        return real(world, shard_S, full_P, *rest)

    monkeypatch.setattr(Threads, "gather", gather)
    assert run_ranks(3, lambda world: by_rank_0(world, lambda: "x" * 1000)) == ["x" * 1000] * 3
    assert max(numels, default=0) < 1000


def test_a_copy_that_leaves_no_room_is_not_made(tmp_path: Path, monkeypatch):
    world = zero.open_world()
    with opened(world, Setting()) as (state, _):
        for beside, written_behind in ((2**28 + 1, True), (2**28 - 1, False)):
            saver = saver_of(world, state.plan, tmp_path / "root", **{"async": True})
            needs = snapshot_bytes(state, saver.root)
            monkeypatch.setattr("zero.trainer.run.saver.free_host_bytes", lambda: needs + beside)  # noqa: B023
            assert saver._fits_beside(state) == written_behind


# -- what is said of it ------------------------------------------------------------------------------------------------


def test_what_is_not_finite_or_not_of_this_run_is_said_in_a_line(tmp_path: Path):
    world, said, tracker = zero.open_world(), [], Tracker()
    tracker.note = said.append
    with opened(world, Setting()) as (state, _):
        config = Config.model_validate({"checkpoint": {"dir": str(tmp_path / "root")}})

        def saver_with(config, data, began=None):
            facts = {"config": config.plain(), "data": data}
            return Saver(
                config, state.plan, tmp_path, tracker, facts=lambda: facts, stop_requested=lambda: False,
                began_from=began,
            )  # fmt: skip

        saver = saver_with(config, "abc")
        assert saver.last_published is None
        next(iter(buffers_of(state.model).values())).fill_(float("nan"))
        saver.save(state)
        path = saver.last_published
    assert path == tmp_path / "root" / "step-0000000000"
    began = open_named(path, world, said.append)
    assert said[-1] == f"warning: {path} holds values that are NaN or infinite"
    assert began.manifest.facts["versions"]["zero"] == version()
    assert len(began.facts["digest of the config"]) == 64
    said.clear()
    saver_with(config, "abc", began)
    assert not said
    saver_with(config.model_copy(update={"seed": 5}), "xyz", began)
    assert said == [
        "warning: the digest of the data is xyz, and was abc in the run that saved the checkpoint",
        "settings that differ from those of the run that saved the checkpoint: seed=5 (was 0)",
    ]


def test_a_state_that_was_loaded_into_is_spent(tmp_path: Path):
    world = zero.open_world()
    _, path = saved(world, Setting(), tmp_path)
    with opened(world, Setting()) as (state, _):
        load(state, open_checkpoint(world, path))
        with pytest.raises(StaleStateError):
            _ = state.step


def rolled_back(world, setting, folder, way):
    """Return, for each round, whether this rank computes with the values that it wrote while gathers are under way."""
    options = {"moments": False} if way == "no moments" else {"partial": ["embed.*"]} if way == "partial" else {}
    same = []
    with opened(world, setting) as (state, step):
        for number in range(4):
            saved, wanted = save(state, folder), full_state_dict(state, "compute")
            state, _ = trained(world, state, step, [number])
            if way == "edit":
                with zero.gathered(state, modify=True) as full:
                    full.update(wanted)
            else:
                state = load(state, open_checkpoint(world, saved), **options)
            values = full_state_dict(state, "compute")
            kept = "embed" if way == "partial" else "nothing"
            same.append(all(torch.equal(values[name], wanted[name]) for name in values if not name.startswith(kept)))
            state, _ = trained(world, state, step, [number])
    return same


@pytest.mark.parametrize(
    ("stage", "way"),
    [(0, "load"), (0, "partial"), (1, "no moments"), (2, "partial"), (2, "edit"), (3, "edit"), (3, "load")],
)
def test_every_rank_computes_with_what_was_written_into_a_state_that_has_stepped(stage, way, tmp_path: Path):
    results = run_ranks(3, rolled_back, Setting(stage=stage), tmp_path, way)
    assert results == [[True] * 4] * 3


def test_what_was_gathered_before_a_load_is_not_used_after_it(tmp_path: Path):
    def go(world):
        saves = []
        with opened(world, Setting(stage=3)) as (state, step):
            for number in range(2):
                saves.append((save(state, tmp_path), computed(state.model)))
                state, _ = trained(world, state, step, [number])
            for path, wanted in saves * 2:  # without a step in between, which would make copies stale as well
                state = load(state, open_checkpoint(world, path))
                assert computed(state.model) == wanted
        return [wanted for _, wanted in saves]

    @torch.no_grad()
    def computed(model):
        return float(small_loss(model, small_batch(0, 24))[0])

    before, after = run_ranks(2, go)[0]
    assert before != after


# -- the newest one ----------------------------------------------------------------------------------------------------


def test_latest_walks_back_to_the_newest_valid_one_and_names_what_it_rejected(tmp_path: Path):
    world = zero.open_world()
    with opened(world, Setting()) as (state, step):
        for number in range(12):
            state, _ = trained(world, state, step, [number])
            if number >= 8:
                save(state, tmp_path)
    file = tmp_path / "step-0000000012" / "rank-00000-of-00001.safetensors"
    damage(file, 5000)
    (tmp_path / "step-0000000011" / "manifest.json").unlink()
    (tmp_path / "step-99").mkdir()
    checkpoint, rejected = open_latest(world, tmp_path)
    assert checkpoint is not None
    assert checkpoint.step == 10
    assert ["rank-00000-of-00001.safetensors" in rejected[0], "manifest.json" in rejected[1]] == [True, True]


def saved_steps(folder, count, checkpoint=None):
    """Save after each of `count` steps of a new run, or of one that continues; returns the folders."""
    world = zero.open_world()
    with opened(world, Setting()) as (state, step):
        if checkpoint is not None:
            state = load(state, open_checkpoint(world, checkpoint))
        folders = []
        for number in range(count):
            state, _ = trained(world, state, step, [number])
            folders.append(save(state, folder))
        return folders


def test_latest_is_what_was_published_last_by_one_run_and_of_two_runs_none(tmp_path: Path):
    """A run that continues is the same run. Steps that a run went back from are older than those that it made since."""
    world = zero.open_world()
    first = saved_steps(tmp_path / "a", 3)
    assert open_latest(world, tmp_path / "a")[0].folder == first[-1]
    (again,) = saved_steps(tmp_path / "a", 1, first[0])
    assert again == first[1]
    assert open_latest(world, tmp_path / "a")[0].folder == again
    assert [path.name for path in saved_steps(tmp_path / "b", 2, again)] == ["step-0000000003", "step-0000000004"]
    shutil.copytree(first[0], tmp_path / "b" / first[0].name)
    assert open_latest(world, tmp_path / "b")[0].step == 4
    damage(tmp_path / "b" / "step-0000000004" / "manifest.json", 100)
    checkpoint, rejected = open_latest(world, tmp_path / "b")
    assert (checkpoint.step, len(rejected)) == (3, 1)
    mine = saved_steps(tmp_path / "a", 1)[-1]
    with pytest.raises(CheckpointError, match=f"{mine} and {again}: two runs saved them, and neither continued from"):
        open_latest(world, tmp_path / "a")
    with pytest.raises(CheckpointError, match="two runs saved them"):
        open_at(world, tmp_path / "a")


def test_checkpoints_of_earlier_versions_have_no_lineage_and_are_older_than_others(tmp_path: Path):
    world = zero.open_world()
    old = saved_steps(tmp_path, 3)
    for folder in old:
        manifest = from_text((folder / "manifest.json").read_bytes())
        del manifest.facts["lineage"]
        (folder / "manifest.json").write_text(to_text(manifest))
    assert open_latest(world, tmp_path)[0].folder == old[-1]
    assert saved_steps(tmp_path, 2, old[0]) == old[1:]
    assert open_latest(world, tmp_path)[0].folder == old[2]
    shutil.rmtree(old[2])
    (new,) = saved_steps(tmp_path, 1)
    assert new == old[0]
    with pytest.raises(CheckpointError, match=f"{new} and {old[1]}: two runs"):
        open_latest(world, tmp_path)


@pytest.mark.parametrize("at", ["write", "rename"])
def test_what_a_killed_save_leaves_is_opened_and_removed_by_the_next_save(at: str, tmp_path: Path, monkeypatch):
    """Killed between its two renames, a save of an existing step leaves the older save of it under another name."""
    world, root, real = zero.open_world(), tmp_path / "root", Disk.rename

    def rename(disk, old, new):
        if at == "write" or new.name.startswith("step-"):
            kill("rename")
        real(disk, old, new)

    with opened(world, Setting()) as (state, step):
        state, _ = trained(world, state, step, range(2))
        save(state, root)
        expected = digest(state)
        with monkeypatch.context() as patched:
            patched.setattr(Disk, "rename", rename)
            patched.setattr(Root, "abandon", lambda *_: None)
            with pytest.raises(Killed):
                save(state, root)
    left = sorted(os.listdir(root))
    assert [name[:5] for name in left] == [".tmp-", "step-"] if at == "write" else [".old-", ".tmp-"]
    with opened(world, Setting()) as (state, step):  # the next process
        checkpoint, rejected = open_latest(world, root)
        assert (checkpoint.step, rejected) == (2, [])
        assert sorted(os.listdir(root)) == left  # a reader changes nothing
        state = load(state, checkpoint)
        assert digest(state) == expected
        state, _ = trained(world, state, step, [2])
        save(state, root)
        assert sorted(os.listdir(root)) == ["step-0000000002", "step-0000000003"]


def test_only_rejected_ones_are_an_error_and_none_is_none(tmp_path: Path):
    world = zero.open_world()
    assert open_latest(world, tmp_path / "nothing") == (None, [])
    _, path = saved(world, Setting(), tmp_path)
    damage(path / "rank-00000-of-00001.safetensors", 6000)
    with pytest.raises(
        CheckpointError, match=r"none of its 1 checkpoints is valid\. Restore one from a copy\. The newest: "
    ):
        open_latest(world, tmp_path)
    with pytest.raises(
        CheckpointError, match=rf"holds checkpoints and is not one\. Write .*, or open the newest, {path}\.$"
    ):
        open_checkpoint(world, tmp_path)


def damage(path: Path, place: int) -> None:
    octets = bytearray(path.read_bytes())
    octets[place] ^= 1 << random.randrange(8)
    path.chmod(0o600)
    path.write_bytes(octets)


# -- several nodes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [True, False])
def test_a_folder_that_nodes_do_not_share_is_refused_before_training(shared, tmp_path: Path):
    """A folder of the same name on each node: what rank 0 writes is only on its own."""

    def look(world: zero.World) -> str:
        root = tmp_path / ("both" if shared else f"node {world.rank // world.local_size}")
        try:
            check_shared(world, root)
        except CheckpointError as error:
            return str(error)
        return ""

    lines = run_ranks(4, look, nodes=2)
    assert not any(tmp_path.rglob(".seen*"))
    for line in lines:  # each names the folder as it sees it
        assert (
            bool(re.match(r"ranks 2, 3 of 4 do not see .* Set checkpoint.dir .*checkpoint.every=0\.$", line)) != shared
        )

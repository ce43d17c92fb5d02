"""A damaged checkpoint never loads, a crafted one runs no code, and a failed save changes nothing.

`benchmarks/fuzz_checkpoint.py` runs the first part with any number of cases.
"""

import contextlib
import errno
import hashlib
import io
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zero
from tests.common.small import Setting, Small, slice_of, small_batch
from tests.conftest import LONG_S, SEED
from tests.faults.damage import DAMAGED, GOOD, KINDS, Case, Verdict, cases, fuzz, write_manifest
from tests.faults.disks import FaultyDisk, fail
from zero.checkpoint import Root, Saving, load, open_checkpoint, save
from zero.checkpoint.format.hashes import HASH_BLOCK_BYTES, hash_block
from zero.checkpoint.format.manifest import Index
from zero.checkpoint.format.texts import index_to_text
from zero.engine.whole.read import digest
from zero.errors import CheckpointError
from zero.testing import run_ranks

ROOT = Path(__file__).resolve().parents[2]


def start_of(width: int = 13) -> Callable[[zero.World], zero.State]:
    """Makes states on every rank, of values that are in no checkpoint."""

    def start(world: zero.World) -> zero.State:
        return Setting(seed=7).start(world, lambda: Small(width=width))[0]

    return start


def made(folder: Path, width: int = 13) -> None:
    """Two checkpoints of one run on two ranks, with files of the same sizes."""

    def run(world: zero.World) -> None:
        state, step = Setting().start(world, lambda: Small(width=width))
        for number in range(20):
            state, _ = step(state, slice_of(small_batch(number, 12), world, 1))
            if state.step in (10, 20):
                save(state, folder / "kept")

    run_ranks(2, run)


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("damage")
    made(folder)
    return folder


def complaints(verdicts: list[Verdict]) -> list[Verdict]:
    return [verdict for verdict in verdicts if verdict.outcome not in ("refused", "harmless")]


@pytest.mark.parametrize(("size", "times"), [(1, 1), (2, 3)])
def test_damaged_checkpoints_raise_one_line_or_load_bit_for_bit(size: int, times: int, kept: Path):
    seed = 1000 * SEED + 250 * size
    descriptors = len(os.listdir("/proc/self/fd"))
    verdicts = fuzz(size, start_of(), kept, cases(times * len(KINDS), seed))
    assert not complaints(verdicts)
    counts = Counter((verdict.kind, verdict.outcome) for verdict in verdicts)
    for kind in KINDS if times > 1 else ():
        assert counts[kind, "refused"] or kind == "nothing that matters", f"{kind} never raised: it damages nothing"
    assert counts["nothing that matters", "harmless"] == times
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 2  # the memory of torch's threads


def test_files_of_several_mib_are_no_different(tmp_path: Path):
    made(tmp_path, width=300)
    assert (tmp_path / "kept" / GOOD / "rank-00000-of-00002.safetensors").stat().st_size > 2**20
    bytes_only = [case for case in cases(len(KINDS), 1000 * SEED) if list(KINDS).index(case.kind) < 14]
    assert not complaints(fuzz(2, start_of(300), tmp_path, bytes_only))


def test_the_trial_sees_what_loads_silently(kept: Path, monkeypatch: pytest.MonkeyPatch):
    """Without the hashes of the blocks and the MiB, the fuzz above would not pass."""
    monkeypatch.setattr("zero.checkpoint.files.shard.ShardReader._compare", lambda *_: None)
    wanted = [Case(SEED + number, "one bit") for number in range(12)]
    outcomes = Counter(result.outcome for result in fuzz(1, start_of(), kept, wanted))
    assert outcomes["silent"] >= 4


@pytest.mark.parametrize("path", ["..", ".", "../kept/step-0000000020/..", "step-0000000020/manifest.json", "x" * 300])
def test_a_path_that_is_no_checkpoint_is_refused(path: str, kept: Path):
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(zero.open_world(), kept / "kept" / path)
    assert len(str(caught.value).splitlines()) == 1


# -- crafted files -----------------------------------------------------------------------------------------------------


class Payload:
    """Unpickled, it makes the file `marker`."""

    def __init__(self, marker: Path) -> None:
        self.command = f"touch {marker}"

    def __reduce__(self):
        return os.system, (self.command,)


def copied(kept: Path, tmp_path: Path) -> Path:
    shutil.copytree(kept / "kept", tmp_path / "root")
    (tmp_path / "root").chmod(0o700)
    return tmp_path / "root" / DAMAGED


def restamp(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest, and make its hash right."""
    body = json.loads((folder / "manifest.json").read_text())
    del body["sha256"]
    change(body)
    write_manifest(folder, json.dumps(body, separators=(",", ":"))[:-1] + ",\n")


def put(folder: Path, data: bytes, size: int | None = None) -> None:
    """Another file of rank 1, padded to `size` bytes, with all hashes made right."""
    data = data.ljust(size or 0, b"\0")
    (folder / "rank-00001-of-00002.safetensors").write_bytes(data)
    assert len(data) <= HASH_BLOCK_BYTES
    random = json.loads((folder / "rank-00001-of-00002.json").read_text())["random"]
    put_index(folder, index_to_text(Index(hash_block(memoryview(data)), random)), len(data))


def put_index(folder: Path, text: str, size: int) -> None:
    """Another index of rank 1, with the manifest's hash made right."""
    (folder / "rank-00001-of-00002.json").write_text(text)
    file = {"size": size, "index_sha256": hashlib.sha256(text.encode()).hexdigest()}
    restamp(folder, lambda body: body["files"].__setitem__(1, file))


def with_header(was: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """The file with another safetensors header of the same length."""
    nbytes = int.from_bytes(was[:8], "little")
    body = json.loads(was[8 : 8 + nbytes])
    change(body)
    return was[:8] + json.dumps(body, separators=(",", ":")).encode().ljust(nbytes) + was[8 + nbytes :]


def torch_file(value: object) -> bytes:
    with io.BytesIO() as file:
        torch.save(value, file)
        return file.getvalue()


def crafted(folder: Path, marker: Path) -> dict[str, Callable[[], object]]:
    """Names, and what puts each of them there."""
    was = (folder / "rank-00001-of-00002.safetensors").read_bytes()
    manifest = folder / "manifest.json"
    evil, code = pickle.dumps(Payload(marker)), f"__import__('os').system('touch {marker}')"
    call = {"py/reduce": [{"py/function": "os.system"}, {"py/tuple": [f"touch {marker}"]}]}

    def flat(**values: Any) -> Callable[[], object]:
        return lambda: restamp(folder, lambda body: body["flats"][0].update(values))

    def tensor(**values: Any) -> Callable[[], object]:
        return lambda: restamp(folder, lambda body: body["flats"][0]["tensors"][0].update(values))

    def generators(value: Any) -> Callable[[], object]:
        index = json.loads((folder / "rank-00001-of-00002.json").read_text())
        return lambda: put_index(folder, json.dumps(index | {"random": value}), len(was))

    def of_another_rank() -> None:
        first, second = (folder / f"rank-0000{rank}-of-00002.json" for rank in range(2))
        body = json.loads(second.read_text()) | {"random": json.loads(first.read_text())["random"]}
        second.write_text(json.dumps(body, separators=(",", ":")))

    def state(**values: Any) -> Callable[[], object]:
        return lambda: restamp(folder, lambda body: body["facts"]["state"].update(values))

    return {
        "a pickle with right hashes": lambda: put(folder, evil, len(was)),
        "a torch file with right hashes": lambda: put(folder, torch_file(Payload(marker)), len(was)),
        "a pickle before the tensors": lambda: put(folder, evil + was),
        "a pickle in the header's padding": lambda: put(folder, was[: 4096 - len(evil)] + evil + was[4096:]),
        "metadata in the header": lambda: put(
            folder, with_header(was, lambda body: body.update(__metadata__={"a": evil.hex(), "__reduce__": code}))
        ),
        "a manifest that is a pickle": lambda: manifest.write_bytes(evil),
        "a manifest of Python objects": lambda: write_manifest(
            folder, f'!!python/object/apply:os.system ["touch {marker}"]\n'
        ),
        "a manifest that is code": lambda: write_manifest(folder, code + "\n"),
        "a name that is code": tensor(name=code),
        "a kind that is code": flat(kinds={code: "float32"}),
        "a call for the step": state(step=call),
        "a call for the generators": generators(call),
        "the generators of another rank, without its hash": of_another_rank,
        "code beside the files": lambda: (folder / "__init__.py").write_text(code),
        "a pickle beside the files": lambda: (folder / "optimizer.pt").write_bytes(torch_file(Payload(marker))),
    }


def test_the_payload_works(tmp_path: Path):
    pickle.loads(pickle.dumps(Payload(tmp_path / "marker")))
    assert (tmp_path / "marker").exists()


def test_crafted_files_are_refused_and_run_nothing(kept: Path, tmp_path: Path):
    marker, world = tmp_path / "marker", zero.open_world()
    folder = copied(kept, tmp_path)
    state = load(start_of()(world), open_checkpoint(world, folder.parent / GOOD))
    before = digest(state)
    names = list(crafted(folder, marker))
    for name in names:
        shutil.rmtree(folder)
        shutil.copytree(kept / "kept" / DAMAGED, folder)
        crafted(folder, marker)[name]()
        with pytest.raises(CheckpointError) as caught:
            load(state, open_checkpoint(world, folder))
        line = str(caught.value)
        assert len(line.splitlines()) == 1, name
        assert str(folder) in line, name
        assert len(line) < 1000, name
        assert not marker.exists(), name
        assert digest(state) == before, name
        assert open_checkpoint(world, folder.parent / GOOD).step == 10


GUARDED = """
import builtins, marshal, pickle, sys
from pathlib import Path

import torch
import zero
from tests.common.small import Setting, slice_of, small_batch
from zero.checkpoint import Root, load, open_checkpoint, open_latest, save
from zero.engine.whole.read import digest
from zero.testing import run_ranks

def go(world, root):
    setting = Setting(offload=(("preset", "nvme"),), precision="bf16")
    state, step = setting.start(world)
    def on(state, numbers):
        for number in numbers:
            state, _ = step(state, slice_of(small_batch(number, 12), world, 1))
        return state
    state = on(state, range(2))
    world.barrier()
    if world.rank == 0:
        forbid()
    world.barrier()
    for number in range(2, 6):
        state = on(state, [number])
        save(state, Root(root), {"note": number})
    at_6 = world.share(digest(state))  # buffers, of which a checkpoint has those of rank 0
    end = digest(on(state, range(6, 8)))
    if world.rank == 0:
        keeper = Root(root)
        keeper.sweep()
        keeper.retain(2, lambda step: False, lambda folder: True)
    world.barrier()
    fresh, step = setting.but(seed=5).start(world)
    found, rejected = open_latest(world, root)
    assert (found.step, rejected, found.facts) == (6, [], {"note": 5})
    fresh = load(fresh, open_checkpoint(world, found.folder))
    assert digest(fresh) == at_6
    for number in range(6, 8):
        fresh, _ = step(fresh, slice_of(small_batch(number, 12), world, 1))
    assert digest(fresh) == end or world.rank > 0
    assert sorted(path.name for path in Path(root).iterdir()) == ["step-0000000005", "step-0000000006"]

def forbid():
    for owner, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (pickle, "_Unpickler"),
                        (torch, "load"), (marshal, "loads"), (marshal, "load"), (builtins, "eval"), (builtins, "exec")):
        def refuse(*args, called=f"{owner.__name__}.{name}", **rest):
            calls.append(called)
            raise AssertionError(f"{called} was called")
        setattr(owner, name, refuse)

calls = []
run_ranks(2, go, Path(sys.argv[1]))
for call in (lambda: torch.load("x"), lambda: pickle.loads(b""), lambda: eval("1"), lambda: exec("1")):
    try:
        call()
    except AssertionError:
        continue
    raise SystemExit("the guards do not guard")
print("guarded", calls[:-4])
"""


@pytest.mark.process
def test_nothing_is_unpickled_or_evaluated_from_save_to_resume(tmp_path: Path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-c", GUARDED, str(tmp_path / "root")]
    done = subprocess.run(line, capture_output=True, text=True, timeout=LONG_S, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().splitlines()[-1] == "guarded []"


# -- disks that fail ---------------------------------------------------------------------------------------------------

FAVOURS = {"direct", "forget", "link", "lock", "unlock"}
"""Calls that a save can do without."""


def on_bad_disks(world: zero.World, folder: Path, behind: bool, variant: tuple[int, bool]) -> tuple[int, int]:
    """Save with each call of each rank's disk failing in turn, and look at everything that must not have suffered.

    Every round begins with step 2's checkpoint, tries to save step 3, goes on to step 4 and saves that.

    Returns:
        How many saves were tried, and how many failed.
    """
    state, step = Setting().start(world)
    batches = [slice_of(small_batch(number, 12), world, 1) for number in range(4)]
    for batch in batches[:2]:
        state, _ = step(state, batch)
    path = save(state, folder)
    state = load(state, open_checkpoint(world, path))  # all ranks now have the running statistics of rank 0
    good = digest(state)
    ends = []
    for batch in batches[2:]:
        state, _ = step(state, batch)
        ends.append(digest(state))

    def round_(state: zero.State, disk: FaultyDisk) -> tuple[zero.State, str | None]:
        state = load(state, open_checkpoint(world, path))
        assert digest(state) == good, "the last good one does not load as it was"
        state, _ = step(state, batches[2])
        error = None
        try:
            Saving(state, Root(folder, disk), behind=behind).finish()
        except CheckpointError as raised:
            error = str(raised)
        world.barrier()
        published_are_whole(world, folder)
        assert digest(state) == ends[0], "a save changed the state"
        state, _ = step(state, batches[3])
        assert digest(state) == ends[1], "training does not go on as if the save had not been tried"
        again = save(state, folder)
        assert open_checkpoint(world, again).step == 4
        world.barrier()
        if world.rank == 0:
            Root(folder).sweep()
            assert not [name for name in os.listdir(folder) if name.startswith(".")]
            for name in set(os.listdir(folder)) - {path.name}:
                shutil.rmtree(folder / name)
        world.barrier()
        return state, error

    healthy = FaultyDisk()
    state, error = round_(state, healthy)
    assert error is None
    counts = [int(text) for text in world.gather_texts(str(len(healthy.calls)), "calls")]
    names = [name for name, _ in healthy.calls]
    linking = names.index("link") + 1, names.index("create", names.index("link")) + 1  # numbers of calls, from 1
    linkings = [json.loads(text) for text in world.gather_texts(json.dumps(linking), "calls of a link")]
    code, on = variant
    tried = failed = 0
    for rank, at in [(rank, at) for rank, count in enumerate(counts) for at in range(1, count + 1)]:
        disk = FaultyDisk(fail(code), at=at, on=on) if rank == world.rank else FaultyDisk()
        state, error = round_(state, disk)
        lines = world.gather_texts(str(error), "what was raised")
        touched = set(world.gather_texts(" ".join(disk.failed), "which calls failed")[rank].split())
        assert len(set(lines)) == 1, f"the ranks differ: {lines}"
        assert touched, f"rank {rank} made fewer than {at} calls"
        links = at in range(*linkings[rank])  # its files are written if it fails
        if error is None:
            assert links or touched <= FAVOURS, f"call {at} of rank {rank}, {touched}: the save says that it succeeded"
        else:
            assert len(error.splitlines()) == 1
            assert errno.errorcode[code] in error or os.strerror(code) in error, error
            assert str(folder) in error
        tried, failed = tried + (not links), failed + (error is not None)
    return tried, failed


def published_are_whole(world: zero.World, folder: Path) -> None:
    """Whatever has a published name, acknowledged or not."""
    steps = world.share(json.dumps(Root(folder).steps() if world.rank == 0 else []))
    assert set(json.loads(steps)) in ({2}, {2, 3})
    for number in json.loads(steps):
        assert open_checkpoint(world, folder / f"step-{number:010d}").step == number


@pytest.mark.parametrize(
    ("size", "behind", "variant"),
    [(1, False, (errno.EIO, False)), (2, True, (errno.ENOSPC, True))],
    ids=["1", "2 behind"],
)
def test_a_save_that_any_call_fails_costs_nothing_but_itself(size: int, behind: bool, variant, tmp_path: Path):
    descriptors = len(os.listdir("/proc/self/fd"))
    tried, failed = run_ranks(size, on_bad_disks, tmp_path / "root", behind, variant, timeout_s=LONG_S)[0]
    print(f"{failed} of {tried} saves failed")
    assert failed > 0.8 * tried > 20
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 4


def test_a_limit_of_the_system_itself_fails_a_save(tmp_path: Path):
    """Not our disk that pretends: the kernel writes part of the file, and then no more."""
    world = zero.open_world()
    state, step = Setting().start(world)
    state, _ = step(state, slice_of(small_batch(0, 12), world, 1))
    before = digest(state)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with contextlib.ExitStack() as after:
        after.callback(resource.setrlimit, resource.RLIMIT_FSIZE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
        with pytest.raises(CheckpointError, match=r"rank-00000-of-00001\.safetensors: EFBIG"):
            save(state, tmp_path / "root")
    assert os.listdir(tmp_path / "root") == []
    assert digest(state) == before
    assert open_checkpoint(world, save(state, tmp_path / "root")).step == 1

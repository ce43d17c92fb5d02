"""Scripts that close nothing: whatever is under way, each ends with the exit code that it asked for."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.conftest import LONG_S

ROOT = Path(__file__).resolve().parents[2]

NATIVE = """
import atexit, sys, threading
atexit.register(lambda: print("at the end:", *at_the_end()))  # after what is registered as zero is imported
at_the_end = lambda: []
import torch
import zero

torch.set_num_threads(1)
inside, armed = threading.Event(), threading.Event()
ones = torch.ones(300, 300)


def native():
    '''In torch, without the interpreter's lock nearly always, and asking for it again and again.'''
    inside.set()
    for _ in range(60):
        ones.mm(ones)
"""

WORK = """
from zero.store import MemoryStore, Page, PageGroup
from zero.store.prefetch import PrefetchStore

begun, ended = [], []
at_the_end = lambda: ["all that began has ended" if len(begun) == len(ended) < 200 else (len(begun), len(ended))]


def work(opened):
    begun.append(opened)
    native()
    ended.append(opened)


store = PrefetchStore(MemoryStore(torch.device("cpu")), [], threads=2, read_ahead=0)
for number in range(200):
    page = Page(0, "master", number)
    store.allocate(page, 16, torch.float32)
    store.modify(PageGroup(0, number, (page,)), work)
inside.wait()
"""

MODEL = """
from torch import nn
from zero.store.executor import Executor

carry_out = Executor.carry_out
Executor.carry_out = lambda *given: (armed.is_set() and native(), carry_out(*given))
model, rows = nn.Linear(32, 32), torch.randn(4, 32)
"""

MAKE_STEP = """
offload = zero.Offload("nvme", path=".")
plan = zero.Plan(model, optimizer=zero.adamw(1e-3), stage=3, world=zero.open_world(), offload=offload)
state = zero.init(plan, zero.open_store(plan))
armed.set()
state, metrics = zero.make_step(plan, lambda model, rows: model(rows).square().mean())(state, [rows])
inside.wait()
"""

INITIALIZE = """
def train():
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "."}},
    }
    engine, *_ = zero.initialize(model=model, config=config)
    armed.set()
    engine.backward(engine(rows).square().mean())
    engine.step()
    inside.wait()


train()
"""

SAVE = """
from zero.checkpoint import Saving

offload = zero.Offload("none")
plan = zero.Plan(model, optimizer=zero.adamw(1e-3), stage=3, world=zero.open_world(), offload=offload)
state = zero.init(plan, zero.open_store(plan))
finite = sys.modules["zero.checkpoint.save"]._is_finite
sys.modules["zero.checkpoint.save"]._is_finite = lambda tensor: (native(), finite(tensor))[1]
saving = Saving(state, "checkpoints", behind=True)
inside.wait()
"""


def ended(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(script))
    command = [sys.executable, path]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LONG_S, check=False)


@pytest.mark.parametrize(("last", "code"), [("", 0), ("sys.exit(3)", 3)], ids=["end", "exit"])
def test_work_that_is_under_way_ends_and_no_other_begins(tmp_path, last, code):
    done = ended(NATIVE + WORK + last, tmp_path)
    assert (done.returncode, done.stdout) == (code, "at the end: all that began has ended\n"), done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize(
    "loop", [MODEL + MAKE_STEP, MODEL + INITIALIZE, MODEL + SAVE], ids=["make_step", "its engine dropped", "a save"]
)
def test_a_script_that_closes_nothing_ends_in_order(tmp_path, loop):
    done = ended(NATIVE + loop, tmp_path)
    assert (done.returncode, done.stdout) == (0, "at the end:\n"), done.stderr


def test_the_end_has_a_limit_and_no_child_waits(tmp_path):
    """Threads that do not stop: one is waited for and named, one was given up before; a forked process has neither."""
    done = ended(
        """
        import os, threading, warnings
        from zero.platform.threads import BackgroundThread

        warnings.simplefilter("ignore")  # Python 3.12 and newer warn of a fork beside threads
        BackgroundThread(threading.Event().wait, name="a disk that hangs", limit_s=0.2).start()
        given_up = BackgroundThread(threading.Event().wait, name="given up")
        given_up.start()
        given_up.limit_s = 0.0
        child = os.fork()
        if child:
            print("the child ends with", os.waitpid(child, 0)[1])
        """,
        tmp_path,
    )
    assert (done.returncode, done.stdout) == (0, "the child ends with 0\n")
    assert done.stderr == "the thread 'a disk that hangs' still runs 0.2 s after the end of the script\n"


@pytest.mark.slow(keep=1)
@pytest.mark.process
@pytest.mark.parametrize("kind", ["make_step, two ranks, sys.exit(3)", "zero.initialize, W&B, the end"])
def test_so_do_ranks_and_a_script_with_wandb(kind):
    """And the script that tries many."""
    if "W&B" in kind:
        pytest.importorskip("wandb")
    script = [sys.executable, ROOT / "benchmarks" / "exits.py", "--count", "1", "--busy", "0", "--only", kind]
    done = subprocess.run(script, capture_output=True, text=True, timeout=LONG_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

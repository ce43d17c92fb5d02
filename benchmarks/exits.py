#!/usr/bin/env python3
"""Let scripts end during an update or a save, on a busy machine, and check exit codes and output.

    benchmarks/exits.py                                   200 scripts, every kind in turn
    benchmarks/exits.py --count 60 --only "zero.initialize"
    benchmarks/exits.py --count 1 --only "make_step, two ranks, the end" --show

Each script makes five steps with all optimizer state in a file, so that the last update is still running, closes
nothing, and ends: at its last line, by an exception, by sys.exit, or by the return of its main function. Its exit code
must be the one that it chose, and it may print no traceback except that of its own exception.
"""

import argparse
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 180

BEGIN = """
import sys
import torch
import zero
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
rows = torch.randn(4, 512)
"""
MAKE_STEP = """
plan = zero.Plan(
    model, optimizer=zero.adamw(1e-3), stage=3, world=zero.open_world(), offload=zero.Offload("nvme", path=".")
)
state = zero.init(plan, zero.open_store(plan), seed=0)
step = zero.make_step(plan, lambda model, rows: model(rows).square().mean())
for _ in range(5):
    state, metrics = step(state, [rows])
"""
SAVE = """
from zero import checkpoint
saving = checkpoint.Saving(state, "checkpoints", behind=True)
"""
INITIALIZE = """
config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "."}},
    "wandb": {"enabled": WANDB},
}
engine, *_ = zero.initialize(model=model, config=config)
for _ in range(5):
    engine.backward(engine(rows).square().mean())
    engine.step()
"""
OWN_ERROR = "the error of this script"


class Loop(NamedTuple):
    """The statements of a script before it ends."""

    name: str
    text: str
    ranks: int = 1


class Ending(NamedTuple):
    """The last statement of a script, and its exit code."""

    name: str
    text: str
    code: int
    in_function: bool = False


LOOPS = (
    Loop("make_step", MAKE_STEP),
    Loop("zero.initialize", INITIALIZE.replace("WANDB", "False")),
    Loop("make_step, two ranks", MAKE_STEP, ranks=2),
    Loop("zero.initialize, two ranks", INITIALIZE.replace("WANDB", "False"), ranks=2),
    Loop("zero.initialize, W&B", INITIALIZE.replace("WANDB", "True")),
    Loop("make_step, a save under way", MAKE_STEP + SAVE),
)
ENDINGS = (
    Ending("the end", "", 0),
    Ending("an exception", f"raise ValueError({OWN_ERROR!r})", 1),
    Ending("sys.exit(0)", "sys.exit(0)", 0),
    Ending("sys.exit(3)", "sys.exit(3)", 3),
    Ending("its function returns", "", 0, in_function=True),
)


class Script(NamedTuple):
    loop: Loop
    ending: Ending

    @property
    def name(self) -> str:
        return f"{self.loop.name}, {self.ending.name}"

    @property
    def text(self) -> str:
        body = self.loop.text + self.ending.text
        if self.ending.in_function:
            body = f"def main():\n{textwrap.indent(body, '    ')}\nmain()"
        return f"{BEGIN}{body}\n"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="how many scripts to run")
    parser.add_argument("--only", default="", help="only kinds whose name begins with this")
    parser.add_argument("--at-once", type=int, default=2, help="how many scripts run in parallel")
    parser.add_argument("--busy", type=int, default=os.cpu_count(), help="further processes that keep the cores busy")
    parser.add_argument("--show", action="store_true", help="print the output of scripts that failed")
    return parser.parse_args()


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep the machine busy with `count` processes during the block."""
    others = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def environments(ranks: int) -> list[dict[str, str]]:
    common = os.environ | {"PYTHONPATH": str(ROOT), "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"}
    if ranks == 1:
        return [common]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [common | {"RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"} for rank in range(ranks)]


def run(script: Script) -> tuple[list[str], str]:
    """Run a script; return (complaints about the exits of its ranks, the output of all ranks)."""
    with tempfile.TemporaryDirectory(prefix="exits_") as folder:
        Path(folder, "script.py").write_text(script.text)
        start = partial(subprocess.Popen, [sys.executable, "script.py"], cwd=folder, text=True)
        into = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        ranks = [start(env=environment, **into) for environment in environments(script.loop.ranks)]
        wrong, written = [], ""
        for rank in ranks:
            try:
                output = rank.communicate(timeout=LIMIT_S)[0]
            except subprocess.TimeoutExpired:
                rank.send_signal(signal.SIGKILL)
                output = rank.communicate()[0]
            written += output
            wrong += complaints(script.ending, rank.returncode, output)
    return wrong, written


def complaints(ending: Ending, code: int, output: str) -> list[str]:
    last = output.strip().rpartition("\n")[2]
    if code != ending.code:
        return [f"ends with {code}, not {ending.code}: {last}"]
    output = re.sub(r"^\[rank\d\]: ", "", output, flags=re.MULTILINE)  # torch's prefix of ranks with a process group
    errors = re.findall(r"^Traceback|^Exception ignored|^[\w.]*Error: .*", output, re.MULTILINE)
    expected = ["Traceback", f"ValueError: {OWN_ERROR}"] if ending.code == 1 else []
    return [] if errors == expected else [f"prints {errors}"]


def main() -> int:
    options = arguments()
    scripts = [
        script for loop in LOOPS for ending in ENDINGS if (script := Script(loop, ending)).name.startswith(options.only)
    ]
    if not scripts:
        raise SystemExit(f"--only {options.only}: no kind begins with this")
    chosen = [scripts[number % len(scripts)] for number in range(options.count)]
    passed: Counter[Script] = Counter()
    with busy(options.busy), ThreadPoolExecutor(options.at_once) as pool:
        for script, (wrong, written) in zip(chosen, pool.map(run, chosen), strict=True):
            passed[script] += not wrong
            for line in wrong:
                print(f"{script.name}: {line}", *[written] * options.show, sep="\n", file=sys.stderr, flush=True)
    tried = Counter(chosen)
    print("| script | ends by | scripts | passed |\n|---|---|---|---|")
    for script in tried:
        print(f"| {script.loop.name} | {script.ending.name} | {tried[script]} | {passed[script]} |")
    print(f"{options.count} scripts, {passed.total()} of them passed")
    return int(passed.total() < options.count)


if __name__ == "__main__":
    sys.exit(main())

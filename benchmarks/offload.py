#!/usr/bin/env python3
"""Time a training step with offloaded state, compared with lower bounds, FSDP2 and DeepSpeed.

    benchmarks/offload.py --path /mnt/nvme                        # every system that is installed
    benchmarks/offload.py --deepspeed-python venv/bin/python      # DeepSpeed from another environment
    benchmarks/offload.py --systems compute,io-nvme,zero-nvme --rounds 5
    benchmarks/offload.py --layers 2,4,8,16                       # does infinity's memory grow with depth?
    benchmarks/offload.py --one-billion                           # experiment=offload_1b and its lower bound

A round runs every system once, one after the other, each in its own process. The figures are medians over all rounds.
All rounds run twice: with the default settings of malloc, then with raised thresholds, which train.py uses for its
ranks. MB are millions of bytes.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import zero  # noqa: E402, F401 - first: where nothing is installed it says what to type

from offload_systems import SYSTEMS  # noqa: E402 - found through the line above

MALLOC = {
    "default": {},
    "raised": {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "17179869184"},
}
BILLION = {"width": 1792, "layers": 26, "heads": 14, "seq": 512, "rows": 2, "tied": 1}
"""The sizes of conf/experiment/offload_1b.yaml, for its lower bounds."""

TWO_DISKS = "zero-nvme-two-disks"

SLACK_BYTES = 350_000_000
"""Part of a peak that cannot be counted: Python, torch and temporaries of a step."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", help="separated by commas; default: all that are installed")
    parser.add_argument(
        "--malloc", default="default,raised", help="default: the system's settings; raised: high thresholds"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="measured steps of a system in a round")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the measured ones")
    parser.add_argument("--threads", type=int, default=2, help="compute threads of each system")
    parser.add_argument(
        "--io-threads", type=int, default=0, help="I/O threads of the store; 0: it measures the best number"
    )
    parser.add_argument("--ahead", type=int, default=0, help="bytes that ours reads before their turn; 0: its default")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="of compute")
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--depth", type=int, default=12, help="layers of the model")
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument(
        "--disk-gbps", type=float, default=0, help="let no more through to the disk, in GB/s, reads and writes together"
    )
    parser.add_argument("--path", default=".", help="folder on the disk to measure; needs 16 bytes per parameter")
    parser.add_argument("--second-path", default="", help="folder on another disk, for zero-nvme-two-disks")
    parser.add_argument("--layers", help="instead: offload=infinity with these numbers of layers, separated by commas")
    parser.add_argument(
        "--one-billion", action="store_true", help="instead: experiment=offload_1b and its lower bounds"
    )
    parser.add_argument(
        "--override", action="append", default=[], help="with --one-billion: another setting of train.py"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an environment variable for every system, such as OMP_WAIT_POLICY=passive: "
        "waiting OpenMP threads then leave their cores to the store's threads",
    )
    parser.add_argument(
        "--deepspeed-python", default=sys.executable, help="a Python with deepspeed and what zero needs"
    )
    parser.add_argument("--timeout", type=float, default=1200.0, help="seconds for one system in one round")
    parser.add_argument("--json", default=None, help="also write every measurement to this file")
    options = parser.parse_args()
    if not Path(options.path).is_dir():
        parser.error(f"--path {options.path} is not a folder")
    if options.second_path and not Path(options.second_path).is_dir():
        parser.error(f"--second-path {options.second_path} is not a folder")
    if wrong := [pair for pair in options.set if "=" not in pair]:
        parser.error(f"--set {wrong[0]}: write NAME=VALUE")
    options.path = str(Path(options.path).resolve())
    options.second_path = options.second_path and str(Path(options.second_path).resolve())
    return options


# Running


class Run(NamedTuple):
    """One system in its own process: its measurement, or {"system", "error"}."""

    malloc: str
    round: int
    result: dict[str, Any]


def environment(options: argparse.Namespace, malloc: str, python: str) -> dict[str, str]:
    """Return the environment variables of one rank on this machine. DeepSpeed looks for ninja on the PATH."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    threads = {"OMP_NUM_THREADS": str(options.threads), "MKL_NUM_THREADS": str(options.threads)}
    path = f"{Path(python).parent}{os.pathsep}{kept.get('PATH', '')}"
    kept |= rank | threads | MALLOC[malloc] | {"DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo", "PATH": path}
    return kept | {"MASTER_PORT": str(free_port())} | dict(pair.split("=", 1) for pair in options.set)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def started(command: list[str], log: Path, **keys: Any) -> Iterator[subprocess.Popen]:
    """Start a process; end it and its children with the block."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, **keys)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_system(name: str, malloc: str, options: argparse.Namespace, sizes: dict[str, int]) -> dict[str, Any]:
    """Start one system, wait for it, return its measurement or {"system", "error": last lines}."""
    python = options.deepspeed_python if SYSTEMS[name].deepspeed else sys.executable
    with tempfile.TemporaryDirectory(prefix="offload_", dir=options.path) as folder:
        log, out = Path(folder, "log"), Path(folder, "result.json")
        command = [python, str(HERE / "offload_systems.py"), f"--system={name}", f"--path={folder}"]
        command += [
            f"--out={out}",
            f"--second-path={options.second_path}",
            *(f"--{key}={value}" for key, value in sizes.items()),
        ]
        for key in ("warmup", "steps", "threads", "io-threads", "disk-gbps", "dtype", "ahead"):
            command.append(f"--{key}={getattr(options, key.replace('-', '_'))}")
        with started(command, log, env=environment(options, malloc, python), cwd=folder) as process:
            try:
                code = process.wait(options.timeout)
            except subprocess.TimeoutExpired:
                code = None
        if code != 0:
            why = f"ran longer than {options.timeout:.0f} s" if code is None else f"exited with {code}"
            return {"system": name, "error": "\n    ".join([why, *last_lines(log)])}
        return json.loads(out.read_text())


def last_lines(log: Path) -> list[str]:
    return log.read_text(errors="replace").strip().splitlines()[-12:]


def sizes_of(options: argparse.Namespace, layers: int | None = None) -> dict[str, int]:
    """Return the sizes of the model and its rows, as the systems' options."""
    depth = options.depth if layers is None else layers
    heads = max(options.width // 64, 1)
    return {
        "width": options.width,
        "layers": depth,
        "heads": heads,
        "seq": options.seq,
        "rows": options.rows,
        "tied": 0,
    }


def run_round(number: int, malloc: str, names: list[str], options: argparse.Namespace) -> list[Run]:
    """Run every system once. Report and skip a system that fails."""
    runs = []
    for name in names:
        result = run_system(name, malloc, options, sizes_of(options))
        shown = result.get("error") or " ".join(f"{value:.3f}" for value in result["step_s"])
        print(f"round {number} malloc {malloc} {name:<24} {shown}", flush=True)
        runs.append(Run(malloc, number, result))
    return runs


def can_import(python: str, module: str) -> bool:
    if python == sys.executable:
        return importlib.util.find_spec(module) is not None
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", code], check=False).returncode == 0


def build_deepspeed(options: argparse.Namespace) -> None:
    """Build DeepSpeed's extensions before anything is measured. End the program if that fails."""
    print("building DeepSpeed's extensions, which takes minutes the first time", flush=True)
    command = [options.deepspeed_python, str(HERE / "offload_systems.py"), "--build-deepspeed"]
    done = subprocess.run(
        command,
        env=environment(options, "default", options.deepspeed_python),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(
            "\n".join(
                [*(done.stdout + done.stderr).strip().splitlines()[-12:], "DeepSpeed's extensions could not be built"]
            )
        )


def chosen(options: argparse.Namespace) -> list[str]:
    """Return the systems of --systems, or all that can run. End the program if a name does not exist."""
    every = [name for name in SYSTEMS if options.second_path or name != TWO_DISKS]
    names = every if options.systems is None else options.systems.split(",")
    if TWO_DISKS in names and not options.second_path:
        sys.exit(f"{TWO_DISKS} needs --second-path, a folder on another disk")
    unknown = [name for name in names if name not in SYSTEMS]
    if unknown:
        sys.exit(f"unknown system {', '.join(unknown)}; choose from {', '.join(SYSTEMS)}")
    if any(SYSTEMS[name].deepspeed for name in names):
        if can_import(options.deepspeed_python, "deepspeed"):
            build_deepspeed(options)
        elif options.systems is None:
            print("DeepSpeed is skipped: pip install -e '.[bench]', or name an environment with --deepspeed-python")
            names = [name for name in names if not SYSTEMS[name].deepspeed]
        else:
            sys.exit(f"{options.deepspeed_python} has no deepspeed; name an environment with --deepspeed-python")
    return names


# Results


class Figures:
    """Medians over all rounds under one malloc setting."""

    def __init__(self, runs: list[Run], malloc: str) -> None:
        self._by_name: dict[str, list[dict[str, Any]]] = {}
        for run in runs:
            if run.malloc == malloc and "error" not in run.result:
                self._by_name.setdefault(run.result["system"], []).append(run.result)
        self.names = list(self._by_name)

    def has(self, *names: str) -> bool:
        return all(name in self._by_name for name in names)

    def values(self, name: str, key: str = "step_s") -> list[float]:
        """Return all values of `key` in all rounds; empty if the system does not measure it."""
        return [value for result in self._by_name[name] for value in result.get(key, ())]

    def median(self, name: str, key: str = "step_s") -> float:
        return statistics.median(self.values(name, key))

    def largest(self, name: str, key: str) -> int:
        return max(result[key] for result in self._by_name[name])

    def fact(self, name: str, key: str) -> Any:
        return self._by_name[name][0].get(key)

    def floor(self, name: str) -> float | None:
        """Return the lower bound of a step in seconds: of two parts that can overlap, the longer one counts."""
        nvme, infinity = ("compute", "io-nvme"), ("compute-remat", "io-infinity")
        if name in ("zero-nvme", "zero-nvme-serial", "zero-nvme-unverified") and self.has(*nvme):
            forward, traffic = self.median("compute", "forward_s"), self.median("io-nvme")
            return max(forward, traffic) + self.median("compute", "backward_s")
        if name in ("zero-infinity", "zero-infinity-serial") and self.has(*infinity):
            return sum(max(self.median(system, part) for system in infinity) for part in ("forward_s", "backward_s"))
        return None

    def bytes_per_param(self, name: str, way: str) -> float:
        """Return the bytes read or written in a step, by the store's count, or the kernel's if there is no store."""
        counted = self.values(name, f"{way}_bytes") or self.values(name, f"disk_{way}_bytes")
        return statistics.median(counted) / self.fact(name, "numel")


def table(figures: Figures) -> str:
    """Return a Markdown table, rows in the order in which the systems first ran. Times are in seconds.

    "wait" is the time that training waits for the store; for DeepSpeed all of `engine.step()`. "peak" is the peak of
    the measured steps, "with start" the peak of the whole process.
    """
    beside = [name for name in ("compute", "fsdp2", "deepspeed-cpu", "deepspeed-nvme") if figures.has(name)]
    titles = ["system", "step s", "lowest to highest", "forward", "backward", "wait", "read B/param", "written B/param"]
    titles += ["peak MB", "with start MB", "/ floor", *(f"/ {name}" for name in beside), "loss"]
    lines = [f"| {' | '.join(titles)} |", f"|---|{'---:|' * (len(titles) - 1)}"]
    for name in figures.names:
        times, step, floor = figures.values(name), figures.median(name), figures.floor(name)
        parts = [_seconds(figures, name, key) for key in ("forward_s", "backward_s")]
        wait = (
            "" if name.startswith("io-") else _seconds(figures, name, "wait_s") or _seconds(figures, name, "update_s")
        )
        moved = [f"{figures.bytes_per_param(name, way):.1f}" for way in ("read", "write")]
        peaks = [f"{figures.largest(name, key) / 1e6:,.0f}" for key in ("step_peak_bytes", "life_peak_bytes")]
        ratios = [f"{step / floor:.3f}" if floor else "", *(f"{step / figures.median(other):.3f}" for other in beside)]
        losses = figures.values(name, "loss")
        cells = [name, f"{step:.3f}", f"{min(times):.3f} to {max(times):.3f}", *parts, wait, *moved, *peaks, *ratios]
        lines.append(f"| {' | '.join([*cells, f'{losses[-1]:.3f}' if losses else ''])} |")
    return "\n".join(lines)


def _seconds(figures: Figures, name: str, key: str) -> str:
    return f"{figures.median(name, key):.3f}" if figures.values(name, key) else ""


class Goal(NamedTuple):
    """A ratio that should be at most `limit`; known if all systems in `needs` ran."""

    text: str
    needs: tuple[str, ...]
    limit: float
    reached: Callable[[Figures], float | None]


def ratio(over: str, under: str, limit: float) -> Goal:
    return Goal(f"{over} / {under}", (over, under), limit, lambda f: f.median(over) / f.median(under))


def to_floor(name: str, formula: str, limit: float) -> Goal:
    def reached(figures: Figures) -> float | None:
        floor = figures.floor(name)
        return None if floor is None else figures.median(name) / floor

    return Goal(f"{name} / {formula}", (name,), limit, reached)


def lazy_to_serial(name: str, traffic: str, compute: str) -> Goal:
    """Return the goal lazy / serial. It is judged only if there is enough I/O to hide."""

    def reached(figures: Figures) -> float | None:
        key = "step_s" if traffic == "io-nvme" else "forward_s"
        if figures.median(traffic, key) <= 0.8 * figures.median(compute, "forward_s"):
            return None
        return figures.median(name) / figures.median(f"{name}-serial")

    needs = (name, f"{name}-serial", traffic, compute)
    return Goal(f"{name} / {name}-serial, where O > 0.8 Cf", needs, 0.8, reached)


def peak_to_count(figures: Figures) -> float | None:
    """Return the peak of offload=nvme / (parameters, gradients, the arena, activations, `SLACK_BYTES`)."""
    kept, host = figures.fact("compute", "activation_bytes"), figures.fact("zero-nvme", "plan_bytes").get("host", {})
    both = 4 if figures.fact("zero-nvme", "dtype") == "bf16" else 8  # bytes of a parameter and its gradient
    counted = both * figures.fact("zero-nvme", "numel") + host.get("arena", 0) + kept + SLACK_BYTES
    return figures.largest("zero-nvme", "step_peak_bytes") / counted


def peak_ratio(over: str, under: str, limit: float) -> Goal:
    key = "step_peak_bytes"
    return Goal(f"peak: {over} / {under}", (over, under), limit, lambda f: f.largest(over, key) / f.largest(under, key))


GOALS = (
    ratio("zero-none", "compute", 1.12),
    ratio("zero-cpu", "compute", 1.12),
    ratio("zero-none", "fsdp2", 0.88),
    ratio("zero-cpu", "fsdp2", 0.88),
    ratio("zero-cpu", "deepspeed-cpu", 0.85),
    to_floor("zero-nvme", "[max(Cf, O) + Cb]", 1.10),
    ratio("zero-nvme", "deepspeed-nvme", 0.70),
    ratio("zero-nvme-bf16", "deepspeed-nvme", 0.60),
    ratio("zero-nvme", "zero-nvme-whole", 0.85),
    ratio("zero-nvme-bf16", "zero-nvme-whole", 0.55),
    ratio("zero-nvme", "zero-none", 1.3),
    lazy_to_serial("zero-nvme", "io-nvme", "compute"),
    to_floor("zero-infinity", "[max(Cf, Of) + max(Cb, Ob)], with remat", 1.12),
    lazy_to_serial("zero-infinity", "io-infinity", "compute-remat"),
    Goal(
        "checksums, as a share of the step",
        ("zero-nvme", "zero-nvme-unverified"),
        0.03,
        lambda f: 1 - f.median("zero-nvme-unverified") / f.median("zero-nvme"),
    ),
    Goal(
        "peak: zero-nvme / (parameters + gradients + arena + activations + 350 MB)",
        ("zero-nvme", "compute"),
        1.0,
        peak_to_count,
    ),
    peak_ratio("zero-nvme", "deepspeed-nvme", 0.3),
    Goal(
        "peak: zero-infinity / 1,000 MB, its start included",
        ("zero-infinity",),
        1.0,
        lambda f: f.largest("zero-infinity", "life_peak_bytes") / 1e9,
    ),
)


def judged(figures: Figures) -> list[str]:
    lines = []
    for goal in GOALS:
        reached = goal.reached(figures) if figures.has(*goal.needs) else None
        if reached is not None:
            lines.append(f"| {goal.text} | {reached:.3f} | {goal.limit} | {_verdict(reached, goal.limit)} |")
    return lines


def _verdict(reached: float, limit: float) -> str:
    return "reached" if reached <= limit else "missed"


def with_users_settings(runs: list[Run]) -> list[str]:
    """Return ratios with the settings of users: train.py raises malloc's thresholds, DeepSpeed's launcher does not."""
    ours, theirs, lines = Figures(runs, "raised"), Figures(runs, "default"), []
    for name, limit in (("deepspeed-nvme", 0.5), ("deepspeed-nvme-defaults", 0.5)):
        if ours.has("zero-nvme") and theirs.has(name):
            reached = ours.median("zero-nvme") / theirs.median(name)
            text = f"zero-nvme, raised / {name}, default"
            lines.append(f"| {text} | {reached:.3f} | {limit} | {_verdict(reached, limit)} |")
    return lines


GOALS_HEAD = "| figure | reached | goal | |\n|---|---:|---:|---|"


def compare(options: argparse.Namespace) -> list[Run]:
    """Run rounds of every system, then print a table and the goals for each malloc setting."""
    names = chosen(options)
    print(
        f"GPT width {options.width}, {options.depth} layers, {options.dtype}; {options.rows} x {options.seq} "
        f"bytes; 1 rank with {options.threads} threads; AdamW, clip 1.0; "
        f"{options.rounds} rounds of {options.warmup} + {options.steps} steps; "
        f"{''.join(f'{pair}; ' for pair in options.set)}"
        f"{shutil.disk_usage(options.path).free / 1e9:.0f} GB free at --path\n"
    )
    for name in names:
        print(f"  {name:<24} {SYSTEMS[name].about}")
    runs: list[Run] = []
    for malloc in options.malloc.split(","):
        print(flush=True)
        for number in range(1, options.rounds + 1):
            runs += run_round(number, malloc, names, options)
        figures = Figures(runs, malloc)
        print(f"\nmalloc {malloc}; medians of {options.rounds} x {options.steps} steps\n\n{table(figures)}")
        if lines := judged(figures):
            print("\n" + "\n".join([GOALS_HEAD, *lines]), flush=True)
    if lines := with_users_settings(runs):
        print("\nboth malloc settings\n\n" + "\n".join([GOALS_HEAD, *lines]), flush=True)
    versions = {run.result["torch"] for run in runs if "torch" in run.result}
    if len(versions) > 1:
        print(f"the systems ran with different versions of torch: {', '.join(sorted(versions))}")
    return runs


# Depth


def depths(options: argparse.Namespace) -> list[Run]:
    """Measure the peak of offload=infinity against the number of layers."""
    runs, rows = [], []
    for malloc in options.malloc.split(","):
        for layers in (int(text) for text in options.layers.split(",")):
            result = run_system("zero-infinity", malloc, options, sizes_of(options, layers))
            runs.append(Run(malloc, layers, result))
            if "error" in result:
                print(f"{layers} layers, malloc {malloc}: {result['error']}", flush=True)
                continue
            peaks = [f"{result[key] / 1e6:,.0f}" for key in ("step_peak_bytes", "life_peak_bytes")]
            cells = [malloc, str(layers), f"{result['numel'] / 1e6:,.0f}", *peaks]
            rows.append([*cells, f"{statistics.median(result['step_s']):.3f}"])
            print(f"{layers} layers, malloc {malloc}: peak {peaks[1]} MB", flush=True)
    titles = ["malloc", "layers", "M parameters", "peak MB", "with start MB", "step s"]
    print(f"\noffload=infinity, width {options.width}, {options.rows} x {options.seq} bytes\n")
    print("\n".join([f"| {' | '.join(titles)} |", f"|---|{'---:|' * 5}", *(f"| {' | '.join(row)} |" for row in rows)]))
    return runs


# A billion parameters


def one_billion(options: argparse.Namespace) -> list[Run]:
    """Time `python train.py experiment=offload_1b`, and before and after it the file traffic of the same bytes."""
    options.warmup, options.steps = 1, 2  # the experiment has three steps
    runs = []
    for number, what in enumerate(("io-infinity", "compute-remat", "train.py", "io-infinity"), 1):
        result = train_billion(options) if what == "train.py" else run_system(what, "raised", options, BILLION)
        shown = result.get("error") or " ".join(f"{value:.2f}" for value in result["step_s"])
        print(f"{number} {what:<16} {shown}", flush=True)
        runs.append(Run("raised", number, result))
    figures = Figures(runs, "raised")
    if not figures.has("train.py", "io-infinity"):
        return runs
    step, traffic, peak = figures.median("train.py"), figures.median("io-infinity"), figures.largest("train.py", "peak")
    moved = [f"{figures.bytes_per_param('io-infinity', way):.1f} B/param {way}" for way in ("read", "write")]
    print(f"\n{figures.fact('io-infinity', 'numel'):,} parameters; step {step:.2f} s; traffic alone {traffic:.2f} s")
    print(f"traffic of a step: {', '.join(moved)}")
    lines = [
        f"| step / traffic alone | {step / traffic:.3f} | 1.05 | {_verdict(step / traffic, 1.05)} |",
        f"| peak / 1,000 MB, its start included | {peak / 1e9:.3f} | 1.0 | {_verdict(peak, 1e9)} |",
    ]
    if figures.has("compute-remat"):
        pair = ("compute-remat", "io-infinity")
        floor = sum(max(figures.median(system, part) for system in pair) for part in ("forward_s", "backward_s"))
        text = f"step / [max(Cf, Of) + max(Cb, Ob)] = {floor:.2f} s"
        lines.append(f"| {text} | {step / floor:.3f} | 1.12 | {_verdict(step / floor, 1.12)} |")
    print("\n" + "\n".join([GOALS_HEAD, *lines]), flush=True)
    return runs


def train_billion(options: argparse.Namespace) -> dict[str, Any]:
    """Run the experiment as a user does. Times are from its metrics.jsonl, the peak is from the kernel."""
    with tempfile.TemporaryDirectory(prefix="offload_", dir=options.path) as folder:
        log, run = Path(folder, "log"), Path(folder, "run")
        command = [sys.executable, str(HERE.parent / "train.py"), "experiment=offload_1b", f"offload.path={folder}"]
        command += [f"launch.threads={options.threads}", f"hydra.run.dir={run}", *options.override]
        clean = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
        clean |= dict(variable.split("=", 1) for variable in options.set)
        with started(command, log, env=clean, cwd=folder) as process:
            peak = peak_until_end(process, options.timeout)
        rows = run / "metrics.jsonl"
        steps = [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []
        if process.returncode != 0 or not steps:
            return {"system": "train.py", "error": "\n    ".join([f"exit {process.returncode}", *last_lines(log)])}
    times = [row["speed/step_s"] for row in steps if row["speed/step_s"] is not None]
    return {"system": "train.py", "step_s": times[options.warmup :], "peak": peak, "rows": steps}


def peak_until_end(process: subprocess.Popen, timeout: float) -> int:
    """Wait for a process; return the largest memory peak of any process in its session, in bytes."""
    peaks: dict[int, int] = {}
    deadline = time.monotonic() + timeout
    while process.poll() is None and time.monotonic() < deadline:
        for pid in in_session(process.pid):
            with contextlib.suppress(OSError, TypeError):  # the process may end at any moment
                match = re.search(r"^VmHWM:\s*(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
                peaks[pid] = int(match[1]) * 1024
        time.sleep(0.2)
    return max(peaks.values(), default=0)


def in_session(session: int) -> list[int]:
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # the name in parentheses may contain spaces; the session is the fourth field after it
            if int((folder / "stat").read_text().rpartition(")")[2].split()[3]) == session:
                pids.append(int(folder.name))
    return pids


def main() -> int:
    options = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` ends running processes
    runs = one_billion(options) if options.one_billion else depths(options) if options.layers else compare(options)
    if options.json:
        Path(options.json).write_text(json.dumps([run._asdict() for run in runs], indent=1))
    return 1 if any("error" in run.result for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())

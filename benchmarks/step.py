#!/usr/bin/env python3
"""Time one training step of each stage, of DDP, FSDP2 and DeepSpeed, on the same GPT, rows and settings.

    benchmarks/step.py                                   # every system that is installed, fp32 and bf16
    benchmarks/step.py --deepspeed-python venv/bin/python  # DeepSpeed from another environment
    benchmarks/step.py --systems floor,fsdp2,zero3 --dtypes bf16 --rounds 5

A round runs every system once, one after the other, each with new processes. The figures are medians over all rounds.
All rounds run twice: with the default settings of malloc, then with raised thresholds.
"""

import argparse
import importlib.util
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import zero  # noqa: E402, F401 - first: where nothing is installed it says what to type

from step_systems import SYSTEMS  # noqa: E402 - found through the line above

MALLOC = {
    "default": {},
    "raised": {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "17179869184"},
}
NEIGHBOURS = ("ddp", "fsdp2", "deepspeed1", "deepspeed2", "deepspeed3")


class Run(NamedTuple):
    """The measurement of one system in one round, written by its rank 0."""

    malloc: str
    round: int
    result: dict[str, Any]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", help="separated by commas; default: all that are installed")
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument(
        "--malloc", default="default,raised", help="default: the system's settings; raised: high thresholds"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="measured steps of a system in a round")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the measured ones")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--rows", type=int, default=2, help="rows per rank")
    parser.add_argument("--deepspeed-python", default=None, help="a Python with torch, einops and deepspeed")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one system in one round")
    parser.add_argument("--json", default=None, help="also write every measurement to this file")
    return parser.parse_args()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_system(name: str, dtype: str, malloc: str, options: argparse.Namespace, python: str) -> dict[str, Any]:
    """Start the ranks of one system, wait for all, return rank 0's measurement or {"error": last lines}."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **MALLOC[malloc]}
    sizes = [f"--{key}={getattr(options, key)}" for key in ("width", "layers", "seq", "rows", "warmup", "steps")]
    with tempfile.TemporaryDirectory() as folder:
        command = [python, str(HERE / "step_systems.py"), f"--system={name}", f"--dtype={dtype}", *sizes]
        ranks, logs = [], [Path(folder, f"rank{rank}.log") for rank in range(options.ranks)]
        try:
            for rank, log in enumerate(logs):
                rank_environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(options.ranks)}
                with log.open("wb") as output:
                    ranks.append(
                        subprocess.Popen(
                            [*command, f"--out={folder}/result.json"],
                            env=environment | rank_environment,
                            stdout=output,
                            stderr=subprocess.STDOUT,
                            cwd=folder,
                        )
                    )
            failed = wait(ranks, options.timeout)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        if failed is not None:
            tail = logs[failed].read_text(errors="replace").strip().splitlines()[-12:]
            return {"error": f"rank {failed} exited with {ranks[failed].returncode}\n    " + "\n    ".join(tail)}
        return json.loads(Path(folder, "result.json").read_text())


def wait(ranks: list[subprocess.Popen], timeout: float) -> int | None:
    """Return None if all ranks succeeded, else the first rank that failed; rank 0 if the time is over."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        codes = [rank.poll() for rank in ranks]
        bad = [number for number, code in enumerate(codes) if code not in (None, 0)]
        if bad:
            return bad[0]
        if all(code == 0 for code in codes):
            return None
        time.sleep(0.2)
    return 0


def can_import(python: str, module: str) -> bool:
    if python == sys.executable:
        return importlib.util.find_spec(module) is not None
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", code], check=False).returncode == 0


def table(runs: list[Run], malloc: str, dtype: str) -> str:
    """Return the figures as a table, in the order in which the systems first ran."""
    mine = [run for run in runs if (run.malloc, run.result.get("dtype")) == (malloc, dtype)]
    names = list(dict.fromkeys(run.result["system"] for run in mine))
    median, spread, cpu, peak, loss = {}, {}, {}, {}, {}
    for name in names:
        results = [run.result for run in mine if run.result["system"] == name]
        times = [value for result in results for value in result["step_s"]]
        median[name], spread[name] = statistics.median(times), (min(times), max(times))
        cpu[name] = statistics.median(value for result in results for value in result["cpu_s"])
        peak[name] = max(result["step_peak_bytes"] for result in results) / 1e6
        loss[name] = results[0]["loss"][-1]
    beside = [name for name in ("floor", *NEIGHBOURS) if name in names]
    lines = [
        f"\n{dtype}, malloc {malloc}: seconds a step, median (lowest to highest); CPU seconds of rank 0, median; "
        "peak resident MB of a rank in the measured steps"
    ]
    lines.append(
        f"{'system':<17}{'step':>7} {'':>15}{'CPU':>7}{'peak MB':>9}"
        + "".join(f"{'/ ' + name:>13}" for name in beside)
        + f"{'loss':>8}"
    )
    for name in names:
        ratios = "".join(f"{median[name] / median[other]:>13.3f}" for other in beside)
        low, high = spread[name]
        lines.append(
            f"{name:<17}{median[name]:>7.3f} ({low:.3f} to {high:.3f}){cpu[name]:>7.3f}{peak[name]:>8.0f} "
            f"{ratios}{loss[name]:>8.3f}"
        )
    return "\n".join(lines)


def chosen(options: argparse.Namespace, python: str) -> list[str]:
    """Return the systems of --systems, or all that can run. End the program if a name does not exist."""
    has_deepspeed = can_import(python, "deepspeed")
    if options.systems is None:
        if not has_deepspeed:
            print("DeepSpeed is skipped: pip install -e '.[bench]', or name an environment with --deepspeed-python")
        return [name for name, system in SYSTEMS.items() if has_deepspeed or not system.deepspeed]
    names = options.systems.split(",")
    unknown = [name for name in names if name not in SYSTEMS]
    if unknown:
        sys.exit(f"unknown system {', '.join(unknown)}; choose from {', '.join(SYSTEMS)}")
    return names


def measure_round(number: int, malloc: str, names: list[str], python: str, options: argparse.Namespace) -> list[Run]:
    """Run every system once in every dtype. Report and skip a system that fails."""
    runs = []
    for dtype in options.dtypes.split(","):
        for name in [name for name in names if dtype in SYSTEMS[name].dtypes]:
            result = run_system(name, dtype, malloc, options, python if SYSTEMS[name].deepspeed else sys.executable)
            shown = result.get("error") or " ".join(f"{value:.3f}" for value in result["step_s"])
            print(f"round {number} malloc {malloc} {dtype} {name:<17} {shown}", flush=True)
            runs.append(Run(malloc, number, result))
    return runs


def main() -> int:
    options = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` ends the ranks
    deepspeed_python = options.deepspeed_python or sys.executable
    names = chosen(options, deepspeed_python)
    print(
        f"GPT width {options.width}, {options.layers} layers; {options.rows} x {options.seq} bytes per rank; "
        f"{options.ranks} gloo ranks, one thread each; fused AdamW, clip 1.0; "
        f"{options.rounds} rounds of {options.warmup} + {options.steps} steps"
    )
    for name in names:
        print(f"  {name:<17} {SYSTEMS[name].about}")
    runs: list[Run] = []
    for malloc in options.malloc.split(","):
        for number in range(1, options.rounds + 1):
            runs += measure_round(number, malloc, names, deepspeed_python, options)
        for dtype in options.dtypes.split(","):
            print(table(runs, malloc, dtype), flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps([run._asdict() for run in runs], indent=1))
    versions = {run.result["torch"] for run in runs if "torch" in run.result}
    if len(versions) > 1:
        print(f"the systems ran with different versions of torch: {', '.join(sorted(versions))}")
    return 1 if any("error" in run.result for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())

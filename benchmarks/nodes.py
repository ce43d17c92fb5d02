#!/usr/bin/env python3
"""Time a training step on several nodes with thin wires, beside DDP and FSDP2, and count the bytes of each wire.

    benchmarks/nodes.py                                   # 85 million parameters, 2 nodes of 2 ranks, 1 Gbit/s
    benchmarks/nodes.py --systems fsdp2,zero3-node --rate 10gbit --rounds 3

Nodes are those of scripts/nodes: network namespaces of this machine, joined by wires of a limited rate. All systems
train the GPT of benchmarks/step.py on the same rows; a round runs each of them once. Bytes are the most that a node
sends in a step, by the kernel's counters; medians over steps and rounds.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import zero  # noqa: E402, F401 - first: where nothing is installed it says what to type

from step_systems import BETWEEN_NODES, SYSTEMS  # noqa: E402 - found through the line above
from node_parts.nodes import Nodes, Wire, why_not  # noqa: E402
from node_parts.run import Job, Readings, wait_for  # noqa: E402

DEFAULT = (
    "ddp,zero1-straight,zero1-gather,zero1-node,fsdp2,fsdp2-hybrid,zero3-straight,zero3-gather,zero3-node,zero3-copies"
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", default=DEFAULT, help="separated by commas")
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="on each node")
    parser.add_argument("--rate", default="1gbit", help="of each wire")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3, help="measured steps of a system in a round")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the measured ones")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--rows", type=int, default=1, help="per rank")
    options = parser.parse_args()
    options.systems = options.systems.split(",")
    if unknown := [name for name in options.systems if name not in SYSTEMS | BETWEEN_NODES]:
        parser.error(f"unknown system {unknown[0]}; choose from {', '.join(SYSTEMS | BETWEEN_NODES)}")
    return options


def run_system(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return rank 0's measurement with `sent_bytes` of each measured step, or {"error": the end of the log}."""
    sizes = [
        f"--{key}={getattr(options, key)}" for key in ("width", "layers", "seq", "rows", "warmup", "steps", "dtype")
    ]
    with tempfile.TemporaryDirectory() as folder, Nodes([Wire(options.rate)] * options.nodes) as nodes:
        rows, out = Path(folder, "rows.jsonl"), Path(folder, "result.json")
        words = [str(HERE / "step_systems.py"), f"--system={name}", f"--out={out}", f"--rows-file={rows}", *sizes]
        job = Job(words, options.ranks)
        env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
        readings, log = Readings(nodes, rows), Path(folder, "log")
        with log.open("wb") as output:
            popen_options = {"env": env, "stdout": output, "stderr": output}
            code = wait_for([job.start(nodes, node, **popen_options) for node in range(options.nodes)], readings)
        if code:
            return {"error": f"exit code {code}\n" + log.read_text(errors="replace")[-4000:]}
        sent = zip(*([sent for sent, _ in readings.per_step(node)] for node in range(options.nodes)), strict=True)
        return json.loads(out.read_text()) | {"sent_bytes": [max(nodes) for nodes in sent][options.warmup - 1 :]}


def table(runs: dict[str, list[dict[str, Any]]]) -> str:
    """Return a table with a row for each system, in the order in which they ran."""
    beside = [name for name in ("ddp", "fsdp2", "fsdp2-hybrid", "zero3-straight") if runs.get(name)]
    medians = {
        name: [statistics.median(value for run in results for value in run[key]) for key in ("step_s", "sent_bytes")]
        for name, results in runs.items()
        if results
    }
    lines = ["", f"{'system':<16}{'step':>8}{'sent MB':>9}" + "".join(f"{f'/ {name}':>17}" for name in beside)]
    for name, (step_s, sent_bytes) in medians.items():
        ratios = "".join(
            f"{step_s / medians[other][0]:>9.3f}, {sent_bytes / medians[other][1]:>5.3f} " for other in beside
        )
        lines.append(f"{name:<16}{step_s:>8.3f}{sent_bytes / 1e6:>9.1f}{ratios}  loss {runs[name][0]['loss'][-1]:.6f}")
    return "\n".join([*lines, "seconds a step and MB that a node sends in it; ratios of both to other systems"])


def main() -> int:
    options = arguments()
    if refusal := why_not():
        print(refusal, file=sys.stderr)
        return 3
    print(
        f"GPT width {options.width}, {options.layers} layers, {options.dtype}; {options.rows} x {options.seq} "
        f"bytes per rank; {options.nodes} nodes of {options.ranks} ranks, wires of {options.rate}"
    )
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in options.systems}
    failed = False
    for number in range(1, options.rounds + 1):
        for name in options.systems:
            result = run_system(name, options)
            failed |= "error" in result
            shown = result.get("error") or " ".join(f"{value:.3f}" for value in result["step_s"])
            print(f"round {number} {name:<16} {shown}", flush=True)
            runs[name] += [] if "error" in result else [result]
    print(table(runs))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

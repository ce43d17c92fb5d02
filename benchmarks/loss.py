#!/usr/bin/env python3
"""Measure time and memory of a language model's last layer and loss, with all logits at once and in chunks.

    benchmarks/loss.py                              a vocabulary of 128k, 2 x 1024 tokens, width 1024, bf16
    benchmarks/loss.py --vocab 32768 --dtype fp32

Each run is a process of its own: forward and backward once to warm up, then some times. The two take turns; seconds are
medians over all rounds, peaks are what the process's resident memory grew by beyond hidden states, weight and both
gradients.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
WAYS = {"plain": None, "chunked": "auto"}


def measure(options: argparse.Namespace) -> dict[str, object]:
    import torch

    from step_systems import forget_peak

    from zero.losses import linear_cross_entropy
    from zero.platform.host_memory import host_peak_bytes

    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[options.dtype]
    hidden = torch.randn(options.tokens, options.width).to(dtype).requires_grad_()
    weight = torch.randn(options.vocab, options.width).mul_(options.width**-0.5).to(dtype).requires_grad_()
    targets = torch.randint(options.vocab, (options.tokens,))
    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)
    forget_peak()
    before, seconds, loss = host_peak_bytes(), [], 0.0
    for number in range(options.steps + 1):
        begin_s = time.perf_counter()
        value = linear_cross_entropy(hidden, weight, targets, WAYS[options.way])
        gradients = torch.autograd.grad(value, [hidden, weight])
        del gradients
        loss = float(value.detach())
        if number:
            seconds.append(time.perf_counter() - begin_s)
    # the weight's gradient is there either way
    return {"seconds": seconds, "peak": host_peak_bytes() - before - weight.nbytes - hidden.nbytes, "loss": loss}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"vocab": 131_072, "tokens": 2048, "width": 1024, "threads": 2, "steps": 3, "rounds": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--way", choices=tuple(WAYS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(measure(options)))
        return
    results: dict[str, list[dict[str, object]]] = {way: [] for way in WAYS}
    for _ in range(options.rounds):
        for way, runs in results.items():
            command = [sys.executable, __file__, *sys.argv[1:], f"--way={way}"]
            runs.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    medians = {way: statistics.median(s for run in runs for s in run["seconds"]) for way, runs in results.items()}  # type: ignore[attr-defined]
    peaks = {way: max(int(str(run["peak"])) for run in runs) for way, runs in results.items()}
    for way, runs in results.items():
        print(
            f"{way:<8} {medians[way]:7.3f} s ({medians[way] / medians['plain']:.2f})  peak {peaks[way] / 1e6:7,.0f} MB "
            f"({peaks[way] / peaks['plain']:.2f})  loss {runs[0]['loss']:.6f}"
        )


if __name__ == "__main__":
    main()

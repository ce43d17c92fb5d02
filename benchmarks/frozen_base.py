#!/usr/bin/env python3
"""Time a step of LoRA on a frozen base, and measure the peak of its process: codes, bf16, and bitsandbytes with peft.

    benchmarks/frozen_base.py                        # zero with nf4, int8 and bf16, and bitsandbytes if it is installed
    benchmarks/frozen_base.py --offload infinity     # zero alone, with all state on a disk
    benchmarks/frozen_base.py --width 512 --layers 4 --rounds 1

The model is a Llama of transformers with an adapter of rank 16 on every linear layer but the head. A round runs every
system once, each in a new process. The figures are medians over rounds. `peak` is the process's peak of resident
memory, without the memory that it has after its imports.
"""

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

ZERO = {"zero nf4": "nf4", "zero int8": "int8", "zero bf16": "compute"}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", choices=[*ZERO, "bitsandbytes"], help="measure one system in this process")
    parser.add_argument("--offload", default="none")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--steps", type=int, default=4, help="measured steps, after two others")
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def model_of(options: argparse.Namespace) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=options.width,
        intermediate_size=options.width * 11 // 4,
        num_hidden_layers=options.layers,
        num_attention_heads=options.width // 64,
        num_key_value_heads=options.width // 64,
        vocab_size=16_384,
        max_position_embeddings=options.seq,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)


def adapted(model: Any) -> Any:
    import peft

    settings = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, settings, autocast_adapter_dtype=False)


def loss_of(model: Any, rows: Any) -> Any:
    import torch.nn.functional as F

    logits = model(input_ids=rows[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


def by_zero(options: argparse.Namespace, frozen: str) -> Any:
    """Return a function that makes one step of this library."""
    import torch

    import zero

    torch.manual_seed(0)
    with zero.empty():
        model = adapted(model_of(options))
    precision = zero.Precision("bf16", frozen=frozen)
    plan = zero.Plan(
        model,
        optimizer=zero.adamw(lr=1e-4, clip=1.0),
        precision=precision,
        offload=options.offload,
        world=zero.open_world(),
    )
    step = zero.make_step(plan, loss_of)
    held = [zero.init(plan, zero.open_store(plan))]

    def make(rows: Any) -> None:
        held[0], metrics = step(held[0], [rows])
        float(metrics.loss)
        held[0].runtime.finish_step()

    return make


def by_bitsandbytes(options: argparse.Namespace) -> Any:
    """Return a function that makes one step of bitsandbytes' `Linear4bit` with peft and torch's AdamW."""
    import bitsandbytes as bnb
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = model_of(options)
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, nn.Linear) and layer is not model.lm_head:
                coded = bnb.nn.Linear4bit(
                    layer.in_features, layer.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
                )
                coded.weight = bnb.nn.Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4")
                setattr(module, name, coded.to("cpu"))
    model = adapted(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)

    def make(rows: Any) -> None:
        loss_of(model, rows).backward()
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return make


def resident_bytes(key: str) -> int:
    """Return a size of this process: VmRSS, its resident memory, or VmHWM, the peak of it."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def measure(options: argparse.Namespace) -> dict[str, float]:
    import peft  # noqa: F401 - part of the memory before the model
    import torch
    import transformers  # noqa: F401

    import zero  # noqa: F401

    warnings.simplefilter("ignore")
    before = resident_bytes("VmRSS")
    system = options.system
    make = by_zero(options, ZERO[system]) if system in ZERO else by_bitsandbytes(options)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak of building the model
    times, rows = [], torch.randint(0, 16_384, (options.rows, options.seq + 1), generator=torch.manual_seed(1))
    for _ in range(2 + options.steps):
        begin_s = time.perf_counter()
        make(rows)
        times.append(time.perf_counter() - begin_s)
    return {"step_s": statistics.median(times[2:]), "peak": resident_bytes("VmHWM") - before}


def main() -> None:
    options = arguments()
    if options.system:
        print(json.dumps(measure(options)))
        return
    systems = list(ZERO)
    if options.offload == "none" and importlib.util.find_spec("bitsandbytes"):
        systems.append("bitsandbytes")
    results: dict[str, list[dict[str, float]]] = {system: [] for system in systems}
    for number in range(options.rounds):
        for system in systems:
            done = subprocess.run(
                [sys.executable, __file__, "--system", system, *sys.argv[1:]],
                capture_output=True,
                text=True,
                check=True,
            )
            results[system].append(json.loads(done.stdout.splitlines()[-1]))
            print(f"round {number}  {system:14} {results[system][-1]}", flush=True)
    for system, several in results.items():
        step_s, peak = (statistics.median(result[key] for result in several) for key in ("step_s", "peak"))
        print(f"{system:14} {step_s:8.3f} s a step, peak {peak / 2**20:7.0f} MiB")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""A Llama that transformers saved, trained here with its state in a file, and given back to transformers.

    benchmarks/llama.py                        # 300 million random weights, about 12 GB of disk for a while
    benchmarks/llama.py --offload infinity     # parameters and gradients in the file too: the least memory
    benchmarks/llama.py --small                # the same in seconds, to see how it goes

1. transformers makes the model and saves it in two files or more: config.json, safetensors, an index.
2. The model is built without memory; stage 3 takes its weights straight from the files, trains, saves, exports.
3. transformers loads the export: its logits are the same to the last bit.

Each part is a process of its own, so the peak of resident memory that the second one prints is that of training alone,
torch and transformers included. All is fp32: bf16 holds less.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

ROWS, TOKENS = 1, 128

SIZES = {
    False: {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 18, "num_attention_heads": 16},
    True: {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
}


def make(options: argparse.Namespace) -> None:
    """Write a folder as the owner of the model has it: config.json and safetensors in several files."""
    import torch
    import transformers

    torch.manual_seed(0)
    vocab = 256 if options.small else 32_000
    config = transformers.LlamaConfig(**SIZES[options.small], vocab_size=vocab, pad_token_id=None)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(options.folder / "given", max_shard_size="100KB" if options.small else "300MB")
    numel = sum(parameter.numel() for parameter in model.parameters())
    files = len(list((options.folder / "given").glob("*.safe*")))
    print(f"made by transformers: {numel:,} weights in {files} files")


def train(options: argparse.Namespace) -> None:
    """Train the weights of the folder, then export them to a folder for transformers."""
    import torch

    import zero
    from zero.platform.host_memory import host_peak_bytes
    from zero.formats import export_checkpoint, open_newest
    from zero.trainer.models import hf

    world = zero.open_world()
    model = hf.build(options.folder / "given")
    plan = zero.Plan(
        model,
        optimizer=zero.adamw(lr=3e-4, clip=1.0),
        world=world,
        stage=3,
        prefetch=0,  # one unit whole at a time, and its activations computed again: for memory, not for speed
        activations="remat",
        offload=zero.Offload(options.offload, path=str(options.folder)),
    )
    print(plan)
    with contextlib.closing(zero.open_store(plan)) as store:
        weights = hf.weights(model, options.folder / "given")
        print(weights)
        state = zero.init(plan, store, weights=weights)
        step = zero.make_step(plan, hf.loss)
        rows = rows_of(model.config.vocab_size)
        for _ in range(options.steps):
            state, metrics = step(state, [rows])
            print(f"step {state.step}  loss {metrics.loss:.4f}  norm {metrics.grad_norm:.4f}")
        torch.save(zero.make_forward(plan, hf.logits)(state, rows), options.folder / "logits.pt")
        path = zero.save(state, options.folder / "checkpoints")
    export_checkpoint(open_newest(path)[0], "hf", options.folder / "out")
    hf.write_settings(options.folder / "given", options.folder / "out")
    peak, whole = host_peak_bytes(), 16 * plan.numel
    (options.folder / "peak.json").write_text(json.dumps({"peak_bytes": peak, "state_bytes": whole}))
    share = "" if options.small else f", {peak / whole:.3f} of the {whole / 1e6:,.0f} MB that 16 bytes a weight are"
    print(f"peak of resident memory {peak / 1e6:,.0f} MB{share}")


def compare(options: argparse.Namespace) -> None:
    """Load the export with transformers and check that its logits equal those of training, bit by bit."""
    import torch
    import transformers

    model, report = transformers.LlamaForCausalLM.from_pretrained(options.folder / "out", output_loading_info=True)
    assert not any(report.values()), report
    with torch.no_grad():
        logits = model.eval()(input_ids=rows_of(model.config.vocab_size)).logits
    expected = torch.load(options.folder / "logits.pt", weights_only=True)
    assert torch.equal(logits, expected), f"logits differ by up to {(logits - expected).abs().max():g}"
    print(f"loaded by transformers: {logits.numel():,} logits are the same to the last bit")


def rows_of(vocab: int):
    import torch

    return torch.randint(vocab, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))


PARTS = {"make": make, "train": train, "compare": compare}


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="100,000 weights, and all in one process")
    parser.add_argument("--offload", default="nvme", choices=("none", "cpu", "nvme", "infinity"))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to work, and what to leave; by default nothing is left")
    parser.add_argument("--part", choices=PARTS, help="only this one, in --folder")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    options = arguments(words)
    if options.part:
        PARTS[options.part](options)
        return 0
    with contextlib.ExitStack() as stack:
        options.folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(dir=".")))
        options.folder.mkdir(exist_ok=True)
        for part, run in PARTS.items():
            began = time.monotonic()
            if options.small:
                run(options)
            elif failed := apart(part, options):
                return failed
            print(f"{part} took {time.monotonic() - began:.0f} s", flush=True)
        memory = json.loads((options.folder / "peak.json").read_text())
    if options.offload == "infinity" and not options.small and memory["peak_bytes"] * 4 >= memory["state_bytes"]:
        print("bench_llama: the peak is not below a quarter", file=sys.stderr)
        return 1
    return 0


def apart(part: str, options: argparse.Namespace) -> int:
    """Run a part in a process that returns freed memory at once, as train.py does with launch.malloc=lean."""
    from zero.trainer.launch import ProcessSettings, environment

    words = ["--part", part, "--offload", options.offload]
    words += ["--steps", str(options.steps), "--folder", str(options.folder)]
    env = os.environ | environment(1, ProcessSettings(options.folder, malloc="lean"))
    return subprocess.run([sys.executable, __file__, *words], env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

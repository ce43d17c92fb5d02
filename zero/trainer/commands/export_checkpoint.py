"""Export a checkpoint to a format of another library: full parameters and buffers, under all names of the model.

    scripts/export runs/2026-01-31/12-00-00 --to torch    # the newest valid checkpoint of a run, beside its checkpoints
    scripts/export runs/x/checkpoints/step-0000000020 --to torch --out model.pt
    scripts/export runs/x --to hf                         # for from_pretrained, of a run with model=hf
    scripts/export runs/x --to peft                       # the adapter of a run with model.lora.rank
    scripts/export runs/x --to dcp --out model-dcp --dtype bf16
    scripts/export runs/x --to hf --weights ema           # the moving average of the parameters, with optim.ema

hf     folder: model-00001-of-0000N.safetensors and model.safetensors.index.json. For a run with model=hf also the
       config and tokenizer of model.path, so that from_pretrained loads it. Of a run with model=gpt from_pretrained
       loads nothing, because transformers has no class for this model: config.json has the sizes for
       zero.trainer.models.GPTConfig
peft   folder: adapter_config.json and adapter_model.safetensors, for PeftModel.from_pretrained(base, folder)
torch  file: a state dict for torch.load(..., weights_only=True, mmap=True); tied weights share their memory
dcp    folder of torch.distributed.checkpoint

The checkpoint is compared with its hashes first. Writing hf and torch takes a few MiB of memory, dcp takes twice the
largest tensor. OUT appears only when it is complete.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

from zero.checkpoint import Checkpoint, shape_of
from zero.core.peft_names import BASE, plain_name
from zero.core.precision import DTYPES
from zero.core.setting_types import bytes_of
from zero.errors import ZeroError
from zero.formats import export_checkpoint, open_newest, progress_bar
from zero.formats.adapter import ADAPTER
from zero.formats.exports import EXPORT_FORMATS
from zero.platform.installed import as_called
from zero.trainer.models.hf_config import HFConfig, LoRAConfig
from zero.trainer.text_output import command_line

MEAN = "ema: the moving average of the parameters, of a run with optim.ema"


def size_in_bytes(text: str) -> int:
    """Return the bytes of a size such as 5GB, 1GiB or 1000000."""
    with contextlib.suppress(ValueError):
        if nbytes := bytes_of(text):
            return nbytes
    raise argparse.ArgumentTypeError(f"{text!r} is not a size. Write 5GB, 500MB or 1GiB.")


def arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = command_line("export", __doc__)
    parser.add_argument("checkpoint", type=Path, help="folder of a checkpoint, a run, or checkpoints")
    parser.add_argument(
        "--to", required=True, choices=EXPORT_FORMATS, help="the format; hf is for transformers only with model=hf"
    )
    parser.add_argument("--out", type=Path, help="new file or folder; default: exported-TO in the run")
    parser.add_argument("--weights", default="parameter", choices=("parameter", "ema"), help=MEAN)
    parser.add_argument(
        "--dtype", default="fp32", choices=list(DTYPES), help="dtype of parameters; buffers keep theirs"
    )
    parser.add_argument("--shard-size", default="5GB", type=size_in_bytes, help="largest size of a file of format hf")
    return parser.parse_args(words)


def output_beside(step: Path, to: str) -> Path:
    """Return the default of --out: exported-TO in the folder of the run, two levels above the checkpoint's folder."""
    return step.absolute().parent.parent / (f"exported-{to}" + ".pt" * (to == "torch"))


def settings_of_adapter(checkpoint: Checkpoint) -> Mapping[str, object]:
    """Return peft's settings of the adapter that a run of train.py trained; {} for other runs."""
    match checkpoint.facts.get("config"):
        case {"model": {"path": str(path), "lora": {"rank": int(rank)} as lora}} if rank:
            chosen = LoRAConfig(**lora)
            fused = [entry.name for entry in checkpoint.manifest.entries if len(shape_of(checkpoint, entry)) == 3]
            names = [plain_name(name, {ADAPTER}) for name in fused if BASE in name.split(".")]
            return chosen.of_peft(path, {*chain.from_iterable(chosen.matches(names).values())})
    return {}


def add_settings(config: object, out: Path) -> None:
    """Write the model's settings into `out`, for `from_pretrained` (model=hf) or for `GPTConfig` (model=gpt)."""
    match config:
        case {"model": {"name": "hf", "path": str(path)}}:
            from zero.trainer.models.hf import write_settings

            write_settings(HFConfig(path=path).files(), out)
        case {"model": {"name": "gpt", **sizes}}:
            settings = {"architectures": ["zero.trainer.models.GPT"], "model_type": "functional-zero-gpt", **sizes}
            (out / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
            print(
                "transformers has no class for this model. config.json has the sizes for zero.trainer.models.GPTConfig."
            )


def main(words: Sequence[str]) -> int:
    options = arguments(words)
    try:
        with progress_bar() as progress:
            checkpoint, rejected = open_newest(options.checkpoint, progress)
            for line in rejected:
                print(f"rejected {line}", file=sys.stderr)
            out = options.out or output_beside(checkpoint.folder, options.to)
            config = checkpoint.facts.get("config")
            adapter = settings_of_adapter(checkpoint)
            done = export_checkpoint(
                checkpoint,
                options.to,
                out,
                dtype=DTYPES[options.dtype],
                weights=options.weights,
                shard_bytes=options.shard_size,
                adapter=adapter,
                complete=partial(add_settings, config) if options.to == "hf" else lambda folder: None,
                progress=progress,
            )
        if options.to == "peft" and not adapter:
            print(f'adapter_config.json needs peft: model.peft_config["default"].save_pretrained({str(out)!r})')
    except ZeroError as error:
        print(as_called(str(error)), file=sys.stderr)
        return error.exit_code
    ties = "".join(f", {name} is tied to {owner}" for name, owner in done.ties.items())
    print(f"{checkpoint.folder} -> {out}: {done.tensors} tensors, {done.nbytes:,} bytes, {options.dtype}{ties}")
    if not checkpoint.manifest.finite:
        print("this checkpoint contains values that are not finite", file=sys.stderr)
    return 0

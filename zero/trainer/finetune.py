"""Fine-tune a model of transformers by a call: the same run as the command line, and its export.

folder = finetune(model="path/to/llama", data="chats.jsonl", output="mine", epochs=3)
model = transformers.AutoModelForCausalLM.from_pretrained(folder)
"""

import re
import subprocess
import sys
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from zero.errors import ConfigError, MachineError

RUN, EXPORTED = "run", "model"
"""Folders in the output: of the run, with its report, and of the trained model or adapter."""


def finetune(
    *,
    model: str | PathLike[str],
    data: str | PathLike[str] | Sequence[str | PathLike[str]],
    output: str | PathLike[str],
    recipe: str = "sft_full",
    **settings: Any,
) -> Path:
    """Train, and return the folder for `from_pretrained`, of transformers or with an adapter of peft.

    Args:
        model: a folder with a model of transformers and its tokenizer, or its name on Hugging Face's hub.
        data: a file or folder of chats, or of texts for the recipe `pretrain`, or its name on the hub; or a list.
        output: a new folder, for the run and the trained model.
        recipe: an experiment in conf/experiment: sft_full, sft_lora, sft_qlora, pretrain or long_context.
        settings: settings of train.py, with two underscores for a dot: `optim__lr=1e-5`, `launch__ranks=2`.

    Raises:
        ConfigError: `output` exists already, or the settings are wrong.
        MachineError: the run failed.
    """
    out = Path(output)
    if out.exists():
        raise ConfigError(f"output={out} exists. Give a new folder.")
    words = [f"{name.replace('__', '.')}={in_hydra(value)}" for name, value in settings.items()]
    where = f"model.path={in_hydra(model)}", f"data.path={in_hydra(data)}", f"hydra.run.dir={in_hydra(out / RUN)}"
    _zero_train(f"experiment={recipe}", *where, *words)
    adapts = "lora" in recipe or bool(settings.get("model__lora__rank"))
    _zero_train("export", str(out / RUN), "--to", "peft" if adapts else "hf", "--out", str(out / EXPORTED))
    return out / EXPORTED


def in_hydra(value: Any) -> str:
    """Return a value as Hydra's grammar reads it on a command line."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(in_hydra, value))}]"
    text = str(value)
    if re.fullmatch(r"[\w./:+-]+", text):
        return text
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _zero_train(*words: str) -> None:
    """Run a command in a process of its own, so that a notebook keeps its memory and its signals."""
    last = ""
    with subprocess.Popen([sys.executable, "-m", "zero", *words], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            print(line, end="", file=sys.stderr, flush=True)
            last = line.strip() or last
    if process.returncode:
        failure = ConfigError if process.returncode == 2 else MachineError
        raise failure(last or f"zero-train {' '.join(words)} ended with exit code {process.returncode}")

"""The command `zero-train`, or `python -m zero`: train.py with its conf/, and commands for a finished run.

zero-train steps=10                  trains
zero-train plan model=gpt_7b         the same as mode=plan model=gpt_7b
zero-train report runs/DATE/TIME     one of `COMMANDS`
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import get_args

from zero.trainer.commands import COMMANDS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, and return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _command(words) if words and words[0] in COMMANDS else _run(words)
    except KeyboardInterrupt:
        print("stopped by SIGINT", file=sys.stderr, flush=True)
        return 130


def _command(words: Sequence[str]) -> int:
    from zero.trainer.launch import signals_waiting
    from zero.trainer.text_output import for_a_reader

    with for_a_reader():
        with signals_waiting():  # some commands import torch
            command = import_module(f"zero.trainer.commands.{COMMANDS[words[0]]}")
        exit_code: int = command.main(words[1:])
    return exit_code


def _run(words: list[str]) -> int:
    from zero.trainer import cli
    from zero.trainer.config import Config

    first = words[0] if words else ""
    if first in get_args(Config.model_fields["mode"].annotation):
        words[0] = f"mode={first}"
    if first == "explain" and len(words) > 1 and "=" not in words[1]:
        words[1] = f"explain.key={words[1]}"
    return cli.main(words, _program().train)


def _program() -> ModuleType:
    # train.py: in a wheel it is `zero.application.train`, in a checkout the file beside the package
    if find_spec("zero.application"):
        return import_module("zero.application.train")
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    return import_module("train")


if __name__ == "__main__":
    sys.exit(main())

"""`python -m zero steps=10`: the command `zero-train`, which is train.py with its own conf/.

A first word that is a mode is that mode: `python -m zero plan model=gpt_7b` is `mode=plan model=gpt_7b`.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

from zero.trainer import cli
from zero.trainer.checks import RUNS_NOTHING


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what a command line says; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in (*RUNS_NOTHING, "train", "eval"):
        words[0] = f"mode={words[0]}"
    program = import_module("zero.application.train" if find_spec("zero.application") else "train")  # in a checkout
    return cli.main(words, program.train)


if __name__ == "__main__":
    sys.exit(main())

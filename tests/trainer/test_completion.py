"""Completion of a command line in a shell: `eval "$(zero-train -sc install=bash)"`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import LONG_S
from zero.__main__ import COMMANDS
from zero.trainer.compose import complete

ROOT = Path(__file__).resolve().parent.parent.parent
OFFLOADS = ["auto", "cpu", "infinity", "none", "nvme"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("zero-train zero.st", ["zero.stage="]),
        ("zero-train zero.stage=", [f"zero.stage={one}" for one in ("0", "1", "2", "3", "auto")]),
        ("zero-train zero.stage=3 zero.update=s", ["zero.update=serial"]),
        ("zero-train offload=", [f"offload={one}" for one in OFFLOADS]),
        ("zero-train plan offload=n", ["offload=none", "offload=nvme"]),  # after a mode
        ("zero-train -m zero.stage=0,1 optim.lr", ["optim.lr="]),
        ("python train.py model=hf model.pa", ["model.path="]),  # a key that only this option has
        ("zero-train explain zero.sta", ["zero.stage"]),
        ("zero-train ex", ["explain", "export", "experiment=", "explain."]),
        ("zero-train report ru", []),  # files, which the shell knows
        ("zero-train zero.units=[Blo", []),  # cannot be read yet
    ],
)
def test_what_a_word_may_become(line, words):
    assert complete(line) == words


def test_all_first_words_are_offered():
    assert {"train", "eval", "plan", "doctor", *COMMANDS, "zero.", "steps="} <= set(complete("zero-train "))


def test_bash_completes_with_what_the_program_prints(tmp_path):
    """As in a terminal: bash reads what is to be installed, and its function asks the program."""
    program = tmp_path / "zero-train"
    program.write_text(f"#!{sys.executable}\nimport sys\nfrom zero.__main__ import main\nsys.exit(main())\n")
    program.chmod(0o755)
    script = """
eval "$(zero-train -sc install=bash)"
complete -p zero-train
COMP_LINE="zero-train zero.st" COMP_CWORD=1
hydra_bash_completion
printf '%s\\n' "${COMPREPLY[@]}"
"""
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "--norc", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=LONG_S, check=True,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.stdout == "complete -o default -o nospace -F hydra_bash_completion zero-train\nzero.stage=\n"
    assert done.stderr == ""

"""Completion of a command line in bash, zsh and fish: `eval "$(zero-train -sc install=bash)"`."""

import os
import shutil
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


BASH = """
eval "$(zero-train -sc install=bash)"
COMP_LINE="zero-train zero.st" COMP_CWORD=1
hydra_bash_completion
printf '%s\\n' "${COMPREPLY[@]}"
"""
FISH = """
zero-train -sc install=fish | source
complete -C"zero-train zero.st"
"""
ZSH = """
zmodload zsh/zpty
zpty shell zsh -f
zpty -w shell 'PS1=; autoload -Uz compinit bashcompinit; compinit -u -D; bashcompinit'
zpty -w shell 'eval "$(zero-train -sc install=zsh)"'
zpty -w -n shell $'zero-train zero.st\\t'
zpty -r -m shell found '*zero.stage='
print zero.stage=
"""


@pytest.mark.parametrize(("shell", "script"), [("bash", BASH), ("fish", FISH), ("zsh", ZSH)])
def test_a_shell_completes_with_what_the_program_prints(shell, script, tmp_path):
    """As in a terminal: it reads what is to be installed, and that asks the program."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    program = tmp_path / "zero-train"
    program.write_text(f"#!{sys.executable}\nimport sys\nfrom zero.__main__ import main\nsys.exit(main())\n")
    program.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    done = subprocess.run(
        [shell, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=LONG_S, check=True,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "BASH_ENV": ""},
    )  # fmt: skip
    assert done.stdout.split() == ["zero.stage="]
    assert done.stderr == ""

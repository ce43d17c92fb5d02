"""Completion of a command line in bash, zsh and fish: `eval "$(zero-train -sc install=bash)"`."""

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import LONG_S

ROOT = Path(__file__).resolve().parent.parent.parent

BASH = """
eval "$(zero-train -sc install=bash)"
COMP_LINE="zero-train zero.st" COMP_CWORD=1
hydra_bash_completion
printf '%s\\n' "${COMPREPLY[@]}"
"""


def test_a_shell_completes_with_what_the_program_prints(tmp_path):
    """As in a terminal: it reads what is to be installed, and that asks the program."""
    program = tmp_path / "zero-train"
    program.write_text(f"#!{sys.executable}\nimport sys\nfrom zero.__main__ import main\nsys.exit(main())\n")
    program.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-c", BASH], cwd=tmp_path, capture_output=True, text=True, timeout=LONG_S, check=True,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "BASH_ENV": ""},
    )  # fmt: skip
    assert done.stdout.split() == ["zero.stage="]
    assert done.stderr == ""

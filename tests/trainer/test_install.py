"""What `pip install` brings: train.py and conf/ inside the wheel, run as a command outside the repository."""

import configparser
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.conftest import LONG_S

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("zero", "conf", "train.py", "pyproject.toml", "README.md", "LICENSE")


def python(code: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd, capture_output=True, text=True, timeout=LONG_S, check=False, env={**os.environ, **environment},
    )  # fmt: skip


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel holds."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    for part in PARTS:
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, source / part)
    built = python(f"from setuptools import build_meta; build_meta.build_wheel({str(folder)!r})", source)
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


@pytest.mark.process
def test_the_command_runs_outside_the_repository(installed: Path, tmp_path: Path) -> None:
    """With a rank in a process of its own, which finds the function by its name."""
    names = configparser.ConfigParser()
    names.read(next(installed.glob("*.dist-info")) / "entry_points.txt")
    module, _, name = names["console_scripts"]["zero-train"].partition(":")
    words = ["debug=tiny", "launch.max_restarts=1", "sample.tokens=0", "hydra.run.dir=run"]
    code = f"import sys; from {module} import {name}; sys.argv = ['zero-train', *{words}]; sys.exit({name}())"
    done = python(code, tmp_path, PYTHONPATH=str(installed))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "report.html").exists()
    code = f"import sys, {module}; sys.argv = ['zero-train', '--help']; sys.exit({module}.{name}())"
    shown = python(code, tmp_path, PYTHONPATH=str(installed)).stdout
    assert "  zero-train zero.stage=3 launch.ranks=2" in shown
    assert "train.py" not in shown


def test_the_options_in_the_wheel_are_those_of_the_repository(installed: Path) -> None:
    def texts(folder: Path) -> dict[str, str]:
        return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.yaml")}

    assert texts(installed / "zero" / "application" / "conf") == texts(ROOT / "conf")

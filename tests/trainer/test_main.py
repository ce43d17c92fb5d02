"""`zero-train` and `python -m zero`: a mode as a first word, and the commands for a finished run."""

import subprocess
import sys
from pathlib import Path

import pytest

import zero
from tests.conftest import LONG_S
from zero.__main__ import COMMANDS, main

ROOT = Path(__file__).resolve().parent.parent.parent


def test_a_mode_may_be_the_first_word(here, capsys):
    assert main(["plan", "debug=tiny", "data=synthetic"]) == 0
    assert "\nfits: zero.stage=" in capsys.readouterr().out
    assert main(["explain", "zero.stage"]) == 0
    assert "zero.stage" in capsys.readouterr().out
    assert main(["explain", "explain.key=offload"]) == 0


def test_the_version_is_ours(here, capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"zero {zero.__version__}, Hydra 1.")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", ["zero-train", "zero/__main__.py", "train.py"])
def test_each_command_says_how_it_is_used(command, name, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"/bin/{name}"])
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    typed = {"zero-train": "zero-train ", "zero/__main__.py": "python -m zero ", "train.py": "scripts/"}[name]
    assert told.startswith(f"usage: {typed}{command} ")
    assert f"\n{typed}{command} " in told.replace("\n    ", "\n"), "with an example"
    assert ("scripts/" in told) == (name == "train.py")


@pytest.mark.parametrize("words", [["--help"], ["mode=explain"]])
@pytest.mark.parametrize(("name", "typed"), [("zero-train", "zero-train"), ("zero/__main__.py", "python -m zero")])
def test_an_answer_has_the_commands_that_work_here_in_the_same_columns(words, name, typed, here, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py"])
    assert main(words) == 0
    before = capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [f"/bin/{name}"])
    assert main(words) == 0
    after = capsys.readouterr().out
    assert "train.py" not in after
    assert f"  {typed} " in after
    for line_before, line_after in zip(before.splitlines(), after.splitlines(), strict=True):
        assert (line_before == line_after) == ("python train.py" not in line_before)
        assert len(line_before) == len(line_after)


def test_a_run_is_trained_and_reported_by_the_module(here):
    def zero(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "zero", *words], cwd=here, capture_output=True, text=True, timeout=LONG_S, check=True
        )

    zero("debug=tiny", "data=synthetic", "hydra.run.dir=run")
    assert "    name: train\n" in (here / "run" / ".hydra" / "hydra.yaml").read_text(), "not of a file of ours"
    (here / "run" / "report.html").unlink()
    assert zero("report", "run").stdout == "run/report.html\n"
    assert (here / "run" / "report.html").exists()


@pytest.mark.parametrize("script", ["train.py", "scripts/sample", "benchmarks/step.py"])
def test_without_torch_the_line_to_type_is_said(script):
    """-S: without the packages that are installed."""
    command = [sys.executable, "-S", ROOT / script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, check=False)
    assert done.returncode == 1
    assert "has no torch: type `source .venv/bin/activate`" in done.stderr.splitlines()[-1]


PROGRAMS = [
    path
    for path in [ROOT / "train.py", *sorted((ROOT / "scripts").iterdir()), *sorted((ROOT / "benchmarks").iterdir())]
    if path.is_file()
]
PROGRAMS = [path for path in PROGRAMS if b"python3" in path.read_bytes()[:32]]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.name)
def test_without_torch_every_program_shows_its_help_or_that_line(program):
    command = [sys.executable, "-S", program, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, check=False)
    if done.returncode:
        assert "has no torch: type `source .venv/bin/activate`" in done.stderr.splitlines()[-1]
    else:
        assert "usage:" in done.stdout


@pytest.mark.parametrize(("imported", "package"), [("zero", "torch"), ("zero", "safetensors"), ("train", "hydra")])
def test_a_package_that_is_missing_alone_is_named(imported, package):
    code = f"import sys; sys.modules[{package!r}] = None; import {imported}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=LONG_S, check=False
    )
    said = done.stderr.splitlines()[-1]
    assert f"has no {package}: type `source .venv/bin/activate`" in said
    assert said.endswith("or `pip install -e .`")

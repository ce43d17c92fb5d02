"""The result of `pip install`: a wheel in an empty environment, and its commands outside the repository."""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import zero
from tests.conftest import LONG_S
from zero.platform import installed as installed_here

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("zero", "conf", "docs", "train.py", "pyproject.toml", "README.md", "LICENSE")
CHECKOUT = re.compile(r"(?<!zero/application/)\b(train\.py|scripts/\w+|docs/[\w-]+\.md)")
"""Commands and pages that only a checkout has."""


def a_persons_environment() -> dict[str, str]:
    """Nothing of these tests': with their PYTHONPATH pip would take the checkout for an installed zero."""
    return {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}


class Installed(NamedTuple):
    """An environment with the wheel.

    Attributes:
        wheel: the file that was installed.
        commands: its folder of commands.
        package: its `zero`.
        here: an empty folder outside it, which the commands share.
    """

    wheel: Path
    commands: Path
    package: Path
    here: Path

    def run(self, *words: str, exit_code: int = 0) -> str:
        """Return the output of a command, which advises nothing that only a checkout has."""
        done = subprocess.run(
            [self.commands / words[0], *words[1:]],
            cwd=self.here, env=a_persons_environment(), capture_output=True, text=True, timeout=LONG_S, check=False,
        )  # fmt: skip
        printed = done.stdout + done.stderr
        assert done.returncode == exit_code, printed
        assert not CHECKOUT.search(printed), printed
        return printed


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for part in PARTS:
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, source / part)
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(out)!r})"
    built = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True, timeout=LONG_S)
    assert built.returncode == 0, built.stderr
    (made,) = out.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Installed without a network. What zero needs is lent from these tests' own environment.

    A .pth file names the folder where that is, and the .pth files of that folder are not read, so an editable zero in
    it is not seen.
    """
    venv = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], timeout=LONG_S, check=True)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(venv)}))
    python = venv / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(pip, env=a_persons_environment(), timeout=LONG_S, check=True)
    lent = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (packages / "lent.pth").write_text("".join(f"{folder}\n" for folder in sorted(lent)))
    return Installed(wheel, venv / "bin", packages / "zero", tmp_path_factory.mktemp("here"))


def test_the_wheel_has_the_options_pages_and_types_of_the_repository(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    there = {name for name in names if not name.endswith(".py") and ".dist-info" not in name}
    data = [*(ROOT / "conf").rglob("*.yaml"), *(ROOT / "docs").glob("*.md")]
    assert there == {
        *(f"zero/application/{path.relative_to(ROOT)}" for path in data),
        "zero/py.typed",
        "zero/tracker/report/style.css",
        "zero/trainer/foreign_settings.yaml",
    }
    assert {f"zero/{path.relative_to(ROOT / 'zero')}" for path in (ROOT / "zero").rglob("*.py")} < set(names)


def test_python_finds_what_was_installed(installed: Installed) -> None:
    printed = installed.run("python", "-c", "import zero; print(zero.__file__, zero.__version__)").split()
    assert printed == [str(installed.package / "__init__.py"), zero.__version__]
    begun = installed.run("python", "-m", "zero", "--help")
    assert "  python -m zero zero.stage=3 launch.ranks=2" in begun
    page = re.search(r"^  (\S+/docs/config\.md) ", begun, re.MULTILINE)
    assert page is not None
    assert (installed.here / page[1]).is_file()


@pytest.mark.process
def test_what_is_done_with_a_run_is_done_outside_the_repository(installed: Installed) -> None:
    tiny = ("debug=tiny", "val.every=0", "sample.tokens=0")
    installed.run("zero-train", *tiny, "checkpoint.every=4", "hydra.run.dir=run")
    report = installed.here / "run" / "report.html"
    assert "zero-train debug=tiny " in report.read_text()
    assert not CHECKOUT.search(report.read_text())
    report.unlink()
    assert installed.run("zero-train", "report", "run") == "run/report.html\n"
    assert report.exists()
    assert "def main(" in installed.run("zero-train", "sample", "run", "def main(", "--tokens", "2")
    assert "15 tensors" in installed.run("zero-train", "export", "run", "--to", "torch", "--out", "model.pt")


def test_questions_are_answered(installed: Installed) -> None:
    planned = installed.run("zero-train", "plan", "debug=tiny", "plan.ranks=16", "plan.ranks_per_node=8")
    assert "  torchrun --nnodes 2 --nproc-per-node 8 -m zero debug=tiny" in planned
    assert " 0 bad," in installed.run("zero-train", "mode=doctor"), "what it needs is read from the wheel"
    assert "/docs/own-loop.md shows" in installed.run("zero-train", "dropout=0.1", exit_code=2)


def test_a_package_that_is_missing_there_is_named(installed: Installed) -> None:
    code = "import sys; sys.modules['hydra'] = None; sys.argv = ['zero-train']; from zero.__main__ import main; main()"
    said = installed.run("python", "-c", code, exit_code=1).splitlines()[-1]
    assert re.search(r"python has no hydra: type `\S+python -m pip install .*'hydra-core<1.5,>=1.3.4' ", said)
    assert "functional-zero" not in said


@pytest.mark.parametrize("extra", ["hf", "sweep", "tensorboard"])
def test_what_is_to_be_installed_is_the_checkout_or_packages_of_other_people(
    monkeypatch: pytest.MonkeyPatch, extra: str
) -> None:
    """An index could have another package of that name, which would otherwise be installed."""
    assert installed_here.install(extra) == f"pip install -e '.[{extra}]'"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [
        *project["dependencies"],
        *(f'{requirement}; extra == "{name}"' for name in extras for requirement in extras[name]),
    ]
    monkeypatch.setattr(installed_here, "_IN_WHEEL", True)
    monkeypatch.setattr(installed_here.metadata, "requires", lambda name: lines)
    monkeypatch.setattr(installed_here, "_is_installed", lambda name: name == "tokenizers")
    missing = [requirement for requirement in extras[extra] if requirement != "tokenizers"]
    assert shlex.split(installed_here.install(extra)) == ["pip", "install", *missing]
    assert shlex.split(installed_here.install()) == ["pip", "install", *project["dependencies"]]


def test_a_checkout_installs_itself_again_where_another_has_done_so(tmp_path: Path) -> None:
    """Two of them share an environment, whose pip only says what it was asked for."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        f'#!/bin/sh\n[ "$1" = scripts/install.py ] && echo "$PWD: $*" >>{tmp_path}/said || exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    for checkout in ("one", "other"):
        (tmp_path / checkout / "scripts").mkdir(parents=True)
        shutil.copy(ROOT / "pyproject.toml", tmp_path / checkout)
        shutil.copy(ROOT / "scripts" / "venv.sh", tmp_path / checkout / "scripts")

    def installs(checkout: str, extra: str) -> bool:
        (tmp_path / "said").write_text("")
        source = f"set -eu; extra={extra}; source {tmp_path}/{checkout}/scripts/venv.sh; command -v python"
        environment = a_persons_environment() | {"ZERO_VENV": str(tmp_path / "venv")}
        done = subprocess.run(["bash", "-c", source], env=environment, capture_output=True, text=True, timeout=LONG_S)
        assert done.stdout.strip() == str(python), done.stderr
        said = (tmp_path / "said").read_text()
        assert not said or said.startswith(f"{tmp_path / checkout}: ")
        assert not said or said.strip().endswith(f"install.py .[{extra}]" if extra else "install.py .")
        return bool(said)

    assert [installs("one", extra) for extra in ("", "", "test", "test", "")] == [True, False, True, False, False]
    assert [installs("other", extra) for extra in ("test", "")] == [True, False]
    assert [installs("one", extra) for extra in ("", "test", "")] == [True, True, False]


def installer() -> Any:
    spec = importlib.util.spec_from_file_location("installer", ROOT / "scripts" / "install.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LISTED = r"""
:env:.find-links='/env/wheels /env/more'
:env:.quiet='1'
freeze.timeout='10'
global.extra-index-url='file:///one\nfile:///two'
global.find-links='/global/wheels'
global.index-url='file:///main'
install.index-url='file:///install'
"""


def test_uv_looks_where_pip_would() -> None:
    settings = installer().pip_settings(LISTED.strip())
    assert installer().variables(settings, {"HOME": "/home"}) == {
        "HOME": "/home",
        "UV_DEFAULT_INDEX": "file:///install",
        "UV_FIND_LINKS": "/env/wheels,/env/more",
        "UV_HTTP_RETRIES": "1",
        "UV_INDEX": "file:///one file:///two",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }
    own = {"UV_DEFAULT_INDEX": "file:///own", "UV_INDEX_STRATEGY": "first-index"}
    assert own.items() <= installer().variables(settings, own).items(), "the user's own variables of uv stay"


def test_the_cpu_build_of_torch_is_tried_first_and_pip_last() -> None:
    last = [[*installer().PIP, "install", "--quiet", "-e", "."]]
    uv = ["/bin/uv", "pip", "install", "--quiet", "--python", sys.executable, "-e", "."]
    assert installer().commands(".", "/bin/uv", cpu=True)[-2:] == [uv, *last]
    assert [command[len(uv) :] for command in installer().commands(".", "/bin/uv", cpu=True)[:2]] == [
        ["--torch-backend", "cpu"],
        ["torch==2.13.0+cpu"],
    ]
    assert installer().commands(".", "/bin/uv", cpu=False) == [uv, *last]
    assert installer().commands(".", None, cpu=True) == last


def test_the_first_command_that_succeeds_installs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An index without a CPU build of torch is answered by the next command, and a failure of all by pip's message."""
    module, ran, working = installer(), [], {"torch==2.13.0+cpu"}

    def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if "config" not in command:
            ran.append(command[-1])
        return subprocess.CompletedProcess(command, int(command[-1] not in working | {"list"}), stdout="")

    monkeypatch.setattr(module.subprocess, "run", run)
    monkeypatch.setattr(module, "find_uv", lambda: "/bin/uv")
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    monkeypatch.setattr(module, "has_gpu", lambda: False)
    monkeypatch.delenv("UV_TORCH_BACKEND", raising=False)
    assert module.main(".") == 0
    assert ran == ["cpu", "torch==2.13.0+cpu"]
    ran.clear()
    working.clear()
    assert module.main(".") == 1
    assert ran == ["cpu", "torch==2.13.0+cpu", ".", "."]
    ran.clear()
    monkeypatch.setattr(module, "find_spec", lambda name: "an installed torch")
    assert module.main(".") == 1
    assert ran == [".", "."]


@pytest.mark.parametrize(
    ("written", "typed"),
    [
        ("the models of train.py have", "the models of zero-train have"),
        ("torchrun --nnodes 2 --nproc-per-node 8 train.py, see", "torchrun --nnodes 2 --nproc-per-node 8 -m zero, see"),
        ("scripts/export RUN", "zero-train export RUN"),
    ],
)  # fmt: skip
def test_a_text_names_what_can_be_typed(monkeypatch: pytest.MonkeyPatch, written: str, typed: str) -> None:
    assert installed_here.as_called(written) == written
    monkeypatch.setattr(sys, "argv", ["/bin/zero-train"])
    assert installed_here.as_called(written) == typed

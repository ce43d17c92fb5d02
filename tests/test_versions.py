"""The versions that CI tries, those that pyproject.toml admits, and those that the README names are the same."""

import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
WORKFLOW = ROOT / ".github" / "workflows" / "tests.yml"

pytestmark = pytest.mark.skipif(not WORKFLOW.exists(), reason="not a checkout")


@pytest.fixture
def project() -> Any:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture
def jobs() -> Any:
    return yaml.safe_load(WORKFLOW.read_text())["jobs"]


def bound(requirements: list[str], name: str) -> SpecifierSet:
    return next(requirement.specifier for requirement in map(Requirement, requirements) if requirement.name == name)


def oldest(versions: SpecifierSet) -> str:
    return next(specifier.version for specifier in versions if specifier.operator == ">=")


def test_the_matrix_has_the_oldest_of_each_and_nothing_that_is_refused(project, jobs):
    matrix = jobs["versions"]["strategy"]["matrix"]["include"]
    torches, pythons = ({row[name] for row in matrix} for name in ("torch", "python"))
    admitted = bound(project["dependencies"], "torch")
    assert all(version in admitted for version in torches)
    assert oldest(admitted) in {re.sub(r"\.\d+$", "", version) for version in torches}
    listed = {python for line in project["classifiers"] for python in re.findall(r"Python :: (\d\.\d+)", line)}
    assert pythons == listed
    assert all(version in SpecifierSet(project["requires-python"]) for version in pythons)
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert all((ROOT / command.split()[0]).exists() for command in commands)


def test_ci_tries_the_oldest_transformers(project, jobs):
    (command,) = (step["run"] for step in jobs["transformers"]["steps"] if "run" in step)
    tried = re.search(r"--transformers (\S+)", command).group(1)
    for extra in ("hf", "test"):
        assert Version(tried) == Version(oldest(bound(project["optional-dependencies"][extra], "transformers")))
    assert all((ROOT / path).exists() for path in re.findall(r"tests/\S+", command))


def test_the_readme_names_the_oldest(project):
    python, torch = oldest(SpecifierSet(project["requires-python"])), oldest(bound(project["dependencies"], "torch"))
    assert f"Python {python} or newer and torch {torch} or newer" in (ROOT / "README.md").read_text()


def test_a_python_that_is_not_there_is_told_how_to_get(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHON"} | {"PYENV_ROOT": str(tmp_path)}
    done = subprocess.run(
        [ROOT / "scripts" / "versions", "--python", "9.9"], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 1
    assert "no Python 9.9 found. Type: uv python install 9.9" in done.stderr

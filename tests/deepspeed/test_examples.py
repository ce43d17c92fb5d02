"""Scripts in the shape of DeepSpeed's users: one line is another, and the losses are those of a recording.

`golden/deepspeed/` holds what each printed under DeepSpeed 0.19.8 (torch 2.13, transformers 5.23, CPU, one rank,
2026-11-22), with `import deepspeed` in place of the marked line.
"""

import json
import os
import runpy
import subprocess
import sys
import tokenize
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.version import Version

import zero
from tests.conftest import LONG_S
from zero.checkpoint import open_checkpoint

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "examples/deepspeed").glob("*.py"))
CHANGE = "import zero.deepspeed as deepspeed  # the only change\n"
FOLDERS = {"bert": "--checkpoint_dir", "sft": "--output_dir"}
"""Scripts that make their config in Python, so that the stage is an option, as is the folder that they write; they
need transformers, whose import takes seconds."""
RUNS = [("bert", 3), ("cifar", 1), ("cifar", 3), ("gan", 0), ("gan", 3), ("sft", 0)]
"""Each script at a stage that shards parameters or does not; those of transformers once, because they take longest."""
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29731"}


def arguments(script: Path, stage: int, folder: Path) -> list[str]:
    """That `script` is run with at a stage."""
    if script.stem in FOLDERS:
        return ["--zero_stage", str(stage), FOLDERS[script.stem], str(folder / "made")]
    settings = json.loads(script.with_suffix(".json").read_text())
    settings["zero_optimization"]["stage"] = stage
    (folder / "ds_config.json").write_text(json.dumps(settings))
    return ["--deepspeed_config", str(folder / "ds_config.json")]


def told(script: Path, given: list[str], **variables: str) -> dict[str, list[float] | float]:
    ended = subprocess.run(
        [sys.executable, script, *given],
        capture_output=True, text=True, timeout=LONG_S, check=False, env={**os.environ, **variables},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    found: dict[str, list[float] | float] = json.loads(
        next(line for line in ended.stdout.splitlines() if line.startswith("{"))
    )
    return found


def recorded(script: Path) -> dict[str, list[float] | float]:
    found: dict[str, list[float] | float] = json.loads(
        (ROOT / "tests/deepspeed/golden/deepspeed" / f"{script.stem}.json").read_text()
    )
    return found


def close(found, wanted) -> None:
    assert found.keys() == wanted.keys()
    for key in wanted:
        assert found[key] == pytest.approx(wanted[key], abs=2e-5), key


@pytest.mark.parametrize(("name", "stage"), RUNS)
def test_a_script_with_one_line_changed_has_the_losses_of_deepspeed(name, stage, tmp_path):
    script = next(script for script in SCRIPTS if script.stem == name)
    if name in FOLDERS:
        transformers = pytest.importorskip("transformers")
        if name == "sft" and Version(transformers.__version__) < Version("5.19"):
            pytest.skip("older transformers give OPT's attention a mask, and then torch draws another dropout")
    assert script.read_text().count("import zero") == 1
    close(told(script, arguments(script, stage, tmp_path)), recorded(script))


def test_the_example_differs_in_one_word(here: Path, monkeypatch: pytest.MonkeyPatch):
    """Of `initialize.py`, with a config of one's own and a checkpoint that it saves."""
    script = ROOT / "examples/initialize.py"
    with tokenize.open(script) as file:
        words = [token.string for token in tokenize.generate_tokens(file.readline) if token.type == tokenize.NAME]
    assert words.count("zero") == 1
    config = (ROOT / "examples/ds_config.json").read_text().replace("/tmp", str(here))
    (here / "ds_config.json").write_text(config)
    arguments = ["--deepspeed_config", "ds_config.json", "--steps", "3", "--save", "kept"]
    monkeypatch.setattr("sys.argv", [str(script), *arguments])
    runpy.run_path(str(script), run_name="__main__")
    checkpoint = open_checkpoint(zero.World.from_env(), here / "kept" / "step-0000000003")
    assert checkpoint.facts["engine"]["client_state"] == {"steps": 3}


@pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="DeepSpeed is not installed; it comes with the extra [bench]"
)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda one: one.stem)
def test_the_recording_is_what_deepspeed_gives(script, tmp_path):
    source = script.read_text()
    assert source.count(CHANGE) == 1
    (tmp_path / script.name).write_text(source.replace(CHANGE, "import deepspeed\n"))
    variables = {**ALONE, "DS_ACCELERATOR": "cpu"}
    close(told(tmp_path / script.name, arguments(script, 1, tmp_path), **variables), recorded(script))

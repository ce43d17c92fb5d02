"""Scripts in the shape of DeepSpeed's users: one line is another, and the losses are those of a recording.

`golden/deepspeed/` holds what each printed under DeepSpeed 0.19.8 (torch 2.13, CPU, one rank, 2026-11-22), with `import
deepspeed` in place of the marked line.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted((ROOT / "scripts/examples/deepspeed").glob("*.py"))
CHANGE = "import zero as deepspeed  # the only change\n"
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29731"}


def told(script: Path, settings: Path, **variables: str) -> dict[str, list[float] | float]:
    ended = subprocess.run(
        [sys.executable, script, "--deepspeed_config", settings],
        capture_output=True, text=True, timeout=110, check=False, env={**os.environ, **variables},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    found: dict[str, list[float] | float] = json.loads(
        next(line for line in ended.stdout.splitlines() if line.startswith("{"))
    )
    return found


def recorded(script: Path) -> dict[str, list[float] | float]:
    found: dict[str, list[float] | float] = json.loads(
        (ROOT / "tests/golden/deepspeed" / f"{script.stem}.json").read_text()
    )
    return found


def close(found, wanted) -> None:
    assert found.keys() == wanted.keys()
    for key in wanted:
        assert found[key] == pytest.approx(wanted[key], abs=2e-5), key


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda one: one.stem)
def test_a_script_with_one_line_changed_has_the_losses_of_deepspeed(script, stage, tmp_path):
    assert script.read_text().count("import zero") == 1
    settings = json.loads(script.with_suffix(".json").read_text())
    settings["zero_optimization"]["stage"] = stage
    (tmp_path / "ds_config.json").write_text(json.dumps(settings))
    close(told(script, tmp_path / "ds_config.json"), recorded(script))


@pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="DeepSpeed is not installed; it comes with the extra [bench]"
)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda one: one.stem)
def test_the_recording_is_what_deepspeed_gives(script, tmp_path):
    source = script.read_text()
    assert source.count(CHANGE) == 1
    (tmp_path / script.name).write_text(source.replace(CHANGE, "import deepspeed\n"))
    variables = {**ALONE, "DS_ACCELERATOR": "cpu"}
    close(told(tmp_path / script.name, script.with_suffix(".json"), **variables), recorded(script))

"""Scripts in the shape of DeepSpeed's users: one line is another, and the losses are those of a recording.

`golden/deepspeed/` holds what each printed under DeepSpeed 0.19.8 (torch 2.13, transformers 5.23, CPU, one rank,
2026-11-22), with `import deepspeed` in place of the marked line.
"""

import json
import runpy
import tokenize
from pathlib import Path

import pytest
from packaging.version import Version

import zero
from zero.checkpoint import open_checkpoint

ROOT = Path(__file__).resolve().parents[2]
CHANGE = "import zero.deepspeed as deepspeed  # the only change\n"
FOLDERS = {"bert": "--checkpoint_dir", "sft": "--output_dir"}
"""Scripts of transformers, which make their config in Python: the stage is an option, as is the folder for files."""
RUNS = [("bert", 3), ("cifar", 1), ("gan", 0), ("gan", 3), ("sft", 0)]
"""Each script at a stage that shards parameters or does not."""


def run(script: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [str(script), *arguments])
    runpy.run_path(str(script), run_name="__main__")


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize(("name", "stage"), RUNS)
def test_a_script_with_one_line_changed_has_the_losses_of_deepspeed(name, stage, here, monkeypatch, capsys):
    script = ROOT / f"examples/deepspeed/{name}.py"
    source = script.read_text()
    assert source.count("import zero") == source.count(CHANGE) == 1
    if name in FOLDERS:
        transformers = pytest.importorskip("transformers")
        if name == "sft" and Version(transformers.__version__) < Version("5.19"):
            pytest.skip("older transformers give OPT's attention a mask, and then torch draws another dropout")
        arguments = ["--zero_stage", str(stage), FOLDERS[name], "made"]
    else:
        settings = json.loads(script.with_suffix(".json").read_text())
        settings["zero_optimization"]["stage"] = stage
        (here / "ds_config.json").write_text(json.dumps(settings))
        arguments = ["--deepspeed_config", "ds_config.json"]
    run(script, arguments, monkeypatch)
    printed = json.loads(next(line for line in capsys.readouterr().out.splitlines() if line.startswith("{")))
    recorded = json.loads((ROOT / f"tests/deepspeed/golden/deepspeed/{name}.json").read_text())
    assert printed.keys() == recorded.keys()
    for key, value in recorded.items():
        assert printed[key] == pytest.approx(value, abs=2e-5), key


def test_the_example_differs_in_one_word(here: Path, monkeypatch: pytest.MonkeyPatch):
    """Of `initialize.py`, with a config of one's own and a checkpoint that it saves."""
    script = ROOT / "examples/initialize.py"
    with tokenize.open(script) as file:
        words = [token.string for token in tokenize.generate_tokens(file.readline) if token.type == tokenize.NAME]
    assert words.count("zero") == 1
    config = (ROOT / "examples/ds_config.json").read_text().replace("/tmp", str(here))
    (here / "ds_config.json").write_text(config)
    run(script, ["--deepspeed_config", "ds_config.json", "--steps", "3", "--save", "kept"], monkeypatch)
    checkpoint = open_checkpoint(zero.open_world(), here / "kept" / "step-0000000003")
    assert checkpoint.facts["engine"]["client_state"] == {"steps": 3}

"""The README's Python runs as it stands."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"


def sources() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.S)


def ran(source: str, **names: object) -> dict[str, object]:
    exec(compile(source, "README.md", "exec"), names)
    return names


def test_the_loop_of_ones_own_runs(capsys):
    names = ran(sources()[0])
    printed = capsys.readouterr().out
    assert "gathered units" in printed
    assert "stage 3, 1 rank, bfloat16 compute" in printed
    assert names["metrics"].loss < 5  # it began at ln 256 = 5.5
    assert names["state"].step == 20
    assert set(names["weights"]) == {name for name, _ in names["model"].named_parameters()}


class Squares(nn.Linear):
    """Rows to a loss."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return super().forward(batch).square().mean()


def test_deepspeeds_loop_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "scripts" / "examples" / "ds_config.json", tmp_path)
    names = ran(sources()[1], model=Squares(4, 4), data=torch.ones(64, 4))
    assert names["engine"].global_steps == 4
    assert list((tmp_path / "checkpoints").iterdir())
    names["engine"].destroy()


def test_a_model_of_transformers_is_taken_from_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    given = transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, vocab_size=64, pad_token_id=None))
    monkeypatch.chdir(tmp_path)
    given.save_pretrained("path/to/llama")
    import zero

    source = sources()[2].replace("/mnt/nvme", str(tmp_path))
    names = ran(source, zero=zero, world=zero.World.from_env())
    for name, value in zero.full_state_dict(names["state"]).items():
        assert torch.equal(value, given.get_parameter(name).detach().float())
    names["store"].close()


def test_every_file_it_points_to_exists():
    for link in re.findall(r"\]\(([^)#:]+)\)", README.read_text()):
        assert (README.parent / link).exists(), link

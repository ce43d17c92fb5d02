"""The recipes of conf/experiment run on a tiny model, and their plans on real ones."""

import json
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
peft = pytest.importorskip("peft")

import train  # noqa: E402
from tests.trainer.test_chat import chats, model_folder  # noqa: E402
from zero.errors import ConfigError  # noqa: E402
from zero.trainer import finetune as finetune_module  # noqa: E402
from zero.trainer.commands import export_checkpoint  # noqa: E402
from zero.trainer.finetune import finetune  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks


@pytest.fixture
def folder(tmp_path) -> Path:
    """A model with weights and a tokenizer, chats, and texts."""
    folder = model_folder(tmp_path / "llama")
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder)).save_pretrained(
        folder
    )
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, chats(40))))
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("words and words\n" * 2000)
    return tmp_path


def words(folder: Path, recipe: str) -> list[str]:
    data = "texts" if recipe in ("pretrain", "long_context") else "chats.jsonl"
    return [f"experiment={recipe}", f"model.path={folder / 'llama'}", f"data.path={folder / data}"]


SMALL = ["model.seq=64", "batch.global=4", "val.rows=4", "checkpoint.every=100"]


@pytest.mark.parametrize("recipe", ["sft_full", "sft_lora", "sft_qlora", "pretrain", "long_context"])
def test_a_recipe_runs(recipe, folder, here, monkeypatch):
    """And its export loads."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    short = ["steps=4"] if recipe in ("pretrain", "long_context") else ["epochs=1"]
    ranks = ["launch.ranks=2"] if recipe == "long_context" else []
    assert train.main([*words(folder, recipe), *SMALL, *short, *ranks, "hydra.run.dir=run"]) == 0
    adapts = "lora" in recipe
    assert export_checkpoint.main(["run", "--to", "peft" if adapts else "hf", "--out", "out"]) == 0
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "llama" if adapts else "out")
    if adapts:
        peft.PeftModel.from_pretrained(base, "out")


def test_long_rows_take_packed_chats_too(folder, here, monkeypatch):
    """The second command of conf/experiment/long_context.yaml."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    chosen = ["experiment=long_context", f"model.path={folder / 'llama'}", "data=chat", "launch.ranks=2"]
    assert train.main([*chosen, f"data.path={folder / 'chats.jsonl'}", *SMALL, "steps=2", "hydra.run.dir=run"]) == 0
    assert "pack: true" in (here / "run" / "config.yaml").read_text()


def test_typed_steps_win_over_the_epochs_of_a_recipe(folder, here, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    assert train.main([*words(folder, "sft_full"), *SMALL, "steps=3", "hydra.run.dir=run"]) == 0
    assert json.loads((here / "run" / "summary.json").read_text())["steps"] == 3


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("recipe", "machine"),
    [("sft_lora", "plan.gpu='RTX 4090'"), ("sft_qlora", "plan.gpu='RTX 4090'"), ("sft_full", "plan.gpu=H100")],
)
def test_a_plan_says_what_a_real_model_takes(recipe, machine, folder, here, capsys):
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = transformers.LlamaConfig(vocab_size=8192, num_hidden_layers=8, max_position_embeddings=8192, **sizes)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder / "llama")
    (folder / "llama" / "generation_config.json").unlink()
    host = ["plan.host_memory=128GiB", "plan.disk=1TB"]
    assert train.main(["mode=plan", *words(folder, recipe), machine, *host]) == 0
    said = capsys.readouterr().out
    assert "\nfits: " in said
    assert "limits of the step: " in said


@pytest.mark.parametrize(
    "value", ["/d/chats (1).jsonl", "lr=1e-5", "it's", "a,b", "x{1}", "a b", "1e-5", "nvme", "\\'"]
)
def test_a_value_of_a_call_is_read_as_it_is(value):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    [override] = OverridesParser.create().parse_overrides([f"key={finetune_module.in_hydra(value)}"])
    assert str(override.value()).strip("'") == value.strip("'") or override.value() == float(value)
    assert not override.is_sweep_override()


def test_a_call_is_the_same_run_and_its_export(folder, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    how = {"model": folder / "llama", "data": folder / "chats.jsonl", "output": folder / "mine"}
    made = finetune(**how, epochs=1, model__seq=64, batch__global=4)
    trained = transformers.AutoModelForCausalLM.from_pretrained(made)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "llama")
    assert not torch.equal(trained.lm_head.weight, base.lm_head.weight)
    with pytest.raises(ConfigError, match="exists"):
        finetune(**how)

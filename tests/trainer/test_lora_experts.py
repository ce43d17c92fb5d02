"""Adapters of fused experts from train.py: `model.lora.targets` names them, and the export loads in peft."""

import json
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from tests.trainer.test_lora import SHARED, SIZES, command, loaded_by_peft, logits_of  # noqa: E402
from zero.__main__ import main as zero_train  # noqa: E402
from zero.formats import open_newest  # noqa: E402
from zero.trainer.models import hf  # noqa: E402
from zero.trainer.models.hf_config import LoRAConfig  # noqa: E402
from zero.trainer.models.lora import targets  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks

ROUTED = SIZES | {"num_experts_per_tok": 2, "head_dim": 8}
MADE = {
    "mixtral": ("MixtralForCausalLM", ROUTED | {"num_local_experts": 4}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", ROUTED | {"num_experts": 4, "moe_intermediate_size": 8}),
    "gpt_oss": (
        "GptOssForCausalLM",
        ROUTED | {"num_local_experts": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "glm4_moe": ("Glm4MoeForCausalLM", SHARED),
}
EVERY = ["model.layers.{}.mlp.experts.gate_up_proj", "model.layers.{}.mlp.experts.down_proj"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Family to the folder of a small model that transformers saved."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    root = tmp_path_factory.mktemp("base")
    for family, (architecture, sizes) in MADE.items():
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(family, **sizes)
        config.architectures = [architecture]
        model = getattr(transformers, architecture)(config)
        for parameter in model.parameters():
            parameter.data.normal_(0, 0.1)
        model.save_pretrained(root / family)
    return root


def names_in(folder):
    saved = json.loads((folder / "adapter_config.json").read_text())
    return saved["target_modules"], saved.get("target_parameters"), saved


@pytest.mark.parametrize("family", MADE)
@pytest.mark.parametrize("offload", ["none", "infinity"])
def test_experts_train_and_resume_and_peft_computes_the_same_logits(family, offload, base, here, capsys):
    words = ["model.lora.targets=[q_proj,mlp.experts.*]", "checkpoint.every=2", f"offload={offload}"]
    assert command(base / family, *words) == 0
    printed = capsys.readouterr()
    assert "warning" not in printed.out + printed.err
    whole = open_newest(Path("run"))[0]
    assert command(base / family, *words, "resume=run/checkpoints/step-0000000002", "hydra.run.dir=again") == 0
    assert open_newest(Path("again"))[0].manifest.entries == whole.manifest.entries
    assert zero_train(["export", "run", "--to", "peft", "--out", "adapter"]) == 0
    layers, parameters, _ = names_in(Path("adapter"))
    first = 1 if family == "glm4_moe" else 0  # whose first layer has no experts
    assert layers == [f"model.layers.{number}.self_attn.q_proj" for number in (0, 1)]
    assert sorted(parameters) == sorted(name.format(number) for name in EVERY for number in range(first, 2))
    tokens = torch.arange(8).view(1, 8)
    loaded = loaded_by_peft(base / family, "adapter")
    trained = [value for name, value in loaded.named_parameters() if "experts" in name and "lora_B" in name]
    assert all(value.any() for value in trained)
    assert len(trained) == 2 * (2 - first)
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=tokens, use_cache=False).logits, logits_of(whole, tokens))


def test_one_parameter_of_the_experts_is_adapted_and_named_in_the_export(base, here):
    assert command(base / "mixtral", "model.lora.targets=[experts.down_proj]", "checkpoint.every=4") == 0
    assert zero_train(["export", "run", "--to", "peft", "--out", "adapter"]) == 0
    assert names_in(Path("adapter"))[:2] == ([], [f"model.layers.{number}.mlp.experts.down_proj" for number in (0, 1)])
    with torch.no_grad():
        tokens = torch.arange(8).view(1, 8)
        logits = loaded_by_peft(base / "mixtral", "adapter")(input_ids=tokens, use_cache=False).logits
        assert torch.equal(logits, logits_of(open_newest(Path("run"))[0], tokens))


def test_an_adapter_of_rslora_has_the_scale_that_peft_reads(base, here):
    words = ["model.lora.targets=[q_proj,mlp.experts.*]", "model.lora.rslora=true", "checkpoint.every=4"]
    assert command(base / "mixtral", *words) == 0
    assert zero_train(["export", "run", "--to", "peft", "--out", "adapter"]) == 0
    assert names_in(Path("adapter"))[2]["use_rslora"] is True
    tokens, loaded = torch.arange(8).view(1, 8), loaded_by_peft(base / "mixtral", "adapter")
    assert {module.scaling["default"] for module in loaded.modules() if "lora_A" in module._modules} == {8 / 4**0.5}
    with torch.no_grad():
        logits = loaded(input_ids=tokens, use_cache=False).logits
    assert torch.equal(logits, logits_of(open_newest(Path("run"))[0], tokens))


@pytest.mark.parametrize("form", ["nf4", "int8"])
def test_experts_train_on_a_base_in_codes(form, base, here, capsys):
    words = ["model.lora.targets=[mlp.experts.*]", "precision=bf16", f"precision.frozen={form}", "checkpoint.every=4"]
    assert command(base / "mixtral", *words, "zero.stage=3") == 0
    assert command(base / "mixtral", *words, "zero.stage=0", "hydra.run.dir=other") == 0
    entries = [open_newest(Path(run))[0].manifest.entries for run in ("run", "other")]
    assert entries[0] == entries[1], "equal bits at every stage"
    assert any(entry.kind == form and "experts" in entry.name for entry in entries[0])


def test_targets_are_linear_layers_and_experts(base):
    model = hf.build(base / "gpt_oss")
    experts = [name.format(number) for number in (0, 1) for name in EVERY]
    assert targets(model, LoRAConfig(rank=4)).parameters == []
    assert targets(model, LoRAConfig(rank=4, targets=("experts.*",))) == ([], experts)
    chosen = targets(model, LoRAConfig(rank=4, targets=("layers.0.*", "down_proj")))
    assert chosen.parameters == [*experts[:2], experts[3]]
    assert chosen.layers == [f"model.layers.0.self_attn.{name}_proj" for name in "qkvo"]


def test_the_work_of_an_adapter_of_experts_is_that_of_the_chosen_ones(base):
    def flops(*names):
        model = hf.build(base / "mixtral")
        lora = peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=[*names])
        return hf.flops_per_token(peft.inject_adapter_in_model(lora, model), 8)

    adapter = 2 * 4 * (2 * 24 + 16 + 16 + 24)  # layers x rank x the sides of an expert's matrices
    assert flops("experts.gate_up_proj", "experts.down_proj") - flops() == pytest.approx(6 * 2 * adapter)


def test_an_adapter_without_a_model_of_transformers_is_one_line(here, capsys):
    import train

    assert train.main(["model.lora.rank=8", "steps=1"]) == 2
    assert capsys.readouterr().err.strip() == (
        "model.lora is a setting of model=hf only. Choose such an option, or leave it out."
    )

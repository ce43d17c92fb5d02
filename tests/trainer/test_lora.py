"""Adapters of low rank from train.py: the bits of torch and peft at every stage and tier, and a file for peft."""

import contextlib
import copy
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

import train  # noqa: E402
import zero  # noqa: E402
from zero.__main__ import main as zero_train  # noqa: E402
from zero.engine.whole.read import full_state_dict  # noqa: E402
from zero.errors import OutsideUnitError, PlanError  # noqa: E402
from zero.formats import export_checkpoint, open_newest  # noqa: E402
from zero.settings.build import build_plan  # noqa: E402
from zero.testing import run_ranks  # noqa: E402
from zero.trainer.config import read  # noqa: E402
from zero.trainer.data import open_data  # noqa: E402
from zero.trainer.models import hf  # noqa: E402
from zero.trainer.models.hf_config import LoRAConfig  # noqa: E402
from zero.trainer.models.lora import targets  # noqa: E402
from zero.trainer.run.task import build_task  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks

SIZES = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 1, "intermediate_size": 24, "max_position_embeddings": 32}
GPT2 = {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "bos_token_id": 0}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "eos_token_id": 0}
MADE = {
    "llama": ("LlamaForCausalLM", SIZES),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "mixtral": ("MixtralForCausalLM", SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
SHARED = SIZES | {"moe_intermediate_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
SHARED |= {"n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
STEPS, ROWS, SEQ = 4, 4, 8


@pytest.fixture(scope="module", autouse=True)
def _quiet():
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Family to the folder of a small model that transformers saved."""
    root = tmp_path_factory.mktemp("base")
    for family, (architecture, sizes) in (MADE | {"glm4_moe": ("Glm4MoeForCausalLM", SHARED)}).items():
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(family, **sizes)
        config.architectures = [architecture]
        getattr(transformers, architecture)(config).save_pretrained(root / family)
    return root


def settings(folder, *, stage=0, offload="none", **lora):
    return read(
        {
            "seed": 1,
            "steps": STEPS,
            "model": {
                "name": "hf",
                "path": str(folder),
                "seq": SEQ,
                "lora": {"rank": 4, **lora},
                "chunked_loss": False,
            },
            "data": {"name": "synthetic", "vocab": 32},
            "zero": {"stage": stage},
            "batch": {"global": ROWS},
            "optim": {"name": "adamw", "lr": 1e-2, "clip": 0.5},
            "schedule": {"name": "constant"},
            "offload": {"optimizer": offload, "path": str(folder), "page": "4KiB", "threads": 2}
            | ({"param": offload, "grad": offload} if stage == 3 else {}),
        }
    )


def trained(world, config):
    """First values, losses, and last values of what trains."""
    config = config.on(world.size)
    with world.exclusive():
        task = build_task(config)
    data, rows = open_data(config.source(), SEQ, config.seed), ROWS // world.size
    plan = build_plan(config, task.model, world)
    names = {name for name, parameter in task.model.named_parameters() if parameter.requires_grad}
    with contextlib.closing(zero.open_store(plan)) as store:
        state = zero.init(plan, store, seed=config.seed, weights=task.weights)
        began, step, losses = full_state_dict(state), zero.make_step(plan, task.loss), []
        for number in range(1, STEPS + 1):
            first = (number - 1) * ROWS + world.rank * rows
            batch = data.rows(first, first + rows)
            state, metrics = step(state, batch.split(config.batch.numbers()[1]))
            losses.append(metrics.loss)
        values = full_state_dict(state)
    assert all(torch.equal(values[name], began[name]) for name in values.keys() - names), "the base does not change"
    assert all("lora_" in name for name in names)
    return began, losses, {name: values[name] for name in names}


def same(first, second):
    """Whether two runs have equal losses and adapters, to the bit."""
    return first[1] == second[1] and all(torch.equal(first[2][name], value) for name, value in second[2].items())


TIERS = [(1, "none"), (2, "cpu"), (3, "none"), (3, "cpu"), (3, "nvme")]


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("family", MADE)
@pytest.mark.parametrize("ranks", [1, 2])
def test_losses_and_adapters_have_the_same_bits_at_every_stage_and_tier(family, ranks, base):
    first = run_ranks(ranks, trained, settings(base / family))[0]
    for stage, offload in TIERS if family == "llama" else TIERS[-1:]:
        other = run_ranks(ranks, trained, settings(base / family, stage=stage, offload=offload))[0]
        assert same(first, other), (stage, offload)


def test_first_values_of_an_adapter_are_the_same_on_any_number_of_ranks(base):
    on_one_rank, on_two_ranks = (run_ranks(ranks, trained, settings(base / "llama"))[0][0] for ranks in (1, 2))
    assert all(torch.equal(value, on_two_ranks[name]) for name, value in on_one_rank.items())
    of_an_a = [value for name, value in on_one_rank.items() if "lora_A" in name]
    assert all(value.any() for value in of_an_a)
    assert len({float(value[0, 0]) for value in of_an_a}) == len(of_an_a) == 14, "each layer draws its own"
    for value in of_an_a:  # peft draws uniformly from [-bound, bound]
        assert 0.8 < float(value.abs().max()) * value.shape[1] ** 0.5 <= 1
    assert not any(value.any() for name, value in on_one_rank.items() if "lora_B" in name)


@pytest.mark.parametrize("family", MADE)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
def test_losses_and_adapters_are_those_of_torch_and_peft(family, base):
    """On one rank to the bit, from the first values of our run."""
    config = settings(base / family, alpha=4.0)
    began, losses, adapter = run_ranks(1, trained, config)[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(base / family).train()
    head = model.get_output_embeddings()
    names = [name for name, module in model.named_modules() if type(module).__name__ in ("Linear", "Conv1D")]
    names = [name for name in names if model.get_submodule(name) is not head]
    peft.inject_adapter_in_model(peft.LoraConfig(r=4, lora_alpha=4, target_modules=names), model)
    trains = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trains.keys() == adapter.keys()
    for name, parameter in model.named_parameters():
        assert name in trains or torch.equal(parameter, began[name]), f"{name} of the files"
        parameter.data.copy_(began[name])
    optimizer = torch.optim.AdamW(trains.values(), lr=1e-2, weight_decay=0.01, fused=True)
    data = open_data(config.source(), SEQ, config.seed)
    for number in range(1, STEPS + 1):
        rows = data.rows((number - 1) * ROWS, number * ROWS)
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
        assert loss.item() == losses[number - 1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trains.values(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(value, trains[name]) for name, value in adapter.items())


# -- one command -------------------------------------------------------------------------------------------------------


def command(folder, *words):
    few = ["steps=4", "batch.global=2", "val.rows=2", "sample.tokens=0", "model.seq=8", "hydra.run.dir=run"]
    model = ["model=hf", f"model.path={folder}", "model.lora.rank=4", "data=synthetic", "data.vocab=32"]
    return train.main([*model, *few, *words])


def logits_of(checkpoint, tokens, **how):
    """Of train.py's model with the values of a checkpoint, in fp32."""
    config = read({**checkpoint.facts["config"], "mode": "eval", "resume": "x", "batch": {}, "offload": {}}).on(1)
    task, world = build_task(config), zero.open_world()
    plan = build_plan(config, task.model, world)
    with contextlib.closing(zero.open_store(plan)) as store:
        state = zero.load(zero.init(plan, store), checkpoint, moments=False, **how)
        return zero.make_forward(plan, task.logits)(state, tokens)


def loaded_by_peft(base, folder):
    """A model of peft that has been read from the files that an export wrote."""
    return peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), folder).eval()


@pytest.mark.parametrize("family", MADE)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")  # by peft, when it loads an adapter of GPT-2
def test_a_run_is_resumed_and_exported_and_peft_computes_the_same_logits(family, base, here, capsys):
    words = ["checkpoint.every=2", "optim.ema=0.5", "offload=infinity"]
    assert command(base / family, *words) == 0
    told = capsys.readouterr()
    assert "warning" not in told.out + told.err
    whole, _ = open_newest(Path("run"))
    assert command(base / family, *words, "resume=run/checkpoints/step-0000000002", "hydra.run.dir=again") == 0
    assert "settings that differ" not in capsys.readouterr().out
    again, _ = open_newest(Path("again"))
    assert again.manifest.entries == whole.manifest.entries, "a resumed run ends with the same bits"
    tokens = torch.arange(8).view(1, 8)
    for weights in ("parameter", "ema"):
        assert zero_train(["export", "run", "--to", "peft", "--out", weights, "--weights", weights]) == 0
        assert sorted(os.listdir(weights)) == ["adapter_config.json", "adapter_model.safetensors"]
        with torch.no_grad():
            logits = loaded_by_peft(base / family, weights)(input_ids=tokens, use_cache=False).logits
        assert torch.equal(logits, logits_of(whole, tokens, weights=weights))
    saved = json.loads(Path("parameter/adapter_config.json").read_text())
    assert (saved["r"], saved["lora_alpha"], saved["base_model_name_or_path"]) == (4, 8, str(base / family))
    merged = peft.AutoPeftModelForCausalLM.from_pretrained("ema").merge_and_unload()
    torch.testing.assert_close(merged(input_ids=tokens, use_cache=False).logits, logits)


def test_a_plan_counts_the_frozen_base_once_and_the_adapter_with_its_moments(base, here, capsys):
    assert (
        command(base / "llama", "mode=plan", "plan.all=true", "plan.gpu=H100", "precision=bf16", "model.lora.rank=64")
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    adapter = 64 * 2 * ((16 + 16) * 2 + (16 + 8) * 2 + (16 + 24) * 3)  # rank x layers x the sides of their matrices
    share = f"trains {adapter:,} of {4944 + adapter:,} parameters (85.7 %)"
    assert any(line.startswith(f"{share}, bf16") for line in lines), lines
    row = next(line.split() for line in lines if line.split()[:2] == ["device", "moments"])
    assert row[2:4] == [f"{adapter * 8 / 1024:.1f}", "KiB"], "of the adapter alone"


def test_a_run_says_how_many_parameters_train(base, here, capsys):
    assert command(base / "llama") == 0
    trained, total = 4 * 2 * 232, 4944 + 4 * 2 * 232
    assert f", trains {trained:,} of {total:,} parameters (27.3 %) in " in capsys.readouterr().out
    summary = json.loads(Path("run/summary.json").read_text())
    assert (summary["trainable_numel"], summary["parameters_numel"]) == (trained, total)
    assert f"trains {trained:,} of {total:,} parameters · " in Path("run/report.html").read_text()
    assert command(base / "llama", "model.lora.rank=0", "hydra.run.dir=whole") == 0
    assert ", 4,944 parameters in " in capsys.readouterr().out


def test_what_does_not_fit_an_adapter_is_one_line(base, here, capsys, monkeypatch):
    assert command(base / "llama", "model.lora.targets=[q_prj]") == 2
    assert "model.lora.targets: no layer or expert matches q_prj. Did you mean q_proj?" in capsys.readouterr().err
    assert command(base / "gpt2", "model.lora.targets=[lm_head]") == 2
    assert "model.lora.targets: lm_head is tied to transformer.wte.weight, so an adapter" in capsys.readouterr().err
    with pytest.warns(RuntimeWarning, match="(rank|alpha)_pattern"):  # peft's own, which are not suppressed
        assert command(base / "glm4_moe") == 2
    assert "peft would adapt the experts of Glm4MoeForCausalLM" in capsys.readouterr().err
    assert command(base / "glm4_moe", "model.lora.targets=[gate_proj]") == 2
    assert "model.lora.targets: Cannot convert PEFT target(s) gate_proj" in capsys.readouterr().err
    assert command("mamba") == 2
    assert "model.lora.targets: [PEFT:PeftType.LORA] Module 'out_proj' is incompatible" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "peft", None)
    assert command(base / "llama") == 2
    assert "model.lora needs peft, which is not installed. Type pip install" in capsys.readouterr().err


def test_attention_of_a_model_with_shared_experts_is_adapted(base, here):
    assert command(base / "glm4_moe", "model.lora.targets=[*attn.*]") == 0


def test_a_base_with_random_weights_is_planned_and_not_trained(base, here, capsys):
    (here / "bare").mkdir()
    shutil.copy(base / "llama" / "config.json", here / "bare")
    assert command("./bare") == 2
    assert "model.lora: model.path=./bare has no safetensors, so the frozen base" in capsys.readouterr().err
    assert command("./bare", "mode=plan", "plan.gpu=H100") == 0


def test_an_export_of_an_adapter_and_of_a_model_are_not_confused(base, here, capsys):
    assert command(base / "llama", "checkpoint.every=4") == 0
    assert zero_train(["export", "run", "--to", "hf"]) == 2
    assert "--to hf: this run trained an adapter. Write --to peft" in capsys.readouterr().err
    assert command(base / "llama", "model.lora.rank=0", "checkpoint.every=4", "hydra.run.dir=whole") == 0
    assert zero_train(["export", "whole", "--to", "peft"]) == 2
    assert "is trained, but is not part of peft's adapter 'default'. Choose --to hf" in capsys.readouterr().err
    assert not list(Path("whole").glob("exported*"))
    assert command(base / "llama", "model.lora.rank=8", "resume=run", "hydra.run.dir=other") == 4
    assert "was saved with another model. Add model.lora.rank=4" in capsys.readouterr().err


def test_an_export_needs_neither_the_base_nor_peft(base, here, monkeypatch):
    """Both files are made of the checkpoint alone."""
    shutil.copytree(base / "llama", "llama")
    assert command("./llama", "checkpoint.every=4", "model.lora.alpha=3", "model.lora.targets=[q_proj]") == 0
    shutil.rmtree("llama")
    monkeypatch.setitem(sys.modules, "peft", None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert zero_train(["export", "run", "--to", "peft"]) == 0
    assert json.loads(Path("run/exported-peft/adapter_config.json").read_text()) == {
        "base_model_name_or_path": "./llama",
        "inference_mode": True,
        "lora_alpha": 3.0,
        "peft_type": "LORA",
        "r": 4,
        "target_modules": [f"model.layers.{layer}.self_attn.q_proj" for layer in range(2)],
        "task_type": "CAUSAL_LM",
    }


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (("q_proj",), ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"]),
        (("layers.1.mlp.*_proj",), [f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")]),
        (("model.layers.0.self_attn.o_proj", "lm_head"), ["model.layers.0.self_attn.o_proj", "lm_head"]),
    ],
)
def test_targets_are_the_layers_whose_name_ends_as_the_pattern(patterns, expected, base):
    assert targets(hf.build(base / "llama"), LoRAConfig(rank=4, targets=patterns)) == (expected, [])


def test_without_targets_every_linear_layer_but_the_head_has_an_adapter(base):
    for family, count in (("llama", 14), ("gpt2", 8), ("mixtral", 8)):
        layers, experts = targets(hf.build(base / family), LoRAConfig(rank=4))
        assert (len(layers), experts) == (count, [])
        assert "lm_head" not in layers


def test_a_frozen_matrix_costs_two_thirds_of_the_operations(base):
    whole, adapted = (
        build_task(settings(base / "llama", **lora)).flops_per_token for lora in ({"rank": 0}, {"rank": 4})
    )
    model = hf.build(base / "llama")
    embedding, adapter = model.get_input_embeddings().weight.numel(), 4 * 2 * 232
    frozen = sum(parameter.numel() for parameter in model.parameters()) - embedding
    assert whole - adapted == pytest.approx(2 * frozen - 6 * adapter)


# -- models that the user wraps ----------------------------------------------------------------------------------------


def wrapped(model):
    torch.manual_seed(3)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
    return peft.get_peft_model(model, lora)


def beside_its_base(model, rows):
    """A loss that calls the base, without adapter, as preference optimisation does."""
    with torch.no_grad(), model.disable_adapter():
        reference = model(input_ids=rows).logits
    logits = model(input_ids=rows).logits
    away = F.kl_div(logits.log_softmax(-1), reference.log_softmax(-1), log_target=True, reduction="batchmean")
    return away + F.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())


@pytest.mark.parametrize(("stage", "offload"), [(0, "none"), (3, "none"), (3, "nvme")])
def test_modules_to_save_train_and_an_adapter_can_be_disabled_and_merged(stage, offload, base, tmp_path):
    folder, rows = base / "llama", torch.arange(16).view(2, 8)
    plain = wrapped(transformers.AutoModelForCausalLM.from_pretrained(folder))
    optimizer = torch.optim.AdamW((p for p in plain.parameters() if p.requires_grad), 1e-2, weight_decay=0, fused=True)
    expected = []
    for _ in range(STEPS):
        loss = beside_its_base(plain, rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())

    model = wrapped(hf.build(folder))
    where = zero.Offload(offload, path=str(tmp_path), page_bytes=4096)
    plan = zero.Plan(
        model, optimizer=zero.adamw(1e-2, weight_decay=0.0), stage=stage, world=zero.open_world(), offload=where
    )
    state = zero.init(plan, zero.open_store(plan), weights=hf.weights(model, folder))
    step, losses = zero.make_step(plan, beside_its_base), []
    for _ in range(STEPS):
        state, metrics = step(state, [rows])
        losses.append(metrics.loss)
    assert losses == expected
    logits = zero.make_forward(plan, lambda model: model(input_ids=rows).logits)(state)
    with pytest.raises(OutsideUnitError, match=r"was written to by add_.* or after state\.close\(\)\.$"):
        model.merge_adapter()

    checkpoint = open_newest(zero.save(state, tmp_path / "checkpoints"))[0]
    export_checkpoint(checkpoint, "peft", tmp_path / "adapter")
    model.peft_config["default"].save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        assert torch.equal(loaded_by_peft(folder, tmp_path / "adapter")(input_ids=rows).logits, logits)
        state.close()
        torch.testing.assert_close(model.merge_and_unload()(input_ids=rows).logits, logits)


def test_weights_that_lack_a_part_of_the_base_are_refused_with_an_adapter_too(base, tmp_path):
    """Only what peft has added may be new."""
    values = load_file(base / "llama" / "model.safetensors")
    values.pop("model.norm.weight")
    save_file(values, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((base / "llama" / "config.json").read_bytes())
    task = build_task(settings(tmp_path))
    plan = build_plan(settings(tmp_path), task.model, zero.open_world())
    lacks = pytest.raises(PlanError, match=r"weights have no model\.norm\.weight")
    with contextlib.closing(zero.open_store(plan)) as store, lacks:
        zero.init(plan, store, weights=task.weights)


GPT2_ADAPTER = {"r": 4, "target_modules": ["c_attn"], "fan_in_fan_out": True}


def wrapped_gpt2(model, **how):
    torch.manual_seed(3)
    return peft.get_peft_model(model, peft.LoraConfig(**GPT2_ADAPTER, **copy.deepcopy(how)))  # peft changes lists


@contextlib.contextmanager
def initialized(model, folder):
    """The state of a model with its first values: of the base from files."""
    plan = zero.Plan(model, optimizer=zero.adamw(1e-2), stage=3, world=zero.open_world())
    with contextlib.closing(zero.open_store(plan)) as store:
        yield zero.init(plan, store, weights=hf.weights(model, folder))


@pytest.mark.parametrize(
    "copies",
    [
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["wte"]},
        {"modules_to_save": ["lm_head"], "ensure_weight_tying": True},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings", "ignore:Model with `tie_word_embeddings")
def test_a_trained_copy_of_a_tied_layer_begins_with_the_values_of_the_files(copies, base):
    folder = base / "gpt2"
    expected = wrapped_gpt2(transformers.AutoModelForCausalLM.from_pretrained(folder), **copies).state_dict()
    with initialized(wrapped_gpt2(hf.build(folder), **copies), folder) as state:
        values = full_state_dict(state)
    assert any("modules_to_save" in name for name in values)
    assert all(torch.equal(value, expected[name]) for name, value in values.items())


def test_an_adapter_on_meta_is_made_only_if_its_values_were_recorded(base):
    folder = base / "gpt2"
    model = peft.get_peft_model(hf.build(folder), peft.LoraConfig(**GPT2_ADAPTER), low_cpu_mem_usage=True)
    unmade = pytest.raises(PlanError, match=r"lora_A\.default\.weight has no first values: .* of zero\.empty\(\)")
    with unmade, initialized(model, folder):
        pass
    with zero.empty():
        model = wrapped_gpt2(hf.build(folder))
    with initialized(model, folder) as state:
        values = full_state_dict(state)
    assert all(value.any() == ("lora_B" not in name) for name, value in values.items() if "lora_" in name)


@pytest.mark.parametrize("first", ["pissa", "olora"])
def test_an_adapter_that_is_computed_from_the_base_is_refused_where_the_base_comes_from_files(first, base):
    with zero.empty():
        model = peft.get_peft_model(hf.build(base / "llama"), peft.LoraConfig(r=2, init_lora_weights=first))
    refused = pytest.raises(PlanError, match=r"lora_A\.default\.weight was computed from a parameter whose value comes")
    with refused, initialized(model, base / "llama"):
        pass


@pytest.mark.parametrize("first", ["pissa", "pissa_niter_2", "olora"])
def test_an_adapter_that_is_computed_from_a_base_without_values_is_refused_by_peft_in_one_line(first, base):
    with pytest.raises(OutsideUnitError, match=r"no values yet.* Write init_lora_weights=True, or build the model"):
        peft.get_peft_model(hf.build(base / "llama"), peft.LoraConfig(r=2, init_lora_weights=first))


def test_adapters_of_any_name_begin_as_peft_made_them(base):
    folder, other = base / "gpt2", peft.LoraConfig(**GPT2_ADAPTER | {"r": 2, "target_modules": ["c_proj"]})
    expected, model = (
        peft.get_peft_model(built, peft.LoraConfig(**GPT2_ADAPTER), adapter_name="policy")
        for built in (transformers.AutoModelForCausalLM.from_pretrained(folder), hf.build(folder))
    )
    for each in (expected, model):
        each.add_adapter("reward", other)
    model.load_state_dict(
        {name: value for name, value in expected.state_dict().items() if "lora_" in name}, strict=False
    )
    wanted = expected.state_dict()
    with initialized(model, folder) as state:
        values = full_state_dict(state)
    assert {name.split(".")[-2] for name in values if "lora_" in name} == {"policy", "reward"}
    assert all(torch.equal(value, wanted[name]) for name, value in values.items())


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings", "ignore:Model with `tie_word_embeddings")
def test_an_export_has_frozen_factors_and_every_name_of_a_tied_copy(base, tmp_path, capsys):
    folder = base / "gpt2"
    model = wrapped_gpt2(hf.build(folder), modules_to_save=["lm_head"], ensure_weight_tying=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and "lora_A" not in name)
    with initialized(model, folder) as state:
        (tmp_path / "run").mkdir()
        zero.save(state, tmp_path / "run" / "checkpoints")
        checkpoint = open_newest(tmp_path / "run")[0]
    plain = wrapped_gpt2(
        transformers.AutoModelForCausalLM.from_pretrained(folder), modules_to_save=["lm_head"], ensure_weight_tying=True
    )
    expected = peft.get_peft_model_state_dict(plain)
    assert zero_train(["export", str(tmp_path / "run"), "--to", "peft"]) == 0
    assert 'adapter_config.json needs peft: model.peft_config["default"].save_pretrained' in capsys.readouterr().out
    written = load_file(tmp_path / "run/exported-peft/adapter_model.safetensors")
    assert written.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in written.items())
    assert zero_train(["export", str(tmp_path / "run"), "--to", "hf"]) == 2
    assert "--to hf: this run trained an adapter. Write --to peft" in capsys.readouterr().err
    with pytest.raises(TypeError):
        export_checkpoint(checkpoint, "peft", tmp_path / "out", adapter={"r": object()})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"], "nothing is left of an export that broke off"

"""TRL's trainers on an engine: next to TRL's own, with the same folder, rows and arguments."""

import json
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

os.environ.setdefault("HF_HUB_OFFLINE", "1")
trl = pytest.importorskip("trl")

import datasets  # noqa: E402
import transformers  # noqa: E402

import zero  # noqa: E402
from tests.trainer.test_chat import MARKED, assistant, model_folder, user  # noqa: E402
from zero.engine.meta import lacks_values  # noqa: E402
from zero.errors import ConfigError  # noqa: E402
from zero.integrations.transformers import ZeroTrainerMixin  # noqa: E402
from zero.integrations.trl import DPOTrainer, SFTTrainer  # noqa: E402
from zero.testing import run_processes  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
CLOSE, STEPS, BATCH, ACCUMULATE = 1e-6, 4, 2, 3
pytestmark = pytest.mark.filterwarnings("ignore")  # of TRL and transformers
NVME = {"stage": 3, "offload": "nvme"}


@pytest.fixture(autouse=True)
def _quiet(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    transformers.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()


def made_folder(folder: Any, *, tied: bool) -> Any:
    """A folder with a tiny Llama, its tokenizer and its template."""
    model_folder(folder, MARKED)
    config = transformers.AutoConfig.from_pretrained(folder)
    config.tie_word_embeddings = tied
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    model.generation_config.update(temperature=0.6, do_sample=True)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return made_folder(tmp_path_factory.mktemp("llama"), tied=False)


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return made_folder(tmp_path_factory.mktemp("tied"), tied=True)


def chats() -> datasets.Dataset:
    """Chats with answers of different lengths, so that microbatches differ in their numbers of tokens."""
    turns = [
        [user(f"{n} q"), assistant("so " * (1 + n % 5)), user("x"), assistant("y" * (n % 3 + 1))] for n in range(24)
    ]
    return datasets.Dataset.from_list([{"messages": messages} for messages in turns])


def pairs() -> datasets.Dataset:
    rows = [(user(f"{n} q"), assistant("so " * (1 + n % 5)), assistant("no" * (n % 3 + 1))) for n in range(24)]
    return datasets.Dataset.from_list(
        [{"prompt": [asked], "chosen": [good], "rejected": [bad]} for asked, good, bad in rows]
    )


def trained(kind: type, model: Any, folder: Any = "out", how: Any = (), config: Any = None, **keywords: Any) -> Any:
    """Steps of several microbatches, with clipping, a schedule and weight decay."""
    common = {"report_to": "none", "use_cpu": True, "bf16": False, "disable_tqdm": True, "logging_steps": 1}
    common |= {"max_steps": STEPS, "per_device_train_batch_size": BATCH, "gradient_accumulation_steps": ACCUMULATE}
    common |= {"learning_rate": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.5, "save_strategy": "no"}
    is_sft = issubclass(kind, trl.SFTTrainer)
    args = (config or (trl.SFTConfig if is_sft else trl.DPOConfig))(str(folder), **common | dict(how))
    keywords.setdefault("train_dataset", chats() if is_sft else pairs())
    made = kind(model if isinstance(model, torch.nn.Module) else str(model), args=args, **keywords)
    made.train()
    return made


def numbers(made: Any) -> dict[str, list[float]]:
    rows = [row for row in made.state.log_history if "loss" in row]
    keys = [key for key in rows[0] if key != "epoch"]
    return {key: [row[key] for row in rows] for key in keys}


def same_numbers(ours: Any, theirs: Any) -> None:
    """All that TRL logs: losses, norms, rates, accuracies, rewards."""
    mine, wanted = numbers(ours), numbers(theirs)
    assert mine.keys() == wanted.keys()
    assert len(mine["loss"]) == STEPS
    for key, values in wanted.items():
        assert mine[key] == pytest.approx(values, rel=CLOSE, abs=CLOSE), key


def lora() -> Any:
    peft = pytest.importorskip("peft")
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")


SFT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "chats": ({}, NVME),
    "tied": ({}, NVME),
    "assistant": ({"assistant_only_loss": True}, {"stage": 2, "offload": "cpu"}),
    "packed": ({"packing": True, "max_length": 200, "assistant_only_loss": True}, {"stage": 0}),
    "dft": ({"loss_type": "dft"}, {"stage": 3, "offload": "infinity"}),
    "no checkpointing": ({"gradient_checkpointing": False}, {"stage": 3, "activations": "remat"}),
}


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("name", SFT)
def test_sft_of_a_folder_learns_what_trl_learns(llama, tied, name):
    (how, settings), folder = SFT[name], tied if name == "tied" else llama
    theirs = trained(trl.SFTTrainer, folder, how=how)
    ours = trained(SFTTrainer, folder, how=how, zero=settings)
    same_numbers(ours, theirs)
    assert ours.engine.plan.facts.stage.parameters == (settings["stage"] == 3)
    for name, value in theirs.model.named_parameters():
        torch.testing.assert_close(zero.get_full(ours.engine, name), value.detach(), rtol=1e-5, atol=1e-4)


def test_a_step_weighs_tokens_of_all_microbatches_alike(llama):
    """Next to plain torch: one step on six chats, whatever their order."""
    six = chats().select(range(BATCH * ACCUMULATE))
    how = {"assistant_only_loss": True, "max_steps": 1, "lr_scheduler_type": "constant", "weight_decay": 0.0}
    made = trained(SFTTrainer, llama, how=how, zero=NVME, train_dataset=six)
    model, tokenizer = (
        kind.from_pretrained(llama) for kind in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer)
    )
    total, count = torch.zeros(()), 0
    for row in six:
        marked = tokenizer.apply_chat_template(row["messages"], return_dict=True, return_assistant_tokens_mask=True)
        tokens, trains = torch.tensor(marked["input_ids"]), torch.tensor(marked["assistant_masks"]).bool()
        logits = model(tokens[None]).logits[0, :-1]
        total = total + F.cross_entropy(logits[trains[1:]], tokens[1:][trains[1:]], reduction="sum")
        count += int(trains[1:].sum())
    (total / count).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0).step()
    assert numbers(made)["loss"] == pytest.approx([float(total / count)], rel=CLOSE)
    assert numbers(made)["grad_norm"] == pytest.approx([float(norm)], rel=CLOSE)
    for name, value in model.named_parameters():
        torch.testing.assert_close(zero.get_full(made.engine, name), value.detach(), rtol=1e-5, atol=1e-4)


def test_lora_of_a_folder_reads_the_base_into_shards(llama):
    theirs = trained(trl.SFTTrainer, llama, peft_config=lora())
    ours = trained(SFTTrainer, llama, peft_config=lora(), zero=NVME)
    same_numbers(ours, theirs)


def given(folder: Any) -> dict[str, Any]:
    """A policy and another model as its reference."""
    policy, reference = (transformers.AutoModelForCausalLM.from_pretrained(folder) for _ in range(2))
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(1.1)
    return {"model": policy, "ref_model": reference}


DPO: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "folder": ({}, NVME),
    "tied": ({}, NVME),
    "two losses": ({"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}, {"stage": 1}),
    "precomputed": ({"precompute_ref_log_probs": True}, {"stage": 3, "offload": "infinity"}),
    "lora": ({}, NVME),
    "lora precomputed": ({"precompute_ref_log_probs": True}, NVME),
    "given": ({}, NVME),
    "given precomputed": ({"precompute_ref_log_probs": True}, NVME),
}


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("name", DPO)
def test_dpo_learns_what_trl_learns(llama, tied, name):
    (how, settings), folder = DPO[name], tied if name == "tied" else llama

    def arguments() -> dict[str, Any]:
        model = given(folder) if "given" in name else {"model": folder}
        return model | ({"peft_config": lora()} if "lora" in name else {})

    theirs = trained(trl.DPOTrainer, how=how, **arguments())
    ours = trained(DPOTrainer, how=how, **arguments(), zero=settings)
    same_numbers(ours, theirs)
    assert numbers(ours)["rewards/margins"][-1] > 0
    has_reference = "lora" not in name and name != "precomputed"
    assert len(ours.frozen_engines) == has_reference
    for engine in ours.frozen_engines:
        assert not engine.plan.facts.trains
        assert engine.plan.facts.stage.parameters == (settings["stage"] == 3)


def test_a_reference_that_follows_the_policy_is_refused(llama):
    with pytest.raises(ConfigError, match=r"sync_ref_model=\.\.\.\): policy and reference are in shards"):
        trained(DPOTrainer, llama, how={"sync_ref_model": True})


def test_a_folder_takes_no_memory_until_training(llama, monkeypatch):
    """Nothing calls from_pretrained of the model, and evaluation may be first."""

    def refused(*args: Any, **keywords: Any) -> None:
        raise AssertionError("the whole model was loaded")

    monkeypatch.setattr(transformers.LlamaForCausalLM, "from_pretrained", refused)
    args = trl.DPOConfig("out", report_to="none", use_cpu=True, bf16=False, disable_tqdm=True, max_steps=1)
    made = DPOTrainer(str(llama), args=args, train_dataset=pairs(), eval_dataset=pairs().select(range(4)), zero=NVME)
    head = made.model.get_output_embeddings().weight
    assert head.untyped_storage().nbytes() == 4
    assert all(lacks_values(parameter) for parameter in made.model.parameters() if parameter is not head)
    assert made.evaluate()["eval_loss"] == pytest.approx(0.6931472, rel=CLOSE), "policy and reference are equal"


def test_the_three_lines_of_the_docs_fine_tune_a_folder(llama, tmp_path, monkeypatch):
    """TRL's defaults need a GPU, so the CPU and a few steps are added."""
    (block, _) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "trl.md").read_text(), flags=re.S)
    (tmp_path / "path/to").mkdir(parents=True)
    (tmp_path / "path/to/llama").symlink_to(llama)
    args = trl.SFTConfig(
        "out", use_cpu=True, bf16=True, report_to="none", max_steps=2, learning_rate=1e-2, logging_steps=1
    )
    monkeypatch.setattr("zero.integrations.trl.SFTTrainer", partial(SFTTrainer, args=args))
    names: dict[str, Any] = {"chats": chats()}
    exec(block, names)
    engine = names["trainer"].engine
    assert engine.plan.offload.optimizer == "nvme"
    assert engine.plan.precision.compute == torch.bfloat16
    assert engine.plan.facts.stage.parameters
    first, second = numbers(names["trainer"])["loss"]
    assert second < first


def reward(prompts: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Rewards of completions."""
    return [float(sum(tokens) % 7) for tokens in completion_ids]


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Reward": ({}, {}),
    "KTO": ({}, {}),
    "GRPO": ({"num_generations": 2, "max_completion_length": 6, "beta": 0.1}, {"reward_funcs": reward}),
}


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("name", OTHERS)
def test_other_trainers_with_the_mixin_learn_what_trls_learn(llama, name):
    """A reference is sharded."""
    kind, config = getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config")
    (how, keywords), data = OTHERS[name], pairs()
    if name != "Reward":
        rows = enumerate(zip(data["prompt"], data["chosen"], strict=True))
        records = [{"prompt": asked, "completion": good, "label": n % 2 == 0} for n, (asked, good) in rows]
        data = datasets.Dataset.from_list(records)
    keywords = {"how": how, "config": config, "train_dataset": data, **keywords}
    theirs = trained(kind, llama, **keywords)
    ours = trained(type(name, (ZeroTrainerMixin, kind), {}), llama, zero=NVME, **keywords)
    assert numbers(ours)["loss"] == pytest.approx(numbers(theirs)["loss"], rel=CLOSE, abs=CLOSE)
    assert numbers(ours)["grad_norm"] == pytest.approx(numbers(theirs)["grad_norm"], rel=CLOSE, abs=CLOSE)
    assert len(ours.frozen_engines) == (name != "Reward")


def test_arguments_of_loading_are_trls(llama):
    how = {"model_init_kwargs": {"dtype": "float32", "attn_implementation": "eager"}}
    theirs, ours = trained(trl.SFTTrainer, llama, how=how), trained(SFTTrainer, llama, how=how, zero=NVME)
    assert ours.model.config._attn_implementation == "eager"
    same_numbers(ours, theirs)


def test_a_saved_model_and_a_resumed_run_are_trls(llama, tmp_path):
    how = {"save_strategy": "steps", "save_steps": 2}
    theirs = trained(trl.SFTTrainer, llama, tmp_path / "theirs", how)
    ours = trained(SFTTrainer, llama, tmp_path / "ours", how, zero=NVME)
    for name in ("config.json", "generation_config.json"):
        written, wanted = (tmp_path / who / "checkpoint-4" / name for who in ("ours", "theirs"))
        assert json.loads(written.read_text()) == json.loads(wanted.read_text())
    files = {path.name for path in (tmp_path / "theirs/checkpoint-4").iterdir()}
    assert {path.name for path in (tmp_path / "ours/checkpoint-4").iterdir()} == files | {"zero"}
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours/checkpoint-4")
    for name, value in theirs.model.named_parameters():
        torch.testing.assert_close(saved.get_parameter(name).detach(), value.detach(), rtol=1e-5, atol=1e-4)
    args = ours.args
    again = SFTTrainer(str(llama), args=args, train_dataset=chats(), zero={"stage": 1})
    again.train(resume_from_checkpoint=str(tmp_path / "ours/checkpoint-2"))
    assert numbers(again)["loss"] == numbers(ours)["loss"]


# -- two processes -----------------------------------------------------------------------------------------------------


def on_two_ranks(world: zero.World, folder: Any, out: Any, kind: str) -> tuple[Any, Any]:
    os.chdir(out)
    runs = [
        trained(getattr(trl, kind), folder, how={"ddp_find_unused_parameters": False}),
        trained({"SFTTrainer": SFTTrainer, "DPOTrainer": DPOTrainer}[kind], folder, zero=NVME),
    ]
    return tuple(numbers(made) for made in runs)


@pytest.mark.slow(keep=1)
@pytest.mark.process
@pytest.mark.parametrize("kind", ["SFTTrainer", "DPOTrainer"])
def test_two_processes_learn_what_trl_learns_in_two(llama, kind, tmp_path):
    """Ranks have different numbers of tokens in a step."""
    for theirs, ours in run_processes(2, on_two_ranks, llama, tmp_path, kind):
        assert ours.keys() == theirs.keys()
        for key, values in theirs.items():
            assert ours[key] == pytest.approx(values, rel=CLOSE, abs=CLOSE), key

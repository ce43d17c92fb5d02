"""data=chat next to TRL's SFTTrainer: masks by the templates that TRL ships, and losses of packed and padded rows.

TRL has the templates of known models, and for each a copy with marks, which it trains by.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
trl = pytest.importorskip("trl")

import datasets  # noqa: E402
import transformers  # noqa: E402

import train  # noqa: E402
from tests.trainer.test_chat import CHATML, MARKED, assistant, chats, documents, model_folder, user  # noqa: E402
from zero.trainer.data import open_data  # noqa: E402
from zero.trainer.data.chat.encoder import ChatEncoder, Encoded  # noqa: E402
from zero.trainer.data.chat.formats import chat_of  # noqa: E402
from zero.trainer.data.records import Record  # noqa: E402
from zero.trainer.data.source import ChatConfig  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of TRL and transformers
STEPS, RATE, SEQ = 4, 1e-3, 512
TEMPLATES = Path(trl.__file__).parent / "chat_templates"
IMAGES = {"idefics3", "llava_next", "smolvlm", "diffusion_gemma"}
STOCK = sorted({path.stem.removesuffix("_training") for path in TEMPLATES.glob("*_training.jinja")} - IMAGES)
AROUND = re.compile(r"\s+|</?think>|<｜Assistant｜>|<\|start\|>assistant|<\|user\|>")
"""Texts around an answer that TRL's copies train and spans do not: they are of the prompt, or of the next turn."""

CHATS = [
    {"messages": [user("one"), assistant("two"), user("three"), assistant("four five")]},
    {"messages": [user("x"), assistant("y z")]},
]
PROMPTS = [
    {"prompt": "a b", "completion": " c d"},
    {"prompt": [user("a"), assistant("b"), user("c")], "completion": [assistant("d")]},
]


@pytest.fixture(scope="module", autouse=True)
def _quiet():
    transformers.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = model_folder(tmp_path_factory.mktemp("llama"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ends = ["<|eot_id|>", "<end_of_turn>", "<|end|>", "<|return|>", "<|END_OF_TURN_TOKEN|>", "<|eot|>", "<s>"]
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|user|>", "<think>", *ends]})
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.save_pretrained(folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    config.vocab_size, config.max_position_embeddings = len(tokenizer), SEQ
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def template_of(name: str, folder: Path) -> Path:
    """A file with a template of this file, or of TRL."""
    texts = {"chatml": CHATML, "marked": MARKED}
    path = folder / f"{name}.jinja"
    path.write_text(texts[name] if name in texts else (TEMPLATES / f"{name}.jinja").read_text())
    return path


def by_trl(llama: Path, template: Path, records: list[Any], **how: Any) -> list[tuple[list[int], list[bool]]]:
    """Tokens and masks as SFTTrainer prepares them."""
    model = transformers.AutoModelForCausalLM.from_pretrained(llama)
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama)
    tokenizer.chat_template = template.read_text()
    args = trl.SFTConfig(str(llama / "out"), use_cpu=True, bf16=False, report_to="none", max_length=None, **how)
    dataset = datasets.Dataset.from_list(records)
    made = trl.SFTTrainer(model, args=args, train_dataset=dataset, processing_class=tokenizer).train_dataset
    return [(row["input_ids"], [label != -100 for label in row["labels"]]) for row in made]


def by_zero(llama: Path, template: Path, records: list[Any]) -> list[Encoded]:
    end = transformers.AutoTokenizer.from_pretrained(llama).eos_token_id
    encoder = ChatEncoder(str(llama), str(template), end)
    read = [chat_of(Record(record, "here"))[1] for record in records]
    encoder.compare([(chat, "here") for chat in read])
    return [encoder.encode(chat, "here") for chat in read]


@pytest.mark.slow(keep=4, always=["marked", "deepseekv3_training", "qwen3_training"])
@pytest.mark.parametrize("name", ["marked", *(f"{name}_training" for name in STOCK)])
def test_masks_by_marks_are_those_of_trl(llama, name, tmp_path):
    template = template_of(name, tmp_path)
    theirs = by_trl(llama, template, CHATS, assistant_only_loss=True)
    assert all(any(trains) for _, trains in theirs)
    assert [encoded[:2] for encoded in by_zero(llama, template, CHATS)] == theirs


@pytest.mark.slow(keep=4, always=["qwen2_5", "llama3", "phi3", "deepseekv3"])
@pytest.mark.parametrize("name", STOCK)
def test_masks_without_marks_are_those_of_trls_marks_but_for_text_around_answers(llama, name, tmp_path):
    """Of a template that changes earlier turns the last turn trains, of any other all turns."""
    stock, tokenizer = template_of(name, tmp_path), transformers.AutoTokenizer.from_pretrained(llama)
    theirs = by_trl(llama, stock, CHATS, assistant_only_loss=True)
    for ours, (tokens, marks), record in zip(by_zero(llama, stock, CHATS), theirs, CHATS, strict=True):
        trained = tokenizer.decode([token for token, trains in zip(ours.tokens, ours.trains, strict=True) if trains])
        answers = [message["content"] for message in record["messages"] if message["role"] == "assistant"]
        assert answers[-1] in trained
        if ours.only_last:
            assert name == "gptoss" or "think" in stock.read_text()
        else:
            assert all(answer in trained for answer in answers)
        if ours.tokens == tokens:  # else TRL's copy keeps earlier thoughts
            assert all(marked for trains, marked in zip(ours.trains, marks, strict=True) if trains)
        if ours.tokens == tokens and not ours.only_last:
            pairs = zip(tokens, ours.trains, marks, strict=True)
            more = tokenizer.decode([token for token, trains, marked in pairs if marked and not trains])
            assert AROUND.sub("", more) == ""


@pytest.mark.parametrize("name", ["chatml", "marked"])
@pytest.mark.parametrize("record", PROMPTS, ids=["text", "chat"])
def test_completions_are_those_of_trl(llama, name, record, tmp_path):
    template, tokenizer = template_of(name, tmp_path), transformers.AutoTokenizer.from_pretrained(llama)
    ((their_tokens, their_trains),) = by_trl(llama, template, [record], completion_only_loss=True)
    ((tokens, trains, _),) = by_zero(llama, template, [record])
    assert tokens == their_tokens
    differ = [token for token, mine, marked in zip(tokens, trains, their_trains, strict=True) if mine != marked]
    assert tokenizer.decode(differ).strip() == "", "behind the token that ends a turn"


# -- losses ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", ["chatml", "marked"])
def test_losses_of_train_py_are_those_of_trl(llama, name, packed, tmp_path, monkeypatch):
    """All chats in each step, so that the order does not matter. TRL gets the template with marks in any case."""
    monkeypatch.chdir(tmp_path)
    records = [{"messages": record["messages"]} for record in chats(16) if len(record["messages"]) > 1]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, records)))
    data = {"path": "chats.jsonl", "cache": "cache", "template": str(template_of(name, tmp_path)), "holdout": 1e-9}
    opened = open_data(ChatConfig(**data, tokenizer=str(llama)), SEQ, 0)
    held = documents(opened.validation(0, opened.validation_rows))
    marked = template_of("marked", tmp_path)
    pairs = zip(records, by_trl(llama, marked, records, assistant_only_loss=True), strict=True)
    training = [record for record, (tokens, trains) in pairs if (*tokens, *trains) not in held]
    assert len(training) == len(records) - 1
    rows = 2 if packed else len(training)
    words = {"model": "hf", "model.path": llama, "model.seq": SEQ, "data": "chat", "data.pack": packed}
    words |= {f"data.{key}": value for key, value in data.items()} | {"batch.global": rows, "steps": STEPS}
    words |= {"optim.lr": RATE, "optim.weight_decay": 0.0, "schedule": "constant", "tracker.every": 1}
    words |= {"val.every": 0, "sample.tokens": 0, "hydra.run.dir": "run"}
    assert train.main([f"{key}={value}" for key, value in words.items()]) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["train/loss"] for line in lines]

    how = {"packing": True, "max_length": SEQ + 1} if packed else {"max_length": None}
    how |= {"assistant_only_loss": True, "per_device_train_batch_size": len(training), "max_steps": STEPS}
    how |= {"learning_rate": RATE, "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "logging_steps": 1}
    args = trl.SFTConfig(
        "out", use_cpu=True, bf16=False, report_to="none", save_strategy="no", disable_tqdm=True, **how
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama)
    tokenizer.chat_template = marked.read_text()
    model, dataset = transformers.AutoModelForCausalLM.from_pretrained(llama), datasets.Dataset.from_list(training)
    made = trl.SFTTrainer(model, args=args, train_dataset=dataset, processing_class=tokenizer)
    assert len(made.train_dataset) == rows
    made.train()
    assert losses == pytest.approx([row["loss"] for row in made.state.log_history if "loss" in row], rel=2e-6)
    assert losses[-1] < losses[0]

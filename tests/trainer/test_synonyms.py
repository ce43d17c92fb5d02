"""Other programs' words: each line of the table is typed, what it says is typed in its place, and that is accepted."""

import json
import re
import shlex
from functools import cache
from unittest.mock import patch

import pytest

import train
from zero.core import suggest
from zero.trainer import compose, job, replies
from zero.trainer.config import keys, kinds
from zero.trainer.explain import entries, options_with
from zero.trainer.synonyms import OUT, SYNONYMS

VALUES = {
    "optim.lr": "1e-3", "optim.weight_decay": "0.1", "optim.eps": "1e-6", "optim.ema": "0.99", "optim.momentum": "0.8",
    "optim.beta1": "0.9", "optim.beta2": "0.95", "optim.nesterov": "True", "optim": "AdamW", "schedule": "cosine",
    "precision": "bfloat16", "precision.matmul": "high", "launch.device": "gpu", "zero.stage": "2",
    "zero.compile": "true", "ds_config": "ds.json", "offload": "disk", "offload.optimizer": "cpu",
    "offload.param": "cpu", "offload.path": "disk", "model.vocab": "300", "model.tied": "True", "model": "org/other",
    "model.path": "weights", "model.rotary_base": "5e5", "model.init_std": "0.01", "data": "wikitext",
    "data.folder": "texts", "data.holdout": "0.1", "data.tokenizer": "weights", "checkpoint.dir": "saved",
    "checkpoint.async": "True", "resume": "texts", "hydra.run.dir": "out", "tracker": "wandb", "tracker.run": "a/first",
    "tracker.project": "mine", "tracker.tensorboard": "True", "tracker.tags": "[a,b]", "tracker.group": "ours",
    "tracker.mode": "offline", "tracker.entity": "us", "tracker.notes": "larger", "explain.key": "zero.stage",
    "data.path": "texts", "schedule.total": "400",
}  # fmt: skip
"""What somebody might type, by the key that it is for here; 8 for the others."""

FULL = {
    "model=*/*": "model=org/other", "model=/*": "model=/weights", "model=./*": "model=./weights",
    "model=../*": "model=../here/weights",
    "launch.device=gpu:*": "launch.device=gpu:0", "launch.device=cuda:*": "launch.device=cuda:0",
    "model=gpt2-*": "model=gpt2-xl", "launch.ranks=[[]*": "launch.ranks=[0,1]", "launch.ranks=0,*": "launch.ranks=0,1",
    "betas=*,*": "betas=[0.9,0.95]",
    "adam_betas=*,*": "adam_betas=0.9,0.95", "sample=*/*": "sample=runs/x",
    "train_file=*.bin": "train_file=train.bin", "train_data=*.bin": "train_data=train.bin",
    "data_path=*.bin": "data_path=train.bin", "data_path=*.jsonl": "data_path=texts.jsonl",
    "train_file=*.jsonl": "train_file=texts.jsonl", "train_file=*.json": "train_file=texts.json",
    "decay=[0-9.]*": "decay=0.1", "checkpoint=[0-9]*": "checkpoint=8", "device=[0-9]*": "device=0",
    "deepspeed=*.json": "deepspeed=ds.json", "ds=*.json": "ds=ds.json", "config=*.json": "config=ds.json",
}  # fmt: skip
"""Those whose words say what a value looks like."""


OTHERS_MODELS = ("/weights", "other", "../here/weights", "gpt2-xl")
"""Where a model is that is not here."""

PARTS = 4


def typed(line: str) -> str:
    """The line as somebody would type it."""
    if line in FULL or "*" not in line:
        return FULL.get(line, line)
    for word in SYNONYMS[line].type.split():
        key, _, value = word.partition("=")
        if "{" in value:
            example = "[0.9,0.95]" if value == "{first}" else VALUES.get(key, "8")
            return example.join(line.rsplit("*", 1)).replace("*", "")
    if line.endswith("=*"):
        return line.replace("*", "true")
    return line.replace("*", "x")


def filled(word: str) -> str:
    """With what the user was to fill in, and files that are here."""
    key, _, value = word.partition("=")
    if value in ("STEPS", "SHARE"):
        return f"{key}={'8' if value == 'STEPS' else '0.1'}"
    if value in ("FOLDER", "TEXTS"):
        return f"{key}={'texts' if value == 'TEXTS' or key == 'data.folder' else 'weights'}"
    return f"{key}=./weights" if key == "model.path" and value in OTHERS_MODELS else word


@pytest.fixture
def here(here):
    """A folder with texts, a model and other files that a command line may name."""
    for name in ("texts", "disk", "weights"):
        (here / name).mkdir()
    for number in range(40):
        (here / "texts" / f"{number}.txt").write_text(f"text {number} " * 100)
    vocab = {"<|endoftext|>": 0, "text": 1}
    tokenizer = {"version": "1.0", "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<|endoftext|>"}}
    (here / "weights" / "tokenizer.json").write_text(json.dumps({**tokenizer, "added_tokens": []}))
    (here / "weights" / "config.json").write_text('{"model_type": "llama"}')
    (here / "texts.jsonl").write_text('{"text": "one"}\n' * 40)
    (here / "texts.json").write_text('{"text": "one"}\n' * 40)
    (here / "train.bin").write_bytes(bytes(20_000))
    (here / "ds.json").write_text('{"train_batch_size": 8}')
    return here


@cache
def refusal_of(words: tuple[str, ...]) -> str:
    return compose.refusal_of([filled(word) for word in words])


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_line_is_followed_and_accepted(here, part):
    refused = {}
    refusal_of.cache_clear()
    for line in list(SYNONYMS)[part * len(SYNONYMS) // PARTS : (part + 1) * len(SYNONYMS) // PARTS]:
        reply = replies.reply([typed(line)])
        assert reply is not None, f"nothing is said to {typed(line)}"
        assert "\n" not in reply.sentence()
        if any(word.startswith("-") for word in reply.write):
            continue
        why = refusal_of(reply.write)
        if why and refusal_of((*reply.write, *reply.more)):
            refused[typed(line)] = reply.write, why
    assert not refused


def test_every_line_is_met():
    """None is behind another that is wider, and none takes a word that is ours."""
    for line in SYNONYMS:
        key, value = replies._key_and_value(typed(line))
        assert replies._line(key, value)[0] == line, f"{typed(line)} meets another line than {line}"
        assert not (line.endswith("=*") and key in keys()), f"{key} is a key of ours"


def test_one_letter_wrong_changes_no_answer():
    names = dict.fromkeys(line.removesuffix("=*") for line in SYNONYMS if line.endswith("=*"))
    for name in [name for name in names if len(name) > 8 and "." not in name]:
        half = len(name) // 2
        for wrong in (name[:half] + name[half + 1 :], name[:half] + name[half] + name[half:]):
            word = f"{wrong}=8"
            if not replies.is_known(word):
                assert replies.reply([word]) is None  # only what is refused is taken for another word
                assert replies.reply([word], misspelt=word).write == replies.reply([f"{name}=8"]).write, word


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("learning_rte=1e-3", "learning_rte is not a setting; type optim.lr=1e-3"),
        ("trainer.learning_rte=1e-3", "trainer.learning_rte is not a setting; type optim.lr=1e-3"),
        ("epochz=3 seed=1", "epochz: a run is counted in steps, not in passes over the data; type steps=1000"),
        ("learning_rte=fast", "learning_rte is not a setting; with optim.lr=fast in its place: optim.lr=fast: "),
        ("wandb_api_kee=s3cret", "wandb_api_kee: a key is no setting, "),
        ("weigth_decay=0.1", "unknown key weigth_decay; did you mean optim.weight_decay?"),  # ours come first
        ("+learning_rte=1e-3", "unknown key learning_rte; there are mode, resume, "),
        ("learning_rte=", "unknown key learning_rte; there are mode, resume, "),
    ],
)
def test_a_misspelt_word_is_answered_as_the_right_one(here, words, said, capsys):
    assert train.main(words.split()) == 2
    assert capsys.readouterr().err.startswith(said)


NONE = (
    "foo=3 trainer.foo=3 optim.foo=3 schedule.step_size=10 val.depth=3 val.epochs=1 checkpoint.best=true tracker.rank=3"
)
NONE += " checkpoint.name=foo tracker.interval=10 interval=10 delay=3 stable_steps=100 mem_limit=8 data.train=/x"
NONE += " tracker.key=abc zero.key=abc val.cpu=true sample.n=20 checkpoint.path=/nope"


@pytest.mark.parametrize("word", NONE.split())
def test_a_word_that_looks_like_none_is_answered_with_those_that_there_are(here, word, capsys):
    """With the keys of its section, if that is ours, or with sections."""
    section, _, _ = word.partition("=")[0].rpartition(".")
    assert train.main([word]) == 2
    said = capsys.readouterr().err
    there = f"{section}." if any(key.startswith(f"{section}.") for key in keys()) else "mode, resume, "
    assert said.startswith(f"unknown key {word.partition('=')[0]}; ")
    assert said.partition("; ")[2].startswith((f"there are {there}", f"did you mean {there}", "see mode=explain"))


def test_words_that_are_wrong_together_are_composed_a_few_times_each(here):
    words = ["zero.stge=3", "batch.micr=2", "checkpoint.evry=3", "data.sed=1", "val.evry=2", "model.widht=64"]
    with patch.object(compose, "compose", wraps=compose.compose) as composed:
        said = compose.refusal_of(words)
    assert said == "unknown key zero.stge; did you mean zero.stage?"
    assert composed.call_count <= 3 * len(words)


def test_a_group_of_ones_own_is_not_blamed_for_another_word(here, capsys):
    (here / "own" / "mine").mkdir(parents=True)
    (here / "own" / "mine" / "a.yaml").write_text("# @package _global_\nsteps: 3\n")
    words = [f"hydra.searchpath=[file://{here / 'own'}]", "+mine=a", "optim.lrr=1"]
    assert train.main(words) == 2
    assert capsys.readouterr().err == "unknown key optim.lrr; did you mean optim.lr?\n"


def test_what_is_left_out_says_why():
    assert all(to.why for to in SYNONYMS.values() if to.type == OUT)


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("value", ["its own", "abc"])
def test_a_guess_is_tried_with_the_value_before_it_is_made(here, value, capsys):
    """A key that lacks a letter is answered with one that takes the value, or with why that one does not."""
    made = 0
    for entry in entries()[::6]:
        key, section = entry.key, entry.key.rpartition(".")[0]
        own = key.removeprefix(f"{section}.")
        given = entry.example.split()[0].partition("=")[2] if value == "its own" else value
        word = f"{section}.{own[:1]}{own[2:]}={given}".removeprefix(".")
        if word.partition("=")[0] in keys() or replies.is_known(word):
            continue
        said = compose.refusal_of([word])
        if guess := re.search(r"did you mean ([\w.]+)(=\w+)?\?$", said):
            assert compose.refusal_of([guess[1] + (guess[2] or f"={given}")]) == "", said
            made += 1
        else:
            assert re.search(r"; with \S+ in its place: |; there are |; see mode=explain ", said), said
    assert made > 2 or value == "abc"


# Keys of an option that was not chosen

GROUPS = [name for name in sorted(compose.groups()) if len(kinds(name)) > 1]
MISPLACED = [
    (group, next(path.stem for path in sorted((compose.CONF / group).glob("*.yaml")) if path.stem not in having), entry)
    for group in GROUPS
    for entry in entries()
    if entry.group == group and entry.options
    for having in [options_with(entry.key, compose.CONF)]
]
"""Each with the first option that does not have it."""


@pytest.mark.parametrize("group", GROUPS)
def test_a_key_of_another_option_is_answered_with_what_to_type(here, group, capsys, monkeypatch):
    """And that is accepted, or lacks a file that the option needs and names."""
    monkeypatch.setattr(job, "run", lambda *args, **how: pytest.fail("the settings were accepted"))
    found = [(option, entry) for one, option, entry in MISPLACED if one == group]
    assert found
    for option, entry in found:
        word = next(one for one in entry.example.split() if one.startswith(f"{entry.key}="))
        assert train.main([f"{group}={option}", word]) == 2
        said = capsys.readouterr().err
        having = options_with(entry.key, compose.CONF)
        assert said.startswith(f"{entry.key} is a key of {group}={suggest.alternatives(having)} only; ")
        assert said.count("\n") == 1
        write, typed, needs = re.search(r"; (?:type (.*)|with (.*) in its place: (.*))$", said).groups()
        assert shlex.split(write or typed) == [f"{group}={having[0]}", word]
        if write:
            assert compose.refusal_of(shlex.split(write)) == ""
        else:
            assert needs == compose.refusal_of(shlex.split(typed))
            assert re.search(r" needs \w+\.\w+=| does not exist; | set \w+\.\w+=", needs)


def test_there_are_keys_of_other_options_in_every_group_that_has_kinds():
    assert GROUPS == ["data", "model", "optim", "schedule", "tracker"]
    assert len(MISPLACED) > 40


def test_a_key_that_no_option_has_with_the_others_is_to_be_left_out(here):
    needs = [f"model.path={here / 'weights'}", "model.width=8"]
    assert compose.refusal_of(["model=hf", *needs]).endswith("gpt_7b only; leave it out")
    assert compose.refusal_of(["tracker.project=x", "optim=sgd", "optim.beta1=0.8", "optim.beta2=0.9"]).endswith(
        "with tracker=wandb tracker.project=x in its place: optim.beta1 is a key of optim=adamw, adam or lion only; "
        "type optim=adamw optim.beta1=0.8 optim.beta2=0.9"
    )


def test_types_of_transformers_exist():
    configuration_auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    fresh = [line.partition("=")[2] for line, to in SYNONYMS.items() if to.type == "model=hf model.path={lower}"]
    assert len(fresh) > 10
    assert set(fresh) <= set(configuration_auto.CONFIG_MAPPING_NAMES)


SAID = [
    (["lr=1e-3", "steps=1"], "unknown key lr; type optim.lr=1e-3"),
    (["fp16=false"], "unknown key fp16: it is off unless it is asked for; leave it out"),
    (["zero.stage", "3"], "zero.stage 3: a setting is written key=value; type zero.stage=3"),
    (["explain", "zero.stage"], "type mode=explain explain.key=zero.stage"),
    (["mode=explain", "zero.stage"], "what is to be explained is explain.key; type explain.key=zero.stage"),
    (["explain", "learning_rate"], "type mode=explain explain.key=optim.lr"),
    (["-m", "lr=1e-3,1e-4"], "unknown key lr; type optim.lr=1e-3,1e-4"),
    (["lr=fast"], "unknown key lr; with optim.lr=fast in its place: optim.lr=fast: must be a number"),
    (["lr=1", "optim.lr=1"], "unknown key lr; leave it out"),
    (["wandb=true", "wandb_project=x"], "; type tracker=wandb tracker.project=x"),
    (["tracker=wandb", "tags=[a,b]"], "unknown key tags; type tracker.tags=[a,b]"),
    (
        ["micro_batch_size=8", "gradient_accumulation_steps=3"],
        "type batch.micro=8 batch.global=auto batch.accumulate=3",
    ),
    (["gradient_accumulation_steps=3"], "type batch.accumulate=3 batch.global=auto batch.micro=4"),
    (["n_embd=768", "n_head=12"], "type model.width=768 model.heads=12"),
    (["dim=74"], "type model.width=74 model.heads=1"),
    (["--lr", "2e-5", "--bf16", "--max-steps=9"], "written without dashes; unknown key lr; "),
    (["--lr", "2e-5", "--bf16", "--max-steps=9"], "; type optim.lr=2e-5 precision=bf16 steps=9"),
    (["trainer.max_steps=3", "+optimizer.lr=1"], "type steps=3 optim.lr=1"),
    (
        ["optimizer=Muon"],
        "there is no such optimizer here; there are adagrad, adam, adamw, lion, sgd; type optim=adamw",
    ),
    (["model=org/name-1B"], "so first: hf download org/name-1B --local-dir name-1B; type model=hf model.path=name-1B"),
    (["lr=1", "zero.stge=3"], "unknown key lr; with optim.lr=1 in its place: unknown key zero.stge; did you mean"),
    (["mode=explain", "explain.key=learning_rate"], "is not a key or a section; did you mean optim.lr?"),
    (["sharding_strategy=HYBRID_SHARD"], "unknown key sharding_strategy; type zero.stage=3 zero.shard=node"),
    (["hybrid_shard=true"], "; type zero.stage=3 zero.shard=node"),
    (["zero3=true"], "unknown key zero3; type zero.stage=3"),
    (["zero.stage3=true"], "unknown key zero.stage3; type zero.stage=3"),
    (["clip=0"], "type optim.clip=null"),
    (["num_gpus=all"], "type launch.ranks=auto"),
    (["gpus=2,3"], "; with launch.ranks=2,3 in its place: launch.ranks=2,3 is a list of runs; add -m"),
    (["-m", "gpus=2,3"], "unknown key gpus; type launch.ranks=2,3"),
    (["gpus=0,1"], "CUDA_VISIBLE_DEVICES=0,1 chooses among GPUs; type launch.ranks=2"),
    (["devices=[0, 1]"], "CUDA_VISIBLE_DEVICES=0,1 chooses among GPUs; type launch.ranks=2"),
    (["launch.nodes=2"], "torchrun --nnodes 2"),
    (["launch.port=29500"], "torchrun --rdzv-endpoint"),
    (["warmup=0.1"], "the warm-up is a number of steps, 0.1 x steps; type schedule.warmup=STEPS"),
    (["warmup=0.1", "steps=2000"], "type schedule.warmup=200"),
    (["warmup_ratio=0.03", "max_steps=1000"], "type schedule.warmup=30 steps=1000"),
    (["betas=[0.9]"], "optim.beta2 has a default; type optim.beta1=0.9"),
    (["tracker=tensorboard", "tracker.tags=[x]"], "; type tracker=wandb tracker.tensorboard=true tracker.tags=[x]"),
    (["version"], "type --version"),
    (["report", "runs/x"], "scripts/report runs/DATE/TIME"),
    (["sample", "runs/x"], "scripts/sample runs/DATE/TIME"),
    (["export"], "scripts/export runs/DATE/TIME"),
    (["model=llama3"], "hf download ORG/NAME --local-dir FOLDER"),
    (["model=gpt2-xl"], "hf download gpt2-xl --local-dir gpt2-xl; type model=hf model.path=gpt2-xl"),
    (["model=bert-base-uncased"], "train.py trains models that see earlier tokens only"),
    (["output_dir=my out"], "unknown key output_dir; type 'hydra.run.dir=my out'"),
    (["run_name=first run"], "hydra.run.dir=runs/first run'; type tracker=wandb 'tracker.run=first run'"),
    (["tracker.run=first run"], "; type tracker=wandb 'tracker.run=first run'"),
    (["--tracker.run", "first run"], "; with 'tracker.run=first run' in its place: "),
    (["tags=[a b, c]"], "; type tracker=wandb 'tracker.tags=[a b,c]'"),
]


@pytest.mark.parametrize(("arguments", "said"), SAID, ids=lambda value: " ".join(value) if type(value) is list else "")
def test_the_answer_is_one_line_with_what_to_type(here, arguments, said, capsys, monkeypatch):
    monkeypatch.setattr(job, "run", lambda *args, **how: pytest.fail("the settings were accepted"))
    assert train.main(arguments) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.err.count("\n") == 1
    assert not re.search(r"leave it out; leave it out|  ", printed.err)
    assert printed.out == ""
    typed = re.search(r"; type (.*)$", printed.err)
    if typed and len(arguments) == 1 and not re.search(r"=STEPS|model\.path=|^-", typed[1]):
        assert compose.refusal_of(shlex.split(typed[1])) == ""

"""Sources of data: files of every format, lists, caches of the hub, mixed sources, validation from elsewhere."""

import csv
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

os.environ.setdefault("HF_HUB_OFFLINE", "1")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")

import train  # noqa: E402
from tests.trainer.test_chat import SEQ, chats, model_folder, rows_of, run  # noqa: E402
from zero.errors import ConfigError  # noqa: E402
from zero.trainer import hub  # noqa: E402
from zero.trainer.checks import notes_on  # noqa: E402
from zero.trainer.config import read  # noqa: E402
from zero.trainer.data import check_data, open_data  # noqa: E402
from zero.trainer.data.mixed import Proportion  # noqa: E402
from zero.trainer.data.source import ChatConfig, HFTextConfig, TextConfig  # noqa: E402


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


TEXTS = [{"text": f"line {n},\n\"quoted\" and 'é'\tof {n * 7 % 11}", "number": n} for n in range(60)]


def write(folder: Path, records: list[dict[str, Any]]) -> dict[str, Path | list[Path]]:
    """The records in every format."""
    folder.mkdir(exist_ok=True)
    lines = [json.dumps(record) for record in records]
    (folder / "a.jsonl").write_text("\n".join(lines) + "\n\n")
    (folder / "a.json").write_text(json.dumps(records, indent=2))
    for name, separator in (("a.csv", ","), ("a.tsv", "\t")):
        with (folder / name).open("w", encoding="utf-8-sig", newline="") as file:
            table = csv.DictWriter(file, records[0], delimiter=separator)
            table.writeheader()
            table.writerows(records)
    made = datasets.Dataset.from_list(records)
    made.to_parquet(folder / "a.parquet")
    made.save_to_disk(folder / "saved")
    (folder / "below").mkdir()
    for place, name in ((slice(25), "b.jsonl"), (slice(25, None), "c.json")):
        (folder / "below" / name).write_text("\n".join(lines[place]))
    names = ("a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet", "saved", "below")
    return {name: folder / name for name in names} | {"a list": [folder / "below" / n for n in ("b.jsonl", "c.json")]}


def as_path(place: Path | list[Path]) -> str | tuple[str, ...]:
    return tuple(map(str, place)) if isinstance(place, list) else str(place)


def test_texts_of_every_format_are_the_same_rows(llama, tmp_path):
    """Documents are held out by their text, so all of the tokens and of the split agree."""
    opened = {
        name: open_data(
            HFTextConfig(path=as_path(place), tokenizer=str(llama), holdout=0.3, cache=str(tmp_path / "cache")), 16, 0
        )
        for name, place in write(tmp_path / "texts", TEXTS).items()
    }
    lines = opened.pop("a.jsonl")
    assert lines.validation_rows > 10
    for name, data in opened.items():
        assert data.digest == lines.digest, name
        assert torch.equal(data.rows(0, 20), lines.rows(0, 20)), name


def test_chats_of_every_format_are_the_same_rows(llama, tmp_path):
    records = [{"prompt": f"say, {n}", "completion": f'"{n * n}"\n'} for n in range(60)]
    opened = {
        name: open_data(ChatConfig(path=as_path(place), tokenizer=str(llama), cache=str(tmp_path / "cache")), SEQ, 0)
        for name, place in write(tmp_path / "chats", records).items()
    }
    lines = opened.pop("a.jsonl")
    for name, data in opened.items():
        assert torch.equal(data.rows(0, 8), lines.rows(0, 8)), name
        assert torch.equal(data.validation(0, 1), lines.validation(0, 1)), name


def test_other_files_are_refused_in_one_line(llama, tmp_path):
    cache = {"tokenizer": str(llama), "cache": str(tmp_path / "cache")}
    for name, content, words in (
        ("a.csv", "text,number\nhello,1\nhello\n", "a.csv, line 3 has not the 2 cells of the first"),
        ("b.csv", "body,number\nhello,1\n", "data.column=text is not a column of"),
        ("c.csv", b"text\n\xff\xfe\n", "c.csv: it is no table in UTF-8"),
        ("d.json", '[{"text": "a"}, 3]', "d.json, record 1 is not a record"),
        ("e.json", '[{"text": "a"}', "e.json is not JSON"),
        ("f.parquet", "nothing", "Arrow cannot read it"),
    ):
        file = tmp_path / name
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        with pytest.raises(ConfigError) as caught:
            open_data(HFTextConfig(path=str(file), **cache), 16, 0)
        assert words in str(caught.value), name
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"missing\.jsonl does not exist"):
        check_data(ChatConfig(path=(str(tmp_path / "d.json"), str(tmp_path / "missing.jsonl")), **cache), SEQ)


# -- the hub -----------------------------------------------------------------------------------------------------------


def test_a_name_of_the_hub_without_a_network_names_the_command(llama):
    with pytest.raises(ConfigError) as caught:
        check_data(HFTextConfig(path="org/texts", tokenizer=str(llama)), SEQ)
    assert "`hf download org/texts --repo-type dataset --include '*train*' --local-dir org/texts`" in str(caught.value)
    with pytest.raises(ConfigError, match="`hf download org/model --local-dir org/model`"):
        hub.model_folder("org/model", weights=True)


def test_a_folder_wins_over_a_name_of_the_hub(here):
    assert hub.is_name("org/model")
    assert not any(map(hub.is_name, ("model", "a/b/c", "/org/model", "./model", "~/model")))
    (here / "org" / "model").mkdir(parents=True)
    assert not hub.is_name("org/model")


def test_a_model_and_a_dataset_of_the_hub_train_from_their_caches(llama, here, monkeypatch):
    import huggingface_hub

    snapshot = here / "hub" / "models--org--tiny" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("0123")
    for file in llama.iterdir():
        (snapshot / file.name).write_bytes(file.read_bytes())
    transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(llama)).save_pretrained(
        snapshot
    )
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(here / "hub"))
    datasets.Dataset.from_list(chats(60)).save_to_disk(here / "saved")  # in files, as a dataset of the hub is

    def of_hub(name: str, *, split: str, keep_in_memory: bool) -> Any:
        assert (name, split, keep_in_memory) == ("org/chats", "train", False)
        return datasets.load_from_disk(here / "saved")

    monkeypatch.setattr(datasets, "load_dataset", of_hub)
    (here / "chats.jsonl").write_text("\n".join(json.dumps(chat) for chat in chats(60)))
    hub.model_folder.cache_clear()
    hub.dataset.cache_clear()
    losses = []
    for model, data in (("org/tiny", "org/chats"), (str(snapshot), "chats.jsonl")):
        words = [f"model.path={model}", f"data.path={data}", "hydra.run.dir=" + model.replace("/", "-")]
        assert run(llama, ChatConfig(path="chats.jsonl", cache="cache"), "steps=2", *words) == 0
        losses.append([row["train/loss"] for row in rows_of(here / model.replace("/", "-"))])
    assert losses[0] == losses[1]


# -- mixed sources -----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 50), min_size=1, max_size=5), st.integers(0, 300))
def test_sources_take_turns_in_proportion_at_every_row(weights, rows):
    """Of any beginning each source has its share up to the number of sources, and its rows come in their order."""
    proportion, seen = Proportion([weight / 10 for weight in weights]), Counter[int]()
    for row in range(rows):
        source, number = proportion.place(row)
        assert number == seen[source]
        seen[source] += 1
    assert proportion.counts(rows) == [seen[source] for source in range(len(weights))]
    for source, weight in enumerate(weights):
        assert abs(seen[source] - rows * weight / sum(weights)) <= len(weights)


def mixed(llama, tmp_path, kind=ChatConfig, **changes):
    sources = {}
    for name, weight, base in (("code", 2, 0), ("prose", 1, 1000)):
        records = [
            {"prompt": f"{name} {base + n}", "completion": str(n), "text": f"{name} {n} " * 5} for n in range(80)
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
        sources[name] = {"path": str(tmp_path / f"{name}.jsonl"), "weight": weight}
    return kind(mix=sources, tokenizer=str(llama), holdout=0.3, cache=str(tmp_path / "cache"), **changes)


@pytest.mark.parametrize("kind", [ChatConfig, HFTextConfig])
def test_rows_of_a_mix_are_those_of_its_sources(llama, tmp_path, kind):
    config = mixed(llama, tmp_path, kind)
    data = open_data(config, SEQ, 5)
    code, prose = (open_data(source, SEQ, 5) for _, source in config.sources.values())
    rows = data.rows(0, 12)
    expected = Counter(tuple(row) for part in (code.rows(0, 8), prose.rows(0, 4)) for row in part.tolist())
    assert Counter(map(tuple, rows.tolist())) == expected
    assert torch.equal(data.rows(5, 9), rows[5:9])
    assert data.rows(3, 3).shape == (0, SEQ + 1)
    assert data.shares(12) == {"code": 8 / 12, "prose": 4 / 12}
    held = {tuple(row) for part in (code, prose) for row in part.validation(0, part.validation_rows).tolist()}
    validated = data.validation(0, data.validation_rows).tolist()
    assert 2 <= len(validated) == len({tuple(row) for row in validated})
    assert {tuple(row) for row in validated} <= held
    assert "2 of 3 from code" in data.about
    lost = {**config.mix, "prose": {"path": "nowhere.jsonl", "weight": 1}}
    with pytest.raises(ConfigError, match=r"^data\.mix: prose: path=nowhere\.jsonl does not exist"):
        check_data(config.model_copy(update={"mix": lost}), SEQ)
    with pytest.raises(ConfigError, match="epochs means nothing"):
        data.rows_of_epochs(1)
    with pytest.raises(ConfigError, match=r"the sources of data\.mix end at different steps"):
        read({"data": config.model_dump(mode="json"), "model": {"name": "hf", "path": str(llama)}, "epochs": 2})


def test_a_run_on_a_mix_goes_on_and_logs_the_shares(llama, here):
    mixed(llama, here)
    words = ["data.path=null", "data.mix={code:{path:code.jsonl,weight:2},prose:{path:prose.jsonl}}", "steps=6"]
    data = ChatConfig(path="code.jsonl", cache="cache")
    assert run(llama, data, *words, "hydra.run.dir=whole") == 0
    assert run(llama, data, *words, "hydra.run.dir=first", "debug.stop_at=3", "checkpoint.every=3") == 0
    assert run(llama, data, *words, "hydra.run.dir=rest", "resume=first", "batch.micro=1") == 0
    whole, rest = (rows_of(here / name) for name in ("whole", "rest"))
    assert [row["train/loss"] for row in rest] == pytest.approx([row["train/loss"] for row in whole[3:]], rel=1e-5)
    assert [row["data/code"] for row in rest] == [row["data/code"] for row in whole[3:]]
    assert all(row["data/code"] + row["data/prose"] == pytest.approx(1) for row in whole)
    assert whole[-1]["data/code"] == pytest.approx(2 / 3, abs=0.05)


@pytest.mark.parametrize(
    ("mix", "words"),
    [
        ("{code:{weight:2}}", "has code without a path and a weight"),
        ("{code:{path:a.jsonl,weight:much}}", "has code with the weight much, which is no number above 0"),
        ("{code:{path:a.jsonl,weight:0}}", "has code with the weight 0, which is no number above 0"),
        ("{code:{path:a.jsonl,wieght:2}}", "has code without a path and a weight"),
        ("[a.jsonl]", "must be sources such as"),
    ],
)
def test_a_mix_that_is_none_is_refused(llama, here, capsys, mix, words):
    data = ChatConfig(path="code.jsonl", cache="cache")
    assert run(llama, data, "data.path=null", f"data.mix={mix}") == 2
    said = capsys.readouterr().err
    assert said.startswith("data.mix=")
    assert words in said
    assert said.count("\n") == 1


# -- validation from elsewhere -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ChatConfig, HFTextConfig])
def test_validation_from_a_file_of_its_own_leaves_all_to_training(llama, tmp_path, kind):
    for name, count in (("train", 60), ("held", 20)):
        records = [{"prompt": f"{name} {n}", "completion": str(n), "text": f"{name} {n} " * 5} for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
    config = kind(path=str(tmp_path / "train.jsonl"), tokenizer=str(llama), cache=str(tmp_path / "cache"))
    data = open_data(config, 24, 0, held=str(tmp_path / "held.jsonl"))
    trained = data.decode(data.rows(0, data.rows_of_epochs(8)).flatten())
    held = data.decode(data.validation(0, data.validation_rows).flatten())
    assert "held" not in trained
    assert "train" not in held
    if kind is ChatConfig:
        assert {f"train {n}{n}" for n in range(60)} == {part for part in set(trained.split("<|im_end|>")) if part}
        assert held.count("held") == 20
    check_data(config, 24, str(tmp_path / "held.jsonl"))
    with pytest.raises(ConfigError, match=r"^val\.path=.*nowhere\.jsonl does not exist"):
        check_data(config, 24, str(tmp_path / "nowhere.jsonl"))
    if kind is ChatConfig:
        assert data.about.startswith(": 60 chats to train (prompt and completion), trained on the completions")
        assert "; validation: 20 chats to validate (" in data.about


def test_val_path_of_texts_and_of_a_run(llama, here, capsys):
    for name in ("train", "held"):
        (here / name).mkdir()
        (here / name / "a.txt").write_text(f"{name} " * 500)
    data = open_data(TextConfig(folder="train"), 16, 0, held="held")
    assert "h" not in data.decode(data.rows(0, 50).flatten()).replace("the", "")
    assert "train" not in data.decode(data.validation(0, data.validation_rows).flatten())
    words = ["debug=tiny", "data.folder=train", "val.path=held", "steps=2", "hydra.run.dir=run", "tracker.console=none"]
    assert train.main([*words, "data.holdout=0.1"]) == 0
    assert capsys.readouterr().err == "warning: data.holdout=0.1 has no effect beside val.path. Remove one of them.\n"
    assert rows_of(here / "run")[-1]["val/loss"] > 0
    assert train.main(["debug=tiny", "data=synthetic", "val.path=held"]) == 2


TEXTS_AND_TOKENIZER = {"name": "hf", "tokenizer": "llama"}


@pytest.mark.parametrize(
    ("data", "held", "is_trained"),
    [
        (TEXTS_AND_TOKENIZER | {"path": "a.jsonl"}, "below/../a.jsonl", True),
        (TEXTS_AND_TOKENIZER | {"path": ["b.jsonl", "a.jsonl"]}, "a.jsonl", True),
        (TEXTS_AND_TOKENIZER | {"path": "below"}, "below/a.jsonl", True),
        (TEXTS_AND_TOKENIZER | {"mix": {"b": {"path": "b.jsonl"}, "a": {"path": ["a.jsonl"]}}}, "a.jsonl", True),
        (TEXTS_AND_TOKENIZER | {"path": "org/name"}, "org/name", True),
        (TEXTS_AND_TOKENIZER | {"path": "a.jsonl"}, "below/a.jsonl", False),
        ({"name": "tokens", "path": "a.bin", "vocab": 256}, "./a.bin", True),
        ({"name": "text", "folder": "below"}, "below", True),
        ({"name": "text", "folder": "below", "skip": ["held"]}, "below/held", False),
    ],
)
def test_validation_data_that_trains_is_warned_of(here, data, held, is_trained):
    config = read({"data": data, "val": {"path": held}})
    warning = f"val.path={held} is training data too, so val/loss is too low. Give other data, or remove val.path."
    assert notes_on(config) == [warning] * is_trained
    assert notes_on(read({"data": data})) == []

"""Texts through a tokenizer: made once by rank 0, the same bytes for all, documents held out whole, every refusal."""

import importlib.machinery
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
tokenizers = pytest.importorskip("tokenizers")

import train  # noqa: E402
from tests.conftest import LONG_S  # noqa: E402
from zero.errors import ConfigError  # noqa: E402
from zero.progress import silent  # noqa: E402
from zero.testing import run_ranks  # noqa: E402
from zero.trainer import checks  # noqa: E402
from zero.trainer.data import HFTextConfig, check_data, open_data, tokenised  # noqa: E402
from zero.trainer.data.cached import agreed_folder  # noqa: E402
from zero.trainer.data.tokenizer import Tokenizer  # noqa: E402
from zero.trainer.run import loop  # noqa: E402

SEQ, END = 8, "<|end|>"
WORDS = ["one two three four", "five six seven", "eight nine ten", "eleven twelve"]


def text_of(number):
    return f"document {number}: {WORDS[number % 4]}\nand {WORDS[number % 3]}, é {number * 7}.\n" * 2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A folder as save_pretrained leaves one; the file asks for marks, cuts and padding, which texts here never get."""
    folder = tmp_path_factory.mktemp("tokenizer")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320, special_tokens=[END, "<s>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(map(text_of, range(50)), trainer)
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made.enable_truncation(4)
    made.enable_padding(length=64)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": END}}))
    return str(folder)


def records(path, numbers, column="text"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps({"id": n, column: text_of(n)}) for n in numbers) + "\n\n")


def replace(config, **changes):
    return HFTextConfig(**dict(config) | changes)


@pytest.fixture
def config(tokenizer, tmp_path):
    """Forty documents: half are files, half are lines."""
    for number in range(20):
        (tmp_path / "texts" / "test").mkdir(parents=True, exist_ok=True)
        (tmp_path / "texts" / "test" / f"{number}.txt").write_text(text_of(number))
    records(tmp_path / "texts" / "more.jsonl", range(20, 40))
    return HFTextConfig(
        path=str(tmp_path / "texts"), tokenizer=tokenizer, cache=str(tmp_path / "cache" / "in"), holdout=0.3
    )


def token_folder(config):
    (folder,) = config.cached.iterdir()
    return folder


def numbers_in(path):
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint16).tolist()


# -- what is made ------------------------------------------------------------------------------------------------------


def test_every_document_is_on_one_side_whole_and_ends_with_the_end(config):
    """Against the library itself, document by document; marks, cuts and padding of the file are left out."""
    data = open_data(config, SEQ, seed=0)
    plain = tokenizers.Tokenizer.from_file(os.path.join(config.tokenizer, "tokenizer.json"))
    plain.no_truncation()
    plain.no_padding()
    wanted = {tuple(plain.encode(text_of(n), add_special_tokens=False).ids): n for n in range(40)}
    sides = []
    for name in ("train.bin", "held.bin"):
        numbers, documents = numbers_in(token_folder(config) / name), [[]]
        for number in numbers:
            if number == 0:
                documents.append([])
            else:
                documents[-1].append(number)
        assert documents.pop() == [], "the last one ends, too"
        sides.append({wanted[tuple(document)] for document in documents})
    train_side, held_side = sides
    assert train_side | held_side == set(range(40))
    assert not train_side & held_side
    assert 4 < len(held_side) < 20
    assert data.vocab_size == 320
    row = data.rows(9, 13)[0]
    assert row.shape == (SEQ + 1,)
    assert row.dtype == torch.int64
    assert data.decode(row) == plain.decode(row.tolist(), skip_special_tokens=False)
    assert data.decode(torch.tensor([0, 70, 999_999])) == data.decode(torch.tensor([0, 70])), "of a larger model"


def test_documents_that_come_later_move_no_other(config, tmp_path):
    def held(path):
        return set(hf_decode(config, numbers_in(path / "held.bin")).split(END))

    open_data(config, SEQ, seed=0)
    before = token_folder(config)
    records(tmp_path / "texts" / "later.jsonl", range(100, 120))
    open_data(config, SEQ, seed=0)
    (after,) = set(config.cached.iterdir()) - {before}
    assert held(before) < held(after)


def hf_decode(config, numbers):
    return Tokenizer(config.tokenizer).decode(numbers)


def test_a_long_file_goes_in_pieces_and_comes_back_as_it_was(config, tmp_path, monkeypatch):
    """One document, so its end is held out."""
    text = "".join(map(text_of, range(30))) + "no line ends here " * 20
    monkeypatch.setattr(tokenised, "PIECE", 100)
    monkeypatch.setattr(tokenised, "BATCH_CHARS", 250)
    (tmp_path / "long.txt").write_text(text)
    config = replace(config, path=str(tmp_path / "long.txt"))
    told = []
    data = open_data(config, SEQ, seed=0, progress=lambda *args: told.append(args))
    folder = token_folder(config)
    assert hf_decode(config, numbers_in(folder / "train.bin")) == text + END
    assert not (folder / "held.bin").exists()
    assert data.validation_rows > 10
    made = [(done, total) for what, done, total in told if what == "tokenising"]
    assert len(made) > 5
    assert all(done < total for done, total in made[:-1])
    assert made[-1][0] == made[-1][1]


# -- kept --------------------------------------------------------------------------------------------------------------


def test_tokens_are_made_once_and_again_for_whatever_changes_them(config, tokenizer, tmp_path, monkeypatch):
    first = open_data(config, SEQ, seed=0)
    with monkeypatch.context() as patched:
        patched.setattr(tokenised, "_make", None)
        again = open_data(config, SEQ, seed=0)
    assert again.digest == first.digest
    assert torch.equal(again.rows(21, 25), first.rows(21, 25))
    other = json.loads((Path(tokenizer) / "tokenizer.json").read_text())
    other["added_tokens"].append(other["added_tokens"][1] | {"id": 320, "content": "two"})
    (tmp_path / "other.json").write_text(json.dumps(other))
    for changed in (
        replace(config, holdout=0.4),
        replace(config, end="<s>"),
        replace(config, tokenizer=str(tmp_path / "other.json"), end=END),
    ):
        assert open_data(changed, SEQ, seed=0).digest != first.digest
    (tmp_path / "texts" / "test" / "3.txt").write_text(text_of(3).replace("four", "gold"))
    assert open_data(config, SEQ, seed=0).digest != first.digest
    assert len(list(config.cached.iterdir())) == 5


def test_without_a_key_the_users_cache_keeps_them(config, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    config = replace(config, cache=None)
    open_data(config, SEQ, seed=0)
    assert (token_folder(config) / "train.bin").is_file()
    assert config.cached == tmp_path / "user" / "functional-zero" / "tokens"


def test_what_fails_halfway_leaves_nothing_that_could_be_believed(config, tmp_path):
    records(tmp_path / "texts" / "zz.jsonl", [1], column="txt")
    with pytest.raises(
        ConfigError, match=r"data\.column=text is not a column of .*zz\.jsonl, line 1\. Columns of text: txt"
    ):
        open_data(config, SEQ, seed=0)
    assert list(config.cached.iterdir()) == []


def test_of_runs_that_tokenise_at_once_the_slower_takes_what_the_faster_made(config, monkeypatch):
    """Both have made all of it when one renames, and neither looks again before it does."""
    both, make = threading.Barrier(2), tokenised._make

    def together(*args):
        make(*args)
        both.wait(30)

    monkeypatch.setattr(tokenised, "_make", together)
    monkeypatch.setattr(Path, "is_dir", lambda path, seen=Path.is_dir: path.parent != config.cached and seen(path))
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda seed: open_data(config, SEQ, seed), (0, 0))
    assert first.digest == second.digest
    assert (token_folder(config) / "train.bin").is_file(), "and nothing is left beside it"


def opened(world, config):
    world._transport.timeout_s = 1.5
    data = open_data(config, SEQ, 0, world)
    return data.digest, data.rows(6 + world.rank, 6 + world.rank + 1).tolist()


def test_rank_0_makes_them_and_the_others_wait_however_long(config, monkeypatch):
    """Longer than a wait may take: a word now and then keeps them."""
    makers, make = [], tokenised._make

    def slow(config, tokenizer, folder, tell):
        for _ in range(6):
            time.sleep(0.4)
            tell("tokenising", 0, 1)
        makers.append(folder)
        make(config, tokenizer, folder, tell)

    monkeypatch.setattr(tokenised, "_make", slow)
    results = run_ranks(3, opened, config)
    assert len(makers) == 1
    assert len({digest for digest, _ in results}) == 1
    whole = open_data(config, SEQ, 0).rows(6, 9).tolist()
    assert [row for _, rows in results for row in rows] == whole


def test_a_rank_that_does_not_see_the_folder_says_which_key_to_set():
    def nowhere(report):
        return Path("/no/such/folder")

    with pytest.raises(ConfigError, match=r"rank 1 does not see /no/such/folder.*Set data\.cache"):
        run_ranks(2, lambda world: agreed_folder(world, "tokens", tokenised.TRAIN_FILE, nowhere, silent))


# -- datasets ----------------------------------------------------------------------------------------------------------


def saved_by_datasets(folder, features):
    """Its settings alone, which are all that a check reads."""
    folder.mkdir()
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))
    return str(folder)


@pytest.mark.filterwarnings("default")
def test_rows_that_datasets_saved_are_documents(config, tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    rows = {"body": [text_of(number) for number in range(600)] + [""]}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "saved")
    config = replace(config, path=str(tmp_path / "saved"), column="body")
    check_data(config, SEQ)
    data = open_data(config, SEQ, seed=0)
    folder = token_folder(config)
    assert json.loads((folder / "about.json").read_text())["documents"] == 600
    texts = [hf_decode(config, numbers_in(folder / name)) for name in ("train.bin", "held.bin")]
    assert sorted(document for text in texts for document in text.split(END) if document) == sorted(rows["body"][:600])
    assert data.validation_rows > 100
    datasets.Dataset.from_dict({"body": ["text", None]}).save_to_disk(tmp_path / "holes")
    with pytest.raises(ConfigError, match=r"holes, row 1: data\.column=body holds NoneType, not text"):
        open_data(replace(config, path=str(tmp_path / "holes")), SEQ, seed=0)


def test_what_datasets_saved_is_checked_without_it(config, tmp_path, monkeypatch):
    text, number = {"dtype": "string", "_type": "Value"}, {"dtype": "int64", "_type": "Value"}
    saved = replace(config, path=saved_by_datasets(tmp_path / "saved", {"body": text, "n": number}))
    refused(saved, "data.column=text is not a column of", "Columns of text: body")
    refused(replace(saved, column="n"), "data.column=n holds int64, not text. Columns of text: body")
    broken = tmp_path / "broken"
    saved_by_datasets(broken, [])
    refused(replace(config, path=str(broken)), "dataset_info.json was not written by datasets")
    several = tmp_path / "several"
    several.mkdir()
    (several / "dataset_dict.json").write_text('{"splits": ["train"]}')
    saved_by_datasets(several / "train", {})
    refused(replace(config, path=str(several)), "holds the splits train. Give the folder of one split.")
    monkeypatch.setattr("zero.platform.installed.find_spec", lambda name: name != "datasets" or None)
    refused(replace(saved, column="body"), "data=hf needs datasets", "pip install -e '.[hf]'")


# -- refusals ----------------------------------------------------------------------------------------------------------


def refused(config, *words):
    with pytest.raises(ConfigError) as caught:
        check_data(config, SEQ)
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_texts_that_cannot_be_read_are_refused_in_one_line(config, tmp_path):
    for name, content, words in (
        ("none.jsonl", b"\n\n", ["holds no text"]),
        ("cut.jsonl", b'{"text": "a', ["cut.jsonl, line 1 is not JSON"]),
        ("list.jsonl", b'["text"]', ["line 1 is not a record"]),
        ("null.jsonl", b'{"text": null}', ["line 1: data.column=text holds NoneType, not text"]),
        ("half.jsonl", b'{"text": "\\ud800"}', ["line 1 holds a lone surrogate"]),
        ("other.json", b'\n{"body": ""}', ["data.column=text is not a column of", "line 2. Columns of text: body"]),
        ("latin.txt", b"caf\xe9", ["latin.txt is not UTF-8"]),
    ):
        (tmp_path / name).write_bytes(content)
        refused(replace(config, path=str(tmp_path / name)), *words)
    (tmp_path / "empty").mkdir()
    refused(replace(config, path=str(tmp_path / "empty")), "holds no text")
    refused(replace(config, path="wikitext"), "data.path=wikitext does not exist", "ORG/NAME of the hub")


CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]


@pytest.mark.parametrize("column", ["text", "messages"])
def test_a_chat_without_text_is_refused_with_the_data_for_chats(config, tmp_path, column):
    """The message is the same for any column, so that leaving data.column out is not followed by naming it again."""
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": CHAT}))
    message = {"role": {"dtype": "string", "_type": "Value"}, "content": {"dtype": "string", "_type": "Value"}}
    lists = {"old": [message], "new": {"feature": message, "_type": "List"}}  # datasets 3 and 4
    saved = [saved_by_datasets(tmp_path / name, {"messages": chat}) for name, chat in lists.items()]
    for path in (str(tmp_path / "chat.jsonl"), *saved):
        refused(replace(config, path=path, column=column), f"data.column={column}", "set data=chat for chats")


def test_a_column_without_text_is_refused_with_those_that_hold_text(config, tmp_path):
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": CHAT, "prompt": "hello", "source": "forum"}))
    chat = replace(config, path=str(tmp_path / "chat.jsonl"), column="messages")
    refused(chat, "line 1: data.column=messages holds list, not text. Columns of text: prompt, source")
    check_data(replace(chat, column="prompt"), SEQ)


def test_tokenizers_that_cannot_be_used_are_refused_in_one_line(config, tmp_path, monkeypatch):
    refused(replace(config, tokenizer="gpt2"), "data.tokenizer=gpt2 does not exist", "nothing is fetched from the hub")
    refused(replace(config, tokenizer=str(tmp_path)), "holds no tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    refused(replace(config, tokenizer=str(tmp_path)), "is not a tokenizer")
    refused(replace(config, end="</s>"), "data.end=</s> is not a token of data.tokenizer=")
    untold = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    untold.save(str(tmp_path / "tokenizer.json"))
    refused(replace(config, tokenizer=str(tmp_path)), "does not say which token ends a text. Set data.end=TOKEN.")
    (tmp_path / "tokenizer_config.json").write_text("[]")
    refused(replace(config, tokenizer=str(tmp_path)), "tokenizer_config.json cannot be read")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    refused(config, "data=hf needs tokenizers", "pip install -e '.[hf]'")


def test_too_few_tokens_name_the_texts_and_not_the_cache(config, tmp_path):
    (tmp_path / "short.txt").write_text("one two three")
    with pytest.raises(
        ConfigError, match=r"data\.path=.*short\.txt leaves \d+ tokens for training, fewer than one row"
    ):
        open_data(replace(config, path=str(tmp_path / "short.txt")), 500, seed=0)


def test_a_cache_that_cannot_be_written_names_its_key(config, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"data\.cache=.*file: Not a directory\. Give a folder"):
        open_data(replace(config, cache=str(tmp_path / "file")), SEQ, seed=0)


def test_the_check_imports_neither_torch_nor_datasets_nor_transformers(config):
    code = (
        "import sys, train; sys.exit(train.main(sys.argv[1:]) != 2 or "
        "bool({'torch', 'datasets', 'transformers'} & set(sys.modules)))"
    )
    words = ["data=hf", f"data.path={config.path}", f"data.tokenizer={config.tokenizer}", "model.seq=8"]
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "model.vocab=256 is smaller than the 320 tokens of data=hf. Set model.vocab=320.\n"


# -- train.py ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def llama(config, tmp_path):
    """A folder with model and tokenizer, as they are on a disk that had a hub once."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    folder = tmp_path / "llama"
    made = transformers.LlamaConfig(vocab_size=320, max_position_embeddings=32, pad_token_id=None, **sizes)
    made.architectures = ["LlamaForCausalLM"]
    made.save_pretrained(folder)
    for file in Path(config.tokenizer).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def loaded(name):
    """A script as a module."""
    path = Path(__file__).resolve().parents[2] / "scripts" / name
    loader = importlib.machinery.SourceFileLoader(name, str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    loader.exec_module(module)
    return module


def run(folder, config, *words):
    data = ["data=hf", f"data.path={config.path}", f"data.cache={config.cache}", "data.holdout=0.3"]
    few = ["batch.global=2", "val.rows=2", "model.seq=8", "sample.tokens=4", "tracker.every=1"]
    return train.main(["model=hf", f"model.path={folder}", *data, *few, *words])


def test_train_py_takes_texts_through_the_models_own_tokenizer(llama, config, here, monkeypatch, capsys):
    """A run that goes on reads what the first one made; what it writes at its end is words."""
    assert run(llama, config, "steps=2", "checkpoint.every=1", "hydra.run.dir=first") == 0
    said = capsys.readouterr().out
    assert f"weights: random, because {llama} holds no safetensors" in said
    assert "document" in said.split("sample:")[1], "the beginning of a validation row"
    monkeypatch.setattr(tokenised, "_make", None)
    monkeypatch.setattr(loop, "sample_text", lambda *_: "words \n   ")
    assert run(llama, config, "steps=4", "resume=first", "hydra.run.dir=second") == 0
    told = [json.loads((here / name / "summary.json").read_text()) for name in ("first", "second")]
    assert f"sample:\n{told[0]['sample'].rstrip()}\n" in said
    assert told[0]["data_digest"] == told[1]["data_digest"]
    said = capsys.readouterr().out
    assert "sample:\nwords\n" in said, "with spaces behind it"
    assert "other data" not in said
    assert told[1]["steps"] == 4
    monkeypatch.setattr("sys.argv", ["sample", "first", "document", "--tokens", "3"])
    assert loaded("sample").main() == 0
    assert capsys.readouterr().out.startswith("document")


def test_more_tokens_than_a_model_of_transformers_knows_are_refused_before_they_are_made(llama, config, here, capsys):
    settings = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(settings | {"vocab_size": 300}))
    assert run(llama, config, "steps=2") == 2
    assert "knows 300 tokens, fewer than the 320 of data=hf" in capsys.readouterr().err
    assert not config.cached.exists()


def test_a_model_with_a_tokenizer_is_not_fed_bytes(llama, here, capsys):
    """Not by default either; a model type without files may be."""
    for words, told in (([], "TEXTS"), (["data=text", "data.folder=/"], "/")):
        assert train.main(["model=hf", f"model.path={llama}", *words]) == 2
        assert f"which has its own tokenizer. Set data=hf data.path={told}.\n" in capsys.readouterr().err
    checks.parse_config({"model": {"name": "hf", "path": "gpt2"}, "data": {"name": "text"}})

"""Laws of the data: the batch is a function of (seed, step), slices agree, files are held out whole."""

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from tests.common.held import open_files
from tests.conftest import LONG_S
from zero.errors import ConfigError, MachineError
from zero.trainer.data import check_data, open_data
from zero.trainer.data.files import split_files, text_files
from zero.trainer.data.order import draw
from zero.trainer.data.source import SyntheticConfig, TextConfig, TokensConfig
from zero.trainer.data.windows import spread_over

SEQ = 16


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def write_tokens(path: Path, numbers: list[int], item_bytes: int) -> str:
    path.write_bytes(b"".join(number.to_bytes(item_bytes, sys.byteorder) for number in numbers))
    return str(path)


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "corpus", {f"part{n % 3}/file{n}.txt": f"{n:03d} ".encode() * 50 for n in range(40)})


@pytest.fixture(params=["text", "tokens", "synthetic"])
def config(request, folder, tmp_path):
    if request.param == "text":
        return TextConfig(folder=str(folder))
    if request.param == "tokens":
        numbers = [n * n % 60_000 for n in range(2000)]
        return TokensConfig(path=write_tokens(tmp_path / "tokens.bin", numbers, 2), vocab=60_000)
    return SyntheticConfig(vocab=97)


def test_slices_of_the_global_batch_are_the_global_batch(config):
    """Worlds of any size read the same rows."""
    data = open_data(config, SEQ, seed=3)
    whole = data.rows(60, 72)
    assert whole.shape == (12, SEQ + 1)
    assert whole.dtype == torch.int64
    assert int(whole.max()) < data.vocab_size
    for ranks in (1, 2, 3, 4, 6, 12):
        rows = 12 // ranks
        parts = [data.rows(60 + rank * rows, 60 + (rank + 1) * rows) for rank in range(ranks)]
        assert torch.equal(torch.cat(parts), whole)
    assert data.rows(64, 64).shape == (0, SEQ + 1)


def test_a_batch_depends_on_seed_and_step_and_on_nothing_else(config):
    """No position to save: asking in another order, or from another object, changes nothing."""
    data, again = open_data(config, SEQ, seed=3), open_data(config, SEQ, seed=3)
    first, second = data.rows(0, 8), data.rows(12, 20)
    torch.manual_seed(0)
    assert torch.equal(again.rows(12, 20), second)
    assert torch.equal(again.rows(0, 8), first)
    assert not torch.equal(first, second)
    assert not torch.equal(open_data(config, SEQ, seed=4).rows(0, 8), first)
    assert again.digest == data.digest
    assert len(data.digest) == 64


def test_validation_is_the_same_for_every_seed(config):
    data, other = open_data(config, SEQ, seed=3), open_data(config, SEQ, seed=4)
    assert torch.equal(data.validation(2, 5), other.validation(2, 5))
    assert torch.equal(data.validation(0, 4), torch.cat([data.validation(0, 2), data.validation(1, 2)]))
    rows = data.validation_rows
    assert torch.equal(data.validation(rows, 1), data.validation(0, 1))


def test_training_rows_are_text_of_training_files_only(folder):
    config = TextConfig(folder=str(folder), holdout=0.3)
    data = open_data(config, SEQ, seed=0)
    split = split_files(list(text_files(config.root, config.skip)), config.holdout)
    names = {file.key for file in split.held}
    assert names
    assert len(split.train) + len(names) == 40
    held = {int(name.split("file")[1].split(".")[0]) for name in names}
    for step in range(20):
        for row in data.rows(8 * step, 8 * step + 8):
            numbers = {int(word) for word in data.decode(row).replace("\0", " ").split() if len(word) == 3}
            assert not numbers & held
    seen = set()
    for index in range(data.validation_rows):
        text = data.decode(data.validation(index, 1)[0])
        seen |= {int(word) for word in text.replace("\0", " ").split() if len(word) == 3}
    assert seen == held


def test_adding_files_moves_no_other_file_to_the_other_side(folder):
    config = TextConfig(folder=str(folder), holdout=0.3)
    before = {file.key for file in split_files(list(text_files(config.root, config.skip)), 0.3).held}
    write(folder, {f"more/file{n}.txt": b"more" * 50 for n in range(40)})
    after = {file.key for file in split_files(list(text_files(config.root, config.skip)), 0.3).held}
    assert {key for key in after if not key.startswith("more/")} == before


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("holdout", [1e-9, 0.05, 0.5])
def test_a_few_files_give_both_shares_whole_files(tmp_path, count, holdout):
    folder = write(tmp_path, {f"{n}.txt": b"abc " * 20 for n in range(count)})
    split = split_files(list(text_files(folder, TextConfig().skip)), holdout)
    assert split.train
    assert split.held
    assert not split.tail
    assert open_data(TextConfig(folder=str(folder), holdout=holdout), SEQ, 0).validation_rows > 0


def test_the_end_of_a_single_file_is_held_out(tmp_path):
    folder = write(tmp_path, {"only.txt": b"a" * 900 + b"b" * 100})
    data = open_data(TextConfig(folder=str(folder), holdout=0.1), SEQ, seed=0)
    assert set(data.decode(data.rows(0, 64).flatten())) == {"a"}
    assert set(data.decode(data.validation(0, data.validation_rows).flatten())) <= {"b", "\0"}


def test_every_byte_and_the_holdout_are_in_the_digest(folder):
    first = open_data(TextConfig(folder=str(folder)), SEQ, 0).digest
    assert open_data(TextConfig(folder=str(folder), holdout=0.4), SEQ, 0).digest != first
    path = folder / "part0" / "file0.txt"
    path.write_bytes(b"999" + path.read_bytes()[3:])
    assert open_data(TextConfig(folder=str(folder)), SEQ, 0).digest != first


def test_what_is_not_text_or_is_to_be_skipped_is_left_out(tmp_path):
    keep = {"a.py": b"x = 1\n", "deep/er/b.txt": "é".encode(), "c": b"no suffix"}
    drop = {
        "n.bin": b"a\0b",
        "l.txt": b"\xff\xfe",
        "e.txt": b"",
        ".git/config": b"x",
        "test/t.py": b"x",
        "q/tests/t.py": b"x",
    }
    folder = write(tmp_path, keep | drop)
    assert sorted(file.key for file in text_files(folder, TextConfig().skip)) == sorted(keep)


def test_a_character_cut_by_the_first_look_is_still_text(tmp_path):
    folder = write(tmp_path, {"a.txt": b"a" * 7999 + "é".encode() * 10})
    assert [file.key for file in text_files(folder, TextConfig().skip)] == ["a.txt"]


def test_token_rows_are_the_numbers_of_the_file(tmp_path):
    """Against a plain list."""
    numbers = [n * 70_001 % 2**32 for n in range(500)]
    path = write_tokens(tmp_path / "t.bin", numbers, 4)
    data = open_data(TokensConfig(path=path, dtype="uint32", vocab=2**32, holdout=0.2), SEQ, seed=1)
    for row, tokens in enumerate(data.rows(0, 6).tolist()):
        start = draw(1, row, 400 - SEQ)
        assert tokens == numbers[start : start + SEQ + 1]
    for tokens in data.validation(0, data.validation_rows).tolist():
        start = numbers.index(tokens[0])
        assert start >= 400
        assert tokens == numbers[start : start + SEQ + 1]


def test_a_validation_file_of_its_own_is_used_whole(tmp_path):
    path, held = write_tokens(tmp_path / "t.bin", [1] * 200, 2), write_tokens(tmp_path / "v.bin", [2] * 200, 2)
    data = open_data(TokensConfig(path=path, vocab=3), SEQ, seed=0, held=held)
    assert data.validation(0, 3).unique().tolist() == [2]
    assert data.rows(0, 3).unique().tolist() == [1]
    assert data.decode(data.rows(0, 1)[0, :3]) == "1 1 1"


def test_a_token_beyond_the_vocabulary_is_refused(tmp_path):
    path = write_tokens(tmp_path / "t.bin", [7] * 900, 2)
    with pytest.raises(ConfigError, match=r"token 7, but data\.vocab=7"):
        open_data(TokensConfig(path=path, vocab=7), SEQ, seed=0).rows(0, 1)


def test_the_same_bytes_read_as_other_tokens_are_other_data(tmp_path):
    path = write_tokens(tmp_path / "t.bin", [7] * 1800, 2)
    narrow, wide = (
        TokensConfig(path=path, vocab=2**20 if of == "uint32" else 8, dtype=of) for of in ("uint16", "uint32")
    )
    assert open_data(narrow, SEQ, 0).digest != open_data(wide, SEQ, 0).digest


def test_a_large_file_is_told_apart_by_a_change_of_its_end(tmp_path):
    path = tmp_path / "t.bin"
    path.write_bytes(bytes(20 * 2**20))
    config = TokensConfig(path=str(path), vocab=10)
    first = open_data(config, SEQ, 0).digest
    with path.open("r+b") as file:
        file.seek(-2, os.SEEK_END)
        file.write(b"\1\0")
    assert open_data(config, SEQ, 0).digest != first


def test_synthetic_rows_count_upwards():
    rows = open_data(SyntheticConfig(vocab=50), SEQ, seed=0).rows(0, 32)
    steps = rows.diff(dim=1) % 50
    assert torch.equal(steps, steps[:, :1].expand_as(steps))
    assert steps.unique().tolist() == list(range(1, 9))


@given(count=st.integers(1, 5000))
def test_spread_visits_every_window_once(count):
    assert sorted(spread_over(index, count) for index in range(count)) == list(range(count))


def test_draws_are_the_hash_that_they_say():
    """Against the definition, and evenly over the range."""
    digest = hashlib.blake2b(b"start 1 2", digest_size=8).digest()
    assert draw(1, 2, 1000) == int.from_bytes(digest, "little") % 1000
    counts = torch.bincount(torch.tensor([draw(0, row, 10) for row in range(5000)]), minlength=10)
    assert int(counts.min()) > 400  # 500 expected, standard deviation 21


def test_the_default_corpus_is_the_standard_library():
    config = TextConfig()
    check_data(config, 256)
    data = open_data(config, 256, seed=0)
    split = split_files(list(text_files(config.root, config.skip)), config.holdout)
    paths = [Path(file.key) for file in [*split.train, *split.held]]
    assert Path("asyncio/events.py") in paths
    assert not any({"site-packages", "test", "tests"} & set(path.parts) for path in paths)
    assert data.validation_rows > 500


BAD = [
    ({"folder": "missing"}, "does not exist"),
    ({"folder": "file.txt"}, "is not a folder"),
    ({"folder": "empty"}, "holds no text file"),
    ({"folder": "binary"}, "holds no text file"),
    ({"folder": "short"}, "fewer than one row of 17"),
]


@pytest.mark.parametrize(("keys", "message"), BAD)
def test_a_folder_that_cannot_be_used_is_refused_in_one_line(tmp_path, keys, message):
    write(tmp_path, {"file.txt": b"text", "binary/a": b"\0", "short/a.txt": b"text", "short/b.txt": b"text"})
    (tmp_path / "empty").mkdir()
    config = TextConfig(folder=str(tmp_path / keys["folder"]))
    for refuse in (lambda: check_data(config, SEQ), lambda: open_data(config, SEQ, 0)):
        with pytest.raises(ConfigError, match=message) as caught:
            refuse()
        assert "\n" not in str(caught.value)
        assert str(caught.value).startswith("data.folder=")


def test_token_files_that_cannot_be_used_are_refused(tmp_path):
    odd = tmp_path / "odd.bin"
    odd.write_bytes(bytes(999))
    with pytest.raises(ConfigError, match="not a multiple of 2"):
        check_data(TokensConfig(path=str(odd), vocab=9), SEQ)
    with pytest.raises(ConfigError, match="is not a file"):
        check_data(TokensConfig(path=str(tmp_path / "no.bin"), vocab=9), SEQ)
    odd.write_bytes(bytes(100))
    with pytest.raises(ConfigError, match="validation"):
        check_data(TokensConfig(path=str(odd), vocab=9), SEQ)


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: TextConfig(holdout=0.0), "data.holdout"),
        (lambda: TextConfig(holdout=float("nan")), "data.holdout"),
        (lambda: SyntheticConfig(vocab=0), "data.vocab"),
        (lambda: TokensConfig(path="x", vocab=0), "data.vocab"),
        (lambda: TokensConfig(path="x", vocab=1, dtype="int8"), "data.dtype"),
    ],
)
def test_settings_out_of_range_name_their_key(make, key):
    with pytest.raises(ConfigError, match=key):
        make()


def test_the_check_does_not_import_torch(tmp_path):
    """A wrong folder must be refused faster than torch is imported."""
    code = (
        "import sys, zero.trainer.models; from zero.trainer.data import TextConfig, check_data;"
        "check_data(TextConfig(), 256)"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print('torch' in sys.modules)"],
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=True,
    )
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("held", [False, True])
def test_a_token_file_that_is_cut_short_is_one_line_that_names_it(tmp_path, held):
    """Mapped into memory it would end the process by SIGBUS. What is still there is read as before."""
    paths = [write_tokens(tmp_path / name, list(range(20_000)), 2) for name in ("train.bin", "held.bin")]
    data = open_data(TokensConfig(path=paths[0], vocab=60_000), SEQ, seed=3, held=paths[1] if held else None)
    whole = [data.rows(row, row + 1) for row in range(100)]
    for path in paths:
        os.truncate(path, 20_001)
    said = []
    for row, before in enumerate(whole):
        try:
            assert torch.equal(data.rows(row, row + 1), before)
        except MachineError as error:
            said.append(str(error))
    assert 0 < len(said) < len(whole)
    assert set(said) == {
        f"{paths[0]} has 20001 bytes, but had 40000 when the run began. Restore the file and resume the run."
    }
    with pytest.raises(MachineError, match=re.escape(paths[held])):
        data.validation(0, data.validation_rows)


def test_a_token_file_is_closed_with_its_data(tmp_path):
    data = open_data(TokensConfig(path=write_tokens(tmp_path / "t.bin", [1] * 2000, 2), vocab=2), SEQ, seed=0)
    assert len(open_files(tmp_path)) == 1
    del data
    assert not open_files(tmp_path)

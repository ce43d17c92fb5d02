"""Every message about a command line, word by word, is in messages.txt; each suggestion is accepted when typed.

`python -m tests.trainer.test_messages` writes messages.txt anew. Read the difference before you commit it.
"""

import contextlib
import functools
import io
import os
import re
import shlex
import tempfile
from pathlib import Path

import pytest

import train
from tests.common.command_lines import refusal_of
from zero.core.schema import flat_fields
from zero.core.suggest import typed
from zero.trainer import job
from zero.trainer.config import Config, keys
from zero.trainer.explain import explanations
from zero.trainer.foreign_settings import foreign_message, foreign_settings
from zero.trainer.option_files import CONF, groups

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).with_name("messages.txt")


def cases() -> list[tuple[str, str]]:
    """(command line, message) of each case."""
    return re.findall(r"^\$ (.*)\n(.*)\n", GOLDEN.read_text(), re.MULTILINE)


def make_files(folder: Path) -> None:
    """Make the files that command lines name."""
    for name in ("empty", "texts", "weights"):
        (folder / name).mkdir()
    (folder / "empty" / "file").write_bytes(b"\0")
    (folder / "empty" / "tokens").write_bytes(200 * b"\0")
    (folder / "empty" / "many").write_bytes(20_000 * b"\0")
    (folder / "empty" / "loop").symlink_to("loop")
    (folder / "empty" / "nothing").symlink_to("nowhere")
    for number in range(40):
        (folder / "texts" / f"{number}.txt").write_text(f"text {number} " * 100)
    (folder / "records" / "tables").mkdir(parents=True)
    (folder / "records" / "rows.parquet").write_bytes(b"PAR1" + 200 * b"\0")
    (folder / "records" / "tables" / "rows.csv").write_text("text\n" + 2000 * "a line of text\n")
    (folder / "weights" / "config.json").write_text('{"model_type": "llama"}')
    (folder / "ds.json").write_text('{"train_batch_size": 8}')


@pytest.fixture
def here(here, monkeypatch):
    """A folder in which no run may start."""
    monkeypatch.setattr(job, "run", lambda *_, **__: pytest.fail("the settings were accepted"))
    make_files(here)
    return here


def message_of(line: str) -> str:
    said, printed = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(printed):
        code = train.main(shlex.split(line))
    assert (code, printed.getvalue()) == (2, ""), f"{line}: exit code {code}"
    text = said.getvalue()
    assert text.endswith("\n")
    return text.removesuffix("\n").replace(f"{ROOT}/", "").replace(f"{Path.cwd()}/", "HERE/")


@pytest.mark.parametrize(("line", "message"), cases())
def test_a_mistake_is_one_line_exit_code_2_and_no_file(here, line, message):
    before = sorted(here.rglob("*"))
    assert message_of(line) == message
    assert message.isprintable()
    assert sorted(here.rglob("*")) == before
    if suggested := re.search(r"^(\S+?)(?:=\S+)? is not a setting\. Did you mean ([^?]+)\?$", message):
        words = [word if "=" in word else f"{word}={line.partition('=')[2]}" for word in shlex.split(suggested[2])]
        assert re.match(r"$|\w+=\w+ needs ", refusal_once(*words)), "a suggestion is accepted, or lacks another setting"


@functools.cache
def refusal_once(*words: str) -> str:
    """The message about a suggestion; many mistakes have the same one."""
    return refusal_of(words)


def typo_of(key: str) -> str:
    section, _, name = key.rpartition(".")
    return f"{section}.{name[:-1]}{name[-1]}{name[-1]}".removeprefix(".")


@pytest.mark.parametrize("entry", explanations(), ids=lambda entry: entry.key)
def test_a_misspelt_key_is_named_with_the_right_one(here, entry):
    words = entry.example.split()
    wrong = [word.replace(f"{entry.key}=", f"{typo_of(entry.key)}=") for word in words]
    option = "" if words[0].startswith(f"{entry.key}=") else f"{words[0]} "
    value = next(word for word in words if word.startswith(f"{entry.key}=")) if option else entry.key
    assert refusal_of(wrong) == f"{typo_of(entry.key)} is not a setting. Did you mean {option}{typed(value)}?"


EXAMPLES = {
    entry.key: dict(word.partition("=")[::2] for word in entry.example.split())[entry.key] for entry in explanations()
}
EXAMPLES |= {"hydra.run.dir": "out", "ds_config": "ds.json", "resume": "latest", "data.folder": "texts"}
EXAMPLES |= {"offload.path": ".", "checkpoint.dir": "saved"}


def value_for(settings: str) -> str:
    """The value that is typed for a word whose `settings` have a place for it."""
    key = next((setting.partition("=")[0] for setting in settings.split() if "{}" in setting), "")
    return EXAMPLES.get(key, "true")


@pytest.mark.parametrize(("word", "settings"), foreign_settings()["type"].items())
def test_a_word_of_another_program_is_answered_with_settings_that_are_accepted(here, word, settings):
    whole = word if "=" in word else f"{word}={value_for(settings)}"
    said = refusal_of([whole])
    assert said == foreign_message(whole)
    suggested = re.search(r"\. Did you mean (.+)\?$", said)[1]
    assert refusal_once(*shlex.split(suggested)) == ""
    if "=" not in word:
        assert foreign_message(f"trainer.{word.replace('_', '-')}={value_for(settings)}")


@pytest.mark.parametrize(("word", "reason"), foreign_settings()["reason"].items())
def test_a_word_with_nothing_to_type_is_answered_with_the_reason(here, word, reason):
    assert refusal_of([f"{word}=8"]) == f"{word} is not a setting. {reason}"


def test_no_word_of_another_program_is_ours():
    words = [*foreign_settings()["type"], *foreign_settings()["reason"]]
    assert len(words) == len(set(words)) <= 120
    sections = {key.rpartition(".")[0] for key in keys()} | groups()
    assert not set(words) & {*keys(), *sections, *flat_fields(Config().plain())}
    assert not [word for word in words if "=" in word and (CONF / f"{word.replace('=', '/')}.yaml").exists()]


def write() -> None:
    """Write the messages of all command lines in messages.txt."""
    lines = [line for line, _ in cases()]
    os.chdir(tempfile.mkdtemp())
    make_files(Path())
    job.run = lambda *_, **__: exit("the settings were accepted")
    GOLDEN.write_text("".join(f"$ {line}\n{message_of(line)}\n" for line in lines))


if __name__ == "__main__":
    write()

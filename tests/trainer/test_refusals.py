"""Every setting rejects every value that it should not have, without torch and without touching the disk."""

import copy
import functools
import math
import shlex
import subprocess
import sys
import types
import typing
from pathlib import Path

import pytest

from tests.conftest import LONG_S
from tests.trainer.test_messages import cases
from zero import errors
from zero.core.schema import Key, walk
from zero.core.setting_types import words
from zero.errors import ConfigError, ZeroError
from zero.platform.run_files import folders_of
from zero.trainer.config import Config, read

ROOT = Path(__file__).resolve().parents[2]


# Each key with what it must not be


def base(key: Key) -> dict:
    """A run in which the key exists and is right."""
    needed = {
        "TokensConfig": {"data": {"name": "tokens", "path": "x"}, "model": {"vocab": 50304}},
        "HFConfig": {"model": {"name": "hf", "path": "x"}},
        "HFTextConfig": {"data": {"name": "hf", "path": "x", "tokenizer": "y"}},
        "ChatConfig": {"data": {"name": "chat", "path": "x"}, "model": {"name": "hf", "path": "y"}},
    }
    raw = copy.deepcopy(needed.get(key.option.__name__, {}))
    if "name" in key.option.model_fields:
        raw.setdefault(key.name.split(".")[0], {})["name"] = key.option.model_fields["name"].default
    read(raw)
    return raw


def put(raw: dict, name: str, value: object) -> dict:
    raw = copy.deepcopy(raw)
    *above, last = name.split(".")
    functools.reduce(lambda node, part: node.setdefault(part, {}), above, raw)[last] = value
    return raw


def kinds_in(annotation) -> set:
    """The Python types and words that an annotation is made of."""
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Annotated:
        return kinds_in(arguments[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return set().union(*map(kinds_in, arguments))
    return {type(value) for value in arguments} if typing.get_origin(annotation) is typing.Literal else {annotation}


def bad_values(key: Key) -> dict[str, object]:
    """Return bad values of a key, by kind, without those that the key's own text allows."""
    kinds, may = kinds_in(key.field.annotation), words(key.field)
    number = bool({int, float} & kinds)
    bad: dict[str, object] = {
        "a list of lists": [[]], "a mapping": {"a": 1}, "an object": object(), "NaN": math.nan, "infinite": math.inf,
        "minus infinite": -math.inf, "empty": "", "blank": "  ", "a wrong word": "qqqq", "a NUL": "a\0b",
        "negative": -2 if "from -1" in may else -1,
        "a huge number": 10**400, "a huge text": "9" * 5000, "a huge real": 1e300,
    }  # fmt: skip
    if "null" not in may:
        bad["null"] = None
    if bool not in kinds:
        bad["true"] = True
    if float not in kinds:
        bad["half"] = 1.5
    if number and ("from 1" in may or "above 0" in may or "1 or more" in may):
        bad["zero"] = 0
    if not number and str in kinds and "word" not in may:
        bad["a number"] = 3
    if may in ("text", "a path") or "text, or" in may or "a path, " in may:
        del bad["a wrong word"]
    if typing.get_origin(key.field.annotation) is typing.Literal:
        bad["misspelt"] = f"{typing.get_args(key.field.annotation)[0]}e"
    return bad


DECLARED = [key for key in walk(Config) if not key.name.endswith(".name")]
GENERATED = [(key, kind) for key in DECLARED for kind in bad_values(key)]


@pytest.mark.parametrize("key", DECLARED, ids=lambda key: f"{key.option.__name__}:{key.name}")
def test_no_bad_value_is_accepted(key):
    raw, accepted = base(key), []
    for kind, value in bad_values(key).items():
        try:
            read(put(raw, key.name, value))
        except ConfigError as refused:
            said = str(refused)
            assert said.startswith((key.name, "debug.", "schedule.", "model.", "precision.", "data.")), said
            assert "\n" not in said
            assert said.isprintable()
            assert len(said) < 250
        else:
            accepted.append(kind)
    assert not accepted, f"{key.name} accepts {accepted}, and says it takes {words(key.field)}"


PATHS = [key for key in DECLARED if words(key.field).startswith("a path")]


@pytest.mark.parametrize("key", PATHS, ids=lambda key: f"{key.option.__name__}:{key.name}")
def test_a_pattern_where_a_path_belongs_is_rejected(key):
    assert len(PATHS) > 7
    with pytest.raises(ConfigError, match=rf"^{key.name}=\*.txt: is a pattern, but must be one path. Give the folder"):
        read(put(base(key), key.name, "*.txt"))


def test_there_are_enough_of_them():
    assert len(GENERATED) > 1000


# The whole program

FEW = [shlex.split(line) for line, _ in cases()[::8] if "empty" not in line and "/proc/self" not in line]


def test_refusing_touches_neither_torch_nor_the_disk(here):
    """A fresh interpreter, in which opening a file to write, making a folder or importing torch is a failure."""
    watch = (
        "import sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "import train\n"
        "def guard(event, args):\n"
        "    if event == 'open' and isinstance(args[1], str) and set(args[1]) & set('wax+'):\n"
        "        raise AssertionError(f'wrote {args[0]}')\n"
        "    if event in ('os.mkdir', 'os.rename', 'os.remove', 'subprocess.Popen', 'socket.bind'):\n"
        "        raise AssertionError(f'{event} {args}')\n"
        "    if event == 'import' and args[0].split('.')[0] == 'torch':\n"
        "        raise AssertionError('torch was imported')\n"
        "sys.dont_write_bytecode = True\n"
        "sys.addaudithook(guard)\n"
        f"codes = [train.main(arguments) for arguments in {FEW!r}]\n"
        "assert set(codes) == {2}, codes\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", watch], cwd=here, capture_output=True, text=True, timeout=LONG_S, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stderr.count("\n") == len(FEW), done.stderr
    assert "Error" not in done.stderr, done.stderr


# The tree of errors


def test_the_tree_that_is_drawn_is_the_tree_that_is():
    drawn: dict[str, tuple[str, int | None]] = {}
    above = {-1: ""}
    for line in errors.__doc__.splitlines()[2:]:
        if not line.strip():
            break
        depth = (len(line) - len(line.lstrip(" │├└─"))) // 4
        name, *rest = line.lstrip(" │├└─").split()
        above[depth] = name
        drawn[name] = above[depth - 1] if depth > 1 else "", int(rest[0]) if rest[0].isdigit() else None
    classes = {
        cls.__name__: cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, ZeroError)
    }
    assert set(drawn) == set(classes)
    for name, (parent, code) in drawn.items():
        assert name == "ZeroError" or classes[name].__base__.__name__ == parent
        assert code is None or classes[name].exit_code == code
        inherited = "exit_code" not in vars(classes[name])
        assert code is not None or inherited or name == "ZeroError", f"{name} has a number that is not drawn"


def test_every_exit_code_has_its_class():
    codes = {name: getattr(errors, name).exit_code for name in ("ConfigError", "MachineError", "CheckpointError")}
    codes |= {name: getattr(errors, name).exit_code for name in ("WorldError", "NumericsError", "Preempted")}
    assert list(codes.values()) == [2, 3, 4, 5, 6, 75]
    assert issubclass(errors.StoreError, errors.MachineError)


def test_an_offload_path_may_be_a_variable_of_each_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOCAL_DISK", str(tmp_path))
    monkeypatch.delenv("NO_DISK", raising=False)
    assert folders_of(["$LOCAL_DISK/a", "${LOCAL_DISK}", "/b"]) == [tmp_path / "a", tmp_path, Path("/b")]
    with pytest.raises(
        ConfigError, match=r"^offload.path=/x/\$NO_DISK: the environment variable \$NO_DISK is not set on "
    ):
        folders_of(["/x/$NO_DISK"])

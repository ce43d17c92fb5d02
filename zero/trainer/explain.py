"""What the settings mean, as text: one key, one section, or an overview on one screen.

Everything comes from the schema's own metadata (`zero/trainer/config`) and from the first line of each option's file,
so it cannot go stale. The same entries make docs/config.md. No torch: an answer comes as soon as Python has started.
"""

import functools
import json
import re
import shutil
import textwrap
import typing
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from zero.core import schema, suggest
from zero.core.setting_types import words
from zero.errors import ConfigError
from zero.trainer.config import Config
from zero.trainer.other_words import other_words

WIDTH, CELL = 100, 28
"""Characters of a line at most, and of a cell that still decides about the width of its column."""

FIRST = (
    *("mode", "steps", "resume", "zero.stage", "zero.activations", "batch.global", "batch.micro", "data.folder"),
    *("offload.path", "optim.lr", "launch.ranks", "checkpoint.every", "tracker.every"),
)
"""The keys that a newcomer meets first."""


class Entry(NamedTuple):
    """One dotted key, as all options that have it declare it together."""

    key: str
    text: str
    takes: str
    default: str
    unit: str
    trades: str
    example: str
    options: tuple[str, ...]
    """The options of its group that have it; empty where all have."""

    @property
    def group(self) -> str:
        return self.key.split(".")[0]

    @property
    def choices(self) -> list[str]:
        """The words that the key takes, if there are several: auto, world and node of "auto, world or node"."""
        found = re.split(r",? or |, ", self.takes.split(" such as ")[0])
        words = [one for one in found if " " not in one and one not in ("null", "text")]
        return words if len(words) > 1 else []


class Section(NamedTuple):
    """A group of keys, or of option files, or both."""

    name: str
    text: str
    options: dict[str, str]
    """Name to first line, for what can be chosen as a whole: `offload=nvme`."""
    chosen: str
    """The option of the default run."""
    entries: tuple[Entry, ...]


@functools.cache
def entries() -> tuple[Entry, ...]:
    """Every key, in reading order."""
    by_name: dict[str, list[schema.Key]] = {}
    kinds: dict[str, set[type[schema.Section]]] = {}  # of the section that a key is in
    for declared in schema.walk(Config):
        by_name.setdefault(declared.name, []).append(declared)
        kinds.setdefault(_section(declared.name), set()).add(declared.section)
    return tuple(
        _entry(name, declared, everywhere=len(declared) == len(kinds[_section(name)]))
        for name, declared in by_name.items()
        if _last_word(name) != "name"
    )


def sections(conf: Path) -> tuple[Section, ...]:
    """Every section: the keys without one first, then those of the schema, then groups that are made of them.

    Args:
        conf: the folder with the options' files, a group in each of its folders.
    """
    found = {name: tuple(group) for name, group in groupby(entries(), lambda entry: entry.group)}
    alone = tuple(entry for entry in entries() if entry.key == entry.group)
    groups = sorted(path.name for path in conf.iterdir() if path.is_dir() and path.name != "hydra")
    names = [name for name in dict.fromkeys([*found, *groups]) if name not in {entry.key for entry in alone}]
    chosen = dict(re.findall(r"^  - (\w+): (\w+)$", (conf / "config.yaml").read_text(), re.MULTILINE))
    top = Section("", "The run as a whole.", {}, "", alone)
    return top, *(
        Section(name, _about(name), _options(conf / name), chosen.get(name, ""), found.get(name, ())) for name in names
    )


def explain(name: str | None, conf: Path) -> str:
    """What a key or a section means; without one, which sections there are.

    Raises:
        ConfigError: there is no such key; names the nearest.
    """
    if name is None:
        return _contents(sections(conf))
    name = name.removesuffix(".name")  # of the chosen option: the section explains it
    by_key = {entry.key: entry for entry in entries()}
    by_name = {section.name: section for section in sections(conf) if section.name}
    if name in by_key:
        return _of_key(by_key[name], conf)
    if name in by_name:
        return _of_section(by_name[name])
    inside = [entry for entry in by_key.values() if entry.key.startswith(f"{name}.")]
    if inside:
        return _rows_of(inside)
    other = other_words()["type"].get(name, "").partition("=")[0]
    likely = suggest.likely_key(name, [*by_name, *by_key]) or other
    hint = f"Did you mean {likely}?" if likely else "mode=explain lists the sections."
    raise ConfigError(f"explain.key={name} is not a setting or a section. {hint}")


def options_with(key: str, conf: Path) -> list[str]:
    """The options of its group that have a key, the default one first.

    Args:
        key: one of `entries()`; any other one has none of them.
        conf: as `sections` takes it.
    """
    entry = next((entry for entry in entries() if entry.key == key), None)
    if entry is None:
        return []
    names = next(_names(section) for section in sections(conf) if section.name == entry.group)
    return [name for name in names if not entry.options or _kind(conf / entry.group / f"{name}.yaml") in entry.options]


def overview(conf: Path) -> str:
    """What --help prints: how to start, what can be chosen, the first keys to know, and where to read on."""
    groups = [section for section in sections(conf) if section.options]
    by_key = {entry.key: entry for entry in entries()}
    return f"""\
Sharded training (ZeRO) with CPU and NVMe offload for plain PyTorch.

  python train.py                                      a run: about a minute
  python train.py zero.stage=3 launch.ranks=2          a run on two processes
  python train.py -m zero.stage=0,1,2,3                runs, and their table
  python train.py mode=plan model=gpt_7b plan.ranks=4  what fits, and how fast
  python train.py mode=doctor                          is this machine ready?

Options, written {groups[0].name}={next(iter(groups[0].options))}; the default comes first
{_table((group.name, ", ".join(_names(group))) for group in groups)}

Keys to know first
{_rows_of(by_key[key] for key in FIRST)}

More
  python train.py mode=explain                         every section
  python train.py mode=explain explain.key=offload     a section, or one key
  python train.py offload=nvme --cfg job               a run's settings
  docs/config.md                                       every key
  python train.py --hydra-help                         Hydra's options"""


# From the schema


def _entry(name: str, declared: list[schema.Key], *, everywhere: bool) -> Entry:
    fields = [one.field for one in declared]
    extras: list[dict[str, Any]] = [dict(one.json_schema_extra or {}) for one in fields]  # type: ignore[arg-type]
    owners = [_tag(one.section) for one in declared]
    unit, trades = (next((one[extra] for one in extras if extra in one), "") for extra in ("unit", "trades"))
    return Entry(
        key=name,
        text=_merged([one.description or "" for one in fields], owners),
        takes=_merged([*map(words, fields)], owners),
        default=_merged([as_typed(one.get_default()) for one in fields], owners),
        unit=unit,
        trades=trades,
        example=_example(name, extras, owners, everywhere),
        options=() if everywhere else tuple(owners),
    )


def _example(name: str, extras: list[dict[str, Any]], owners: list[str], everywhere: bool) -> str:
    """Words to type; with the option of its group where the default one does not have the key."""
    chosen = _tag(type(getattr(Config(), name.split(".")[0]))) if "." in name else ""
    best = owners.index(chosen) if chosen in owners else 0
    text = f"{name}={extras[best]['example']}" if "example" in extras[best] else ""
    return text if everywhere or owners[best] == chosen or not text else f"{name.split('.')[0]}={owners[best]} {text}"


def _merged(texts: list[str], owners: list[str]) -> str:
    """One text where all agree, else each with its option."""
    if len(set(texts)) == 1:
        return texts[0]
    having = {text: [owner for own, owner in zip(texts, owners, strict=True) if own == text] for text in texts}
    return "; ".join(f"{text} ({', '.join(owners)})" for text, owners in having.items())


def _tag(section: type[schema.Section]) -> str:
    name = section.model_fields.get("name")
    return str(name.default) if name and typing.get_origin(name.annotation) is typing.Literal else ""


def as_typed(value: object) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(as_typed, value))}]"
    if isinstance(value, int) and not isinstance(value, bool) and value and value % 2**20 == 0:
        return f"{value // 2**20}MiB"
    return value if isinstance(value, str) else json.dumps(value)


def _about(name: str) -> str:
    field = Config.model_fields.get(name)
    models = [] if field is None else list(schema.models_in(field.annotation))
    if len(models) == 1:
        return str(models[0].__doc__)
    return {
        "model": "What is trained.",
        "data": "Where the tokens come from.",
        "optim": "How a gradient becomes a change of the parameters.",
        "schedule": "How the learning rate moves over the steps.",
        "tracker": "Where the numbers of a run are written.",
        "experiment": "Whole runs: choices of options and values that go together.",
    }[name]


# From the folder of options


def _options(folder: Path) -> dict[str, str]:
    """Name to the first line of its file."""
    return {path.stem: _idea(path) for path in sorted(folder.glob("*.yaml"))}


def _kind(path: Path) -> str:
    return next(iter(re.findall(r"^name: (\w+)$", path.read_text(), re.MULTILINE)), "")


def _idea(path: Path) -> str:
    lines = (line.removeprefix("#").strip() for line in path.read_text().splitlines() if line.startswith("#"))
    return next(line for line in lines if not line.startswith("@package"))


# On the screen


def _of_key(entry: Entry, conf: Path) -> str:
    having = options_with(entry.key, conf) if entry.options else []
    facts = {
        "takes": entry.takes,
        "default": entry.default,
        "counts": entry.unit,
        "trades": entry.trades,
        "only": f"with {entry.group}={suggest.alternatives(having)}" if having else "",
        "example": entry.example and f"python train.py {entry.example}",
    }
    table = _table((f"  {name}", text) for name, text in facts.items() if text)
    text = textwrap.fill(entry.text, _width(), initial_indent="  ", subsequent_indent="  ")
    return f"{entry.key}\n\n{text}\n\n{table}"


def _of_section(section: Section) -> str:
    text = [textwrap.fill(f"{section.name}: {_first_paragraph(section.text)}", _width())]
    if section.options:
        text += ["", f"options, written {section.name}={next(iter(section.options))}", _table(section.options.items())]
    if section.entries:
        first = section.entries[0].key
        text += ["", f"keys; one of them in full: mode=explain explain.key={first}", _rows_of(section.entries)]
    return "\n".join(text)


def _contents(found: tuple[Section, ...]) -> str:
    top, *others = found
    return f"""\
Sections
{_table((section.name, _first_paragraph(section.text)) for section in others)}
and keys of no section: {", ".join(entry.key for entry in top.entries)}

  python train.py mode=explain explain.key=offload       one section
  python train.py mode=explain explain.key=zero.stage    one key
  docs/config.md                                         everything"""


def _names(section: Section) -> list[str]:
    """Of its options, the default one first."""
    return sorted(section.options, key=lambda name: name != section.chosen)


def _first_paragraph(text: str) -> str:
    return " ".join(text.split("\n\n")[0].split())


def _section(key: str) -> str:
    return key.rpartition(".")[0]


def _last_word(key: str) -> str:
    return key.rpartition(".")[2]


def _width() -> int:
    """Of a line: as the terminal has it."""
    return max(60, min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns))


def _rows_of(entries: Iterable[Entry]) -> str:
    return _table((entry.key, entry.default, entry.text) for entry in entries)


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    """Columns as wide as they need, the last one wrapped; a wide cell moves what follows to the next line."""
    tidy = [tuple(" ".join(cell.split()) if cell[:1] != " " else cell for cell in row) for row in rows]
    return "\n".join(_lines(tidy))


def _lines(rows: list[tuple[str, ...]]) -> Iterator[str]:
    columns = list(zip(*rows, strict=True))[:-1]
    widths = [max((len(cell) for cell in column if len(cell) <= CELL), default=0) for column in columns]
    below, width = " " * (2 + sum(width + 2 for width in widths)), _width()
    for row in rows:
        head = "  " + "".join(cell.ljust(width) + "  " for cell, width in zip(row, widths, strict=False))
        if len(head) > len(below):
            yield textwrap.fill(head.rstrip(), width, subsequent_indent=below)
            head = below
        text = textwrap.fill(row[-1], width, initial_indent=head, subsequent_indent=below, break_on_hyphens=False)
        yield text or head.rstrip()

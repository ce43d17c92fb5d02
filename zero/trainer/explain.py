"""Texts that explain the settings: one key, one section, or an overview on one screen.

The texts, and docs/config.md, are made from the schema (`zero/trainer/config`) and from the first line of each option
file. Torch is not imported, so that an answer takes no longer than the start of Python.
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
from zero.trainer.foreign_settings import foreign_settings

LINE_WIDTH, CELL_WIDTH = 100, 28
"""Largest width of a line, and of a cell to which its column is adapted, in characters."""

FIRST = (
    *("mode", "steps", "resume", "zero.stage", "zero.activations", "batch.global", "batch.micro", "data.folder"),
    *("offload.path", "optim.lr", "launch.ranks", "checkpoint.every", "tracker.every"),
)
"""Keys that the overview (--help) lists."""


class Explanation(NamedTuple):
    """The explanation of a dotted key, merged from the declarations of all options that have it."""

    key: str
    text: str
    takes: str
    default: str
    unit: str
    trades: str
    example: str
    options: tuple[str, ...]
    """The options of the key's group that have the key; empty if all have it."""

    @property
    def group(self) -> str:
        return self.key.split(".")[0]

    @property
    def choices(self) -> list[str]:
        """The words in `takes` if there are several: auto, world and node for "auto, world or node"; otherwise []."""
        parts = re.split(r",? or |, ", self.takes.split(" such as ")[0])
        choices = [part for part in parts if " " not in part and part not in ("null", "text")]
        return choices if len(choices) > 1 else []


class ExplainedSection(NamedTuple):
    """A group of keys, or of option files, or both."""

    name: str
    text: str
    options: dict[str, str]
    """First line of each option's file, by name."""
    chosen: str
    """The option of the default run; "" if there are no options."""
    entries: tuple[Explanation, ...]


@functools.cache
def explanations() -> tuple[Explanation, ...]:
    """Return an entry for every key, in the order of the schema."""
    by_name: dict[str, list[schema.Key]] = {}
    classes: dict[str, set[type[schema.Section]]] = {}  # by the first part of the key
    for declared in schema.walk(Config):
        by_name.setdefault(declared.name, []).append(declared)
        classes.setdefault(declared.name.partition(".")[0], set()).add(declared.option)
    return tuple(
        _entry(name, declared, everywhere=len(declared) == len(classes[name.partition(".")[0]]))
        for name, declared in by_name.items()
        if name.rpartition(".")[2] != "name"
    )


def sections(conf: Path) -> tuple[ExplainedSection, ...]:
    """Return the section of keys without a section, then the sections of the schema, then the other groups of options.

    Args:
        conf: folder of option files, with a folder for each group.
    """
    by_group = {name: tuple(group) for name, group in groupby(explanations(), lambda entry: entry.group)}
    alone = tuple(entry for entry in explanations() if entry.key == entry.group)
    groups = sorted(path.name for path in conf.iterdir() if path.is_dir() and path.name != "hydra")
    names = [name for name in dict.fromkeys([*by_group, *groups]) if name not in {entry.key for entry in alone}]
    chosen = dict(re.findall(r"^  - (\w+): (\w+)$", (conf / "config.yaml").read_text(), re.MULTILINE))
    top = ExplainedSection("", "The run as a whole.", {}, "", alone)
    return top, *(
        ExplainedSection(name, _about(name), _options(conf / name), chosen.get(name, ""), by_group.get(name, ()))
        for name in names
    )


def explain(name: str | None, conf: Path) -> str:
    """Return the text about a key or a section; for None the list of sections.

    Args:
        conf: folder of option files.

    Raises:
        ConfigError: there is no such key or section; the message suggests the most similar one.
    """
    if name is None:
        return _contents(sections(conf))
    name = name.removesuffix(".name")  # the text about a section explains its `name`
    by_key = {entry.key: entry for entry in explanations()}
    by_name = {section.name: section for section in sections(conf) if section.name}
    if name in by_key:
        return _of_key(by_key[name], conf)
    if name in by_name:
        return _of_section(by_name[name])
    inside = [entry for entry in by_key.values() if entry.key.startswith(f"{name}.")]
    if inside:
        return _rows_of(inside)
    other = foreign_settings()["type"].get(name, "").partition("=")[0]
    likely = suggest.likely_key(name, [*by_name, *by_key]) or other
    hint = f"Did you mean {likely}?" if likely else "mode=explain lists the sections."
    raise ConfigError(f"explain.key={name} is not a setting or a section. {hint}")


def options_with(key: str, conf: Path) -> list[str]:
    """Return the names of the option files that have `key` or keys below it, the default first; [] if it is unknown."""
    entry = next((entry for entry in explanations() if f"{entry.key}.".startswith(f"{key}.")), None)
    if entry is None:
        return []
    names = next(_names(section) for section in sections(conf) if section.name == entry.group)
    return [
        name for name in names if not entry.options or _tag_of(conf / entry.group / f"{name}.yaml") in entry.options
    ]


def overview(conf: Path) -> str:
    """Return the text of --help."""
    groups = [section for section in sections(conf) if section.options]
    by_key = {entry.key: entry for entry in explanations()}
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


def _entry(name: str, declared: list[schema.Key], *, everywhere: bool) -> Explanation:
    fields = [key.field for key in declared]
    extras: list[dict[str, Any]] = [dict(field.json_schema_extra or {}) for field in fields]  # type: ignore[arg-type]
    owners = [_tag(key.option) for key in declared]
    unit, trades = (next((texts[name] for texts in extras if name in texts), "") for name in ("unit", "trades"))
    return Explanation(
        key=name,
        text=_merged([field.description or "" for field in fields], owners),
        takes=_merged([*map(words, fields)], owners),
        default=_merged([as_typed(field.get_default()) for field in fields], owners),
        unit=unit,
        trades=trades,
        example=_example(name, extras, owners, everywhere),
        options=() if everywhere else tuple(owners),
    )


def _example(name: str, extras: list[dict[str, Any]], owners: list[str], everywhere: bool) -> str:
    """Return an example to type, with an option of the group if the default option lacks the key."""
    chosen = _tag(type(getattr(Config(), name.split(".")[0]))) if "." in name else ""
    best = owners.index(chosen) if chosen in owners else 0
    text = f"{name}={extras[best]['example']}" if "example" in extras[best] else ""
    return text if everywhere or owners[best] == chosen or not text else f"{name.split('.')[0]}={owners[best]} {text}"


def _merged(texts: list[str], owners: list[str]) -> str:
    """Return the text that all options share, or the different texts, each followed by its options in parentheses."""
    if len(set(texts)) == 1:
        return texts[0]
    having = {text: [owner for other, owner in zip(texts, owners, strict=True) if other == text] for text in texts}
    return "; ".join(f"{text} ({', '.join(owners)})" for text, owners in having.items())


def _tag(section: type[schema.Section]) -> str:
    name = section.model_fields.get("name")
    return str(name.default) if name and typing.get_origin(name.annotation) is typing.Literal else ""


def as_typed(value: object) -> str:
    """Return a value as it is written on the command line."""
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
        "model": "The model that is trained.",
        "data": "The source of the tokens.",
        "optim": "The optimizer.",
        "schedule": "The learning rate over the steps.",
        "tracker": "The destinations of a run's numbers.",
        "experiment": "Whole runs: options and values that belong together.",
    }[name]


# From the folder of options


def _options(folder: Path) -> dict[str, str]:
    return {path.stem: _idea(path) for path in sorted(folder.glob("*.yaml"))}


def _tag_of(path: Path) -> str:
    return next(iter(re.findall(r"^name: (\w+)$", path.read_text(), re.MULTILINE)), "")


def _idea(path: Path) -> str:
    lines = (line.removeprefix("#").strip() for line in path.read_text().splitlines() if line.startswith("#"))
    return next(line for line in lines if not line.startswith("@package"))


# On the screen


def _of_key(entry: Explanation, conf: Path) -> str:
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


def _of_section(section: ExplainedSection) -> str:
    text = [textwrap.fill(f"{section.name}: {_first_paragraph(section.text)}", _width())]
    if section.options:
        text += ["", f"options, written {section.name}={next(iter(section.options))}", _table(section.options.items())]
    if section.entries:
        first = section.entries[0].key
        text += ["", f"keys (one in full: mode=explain explain.key={first})", _rows_of(section.entries)]
    return "\n".join(text)


def _contents(all_sections: tuple[ExplainedSection, ...]) -> str:
    top, *others = all_sections
    return f"""\
Sections
{_table((section.name, _first_paragraph(section.text)) for section in others)}
and keys alone: {", ".join(entry.key for entry in top.entries)}

  python train.py mode=explain explain.key=offload       one section
  python train.py mode=explain explain.key=zero.stage    one key
  docs/config.md                                         everything"""


def _names(section: ExplainedSection) -> list[str]:
    """Return the options of a section, the default one first."""
    return sorted(section.options, key=lambda name: name != section.chosen)


def _first_paragraph(text: str) -> str:
    return " ".join(text.split("\n\n")[0].split())


def _width() -> int:
    """Return the width of a line in characters: that of the terminal, but at least 60 and at most `LINE_WIDTH`."""
    return max(60, min(LINE_WIDTH, shutil.get_terminal_size((LINE_WIDTH, 24)).columns))


def _rows_of(entries: Iterable[Explanation]) -> str:
    return _table((entry.key, entry.default, entry.text) for entry in entries)


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    """Return rows as text with aligned columns and a wrapped last column.

    If the other cells of a row are too wide, the last cell begins on the next line.
    """
    tidy = [tuple(" ".join(cell.split()) if cell[:1] != " " else cell for cell in row) for row in rows]
    return "\n".join(_lines(tidy))


def _lines(rows: list[tuple[str, ...]]) -> Iterator[str]:
    columns = list(zip(*rows, strict=True))[:-1]
    widths = [max((len(cell) for cell in column if len(cell) <= CELL_WIDTH), default=0) for column in columns]
    below, width = " " * (2 + sum(width + 2 for width in widths)), _width()
    for row in rows:
        head = "  " + "".join(cell.ljust(width) + "  " for cell, width in zip(row, widths, strict=False))
        if len(head) > len(below):
            yield textwrap.fill(head.rstrip(), width, subsequent_indent=below)
            head = below
        text = textwrap.fill(row[-1], width, initial_indent=head, subsequent_indent=below, break_on_hyphens=False)
        yield text or head.rstrip()

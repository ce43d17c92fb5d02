"""The reply to a command line with other programs' words: what to type in place of all of them, on one line."""

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from zero.core import suggest
from zero.core.suggest import shown
from zero.trainer.config import keys
from zero.trainer.synonyms import SYNONYMS, To

_OFF = ("false", "no", "off", "none", "null", "0", "disabled")
_SHARE = re.compile(r"\d?\.?\d+")
_PLACEHOLDER = re.compile(r"=[A-Z]{4,}$")
_HEAD_WIDTH = 64
_LEAVE = "leave it out"


class Reply(NamedTuple):
    """What to say to a command line.

    Attributes:
        said: about each word that is not ours.
        write: what to type in their place.
        more: what else to type, should that be refused.
        others: the words that stay.
    """

    said: tuple[str, ...]
    write: tuple[str, ...]
    more: tuple[str, ...]
    others: tuple[str, ...]

    @property
    def can_be_tried(self) -> bool:
        """It has neither a placeholder for the user to fill in nor an option with dashes."""
        return not any(word.startswith("-") or _PLACEHOLDER.search(word) for word in self.write)

    def sentence(self, refused: str = "") -> str:
        """One line.

        Args:
            refused: why what is to be typed would be refused in its turn; "" where it is not.
        """
        typed = " ".join(map(suggest.typed, self.write))
        if refused:
            end = f"with {typed} in its place: {refused}" if typed else f"without it: {refused}"
        elif typed:
            end = f"type {typed}"
        else:
            end = "" if self.said[-1].endswith(_LEAVE) else _LEAVE
        return "; ".join(filter(None, [*self.said, end]))


class _Found(NamedTuple):
    """A line of the table with its values filled in, as words: a value may have spaces."""

    write: tuple[str, ...]
    why: str = ""
    more: tuple[str, ...] = ()


def reply(words: Sequence[str], misspelt: str = "") -> Reply | None:
    """The answer to all words of a command line that are synonyms; None where there is none.

    Args:
        misspelt: the one that is neither a synonym nor ours, and is taken for the synonym that looks most like it.
    """
    answers: list[tuple[str, tuple[str, ...]]] = []
    said: list[str] = []
    more: list[tuple[str, tuple[str, ...]]] = []
    others: list[str] = []
    steps = _steps(words)
    for word, typed in _joined(words):
        found = _found(word, steps)
        if found is None and word == misspelt and (likely := _likely(word)) != word:
            word, typed = likely, word.partition("=")[0]  # without its value: who knows what that is
            found = _found(word, steps)
        if found is None and word != typed:
            found = _Found((word,), "a setting is written key=value")
        if found is None and "mode=explain" in words and (word in keys() or word in _sections()):
            found = _Found((f"explain.key={word}",), "what is to be explained is explain.key")
        if found is None:
            others.append(word)
        else:
            answers.append((word, found.write))
            more.append(("", found.more))
            said.append(_said(word, typed, found))
    if not answers:
        return None
    given = {_key_and_value(word)[0] for word in others}
    write = _once(answers, given)
    given |= {one.split("=")[0] for one in write}
    return Reply(tuple(said), write, _once(more, given), tuple(others))


def is_known(word: str) -> bool:
    """Whether this word of a command line has an answer."""
    return _found(word) is not None


def key_for(name: str) -> str | None:
    """Our key for what another program calls a setting; None where there is none."""
    key, _ = _key_and_value(name)
    line = _line(key, "1") or _line(key, None)
    ours = [] if line is None else [one.split("=")[0] for one in line[1].type.split()]
    return next((one for one in ours if one in keys()), None)


def _joined(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each word, with `zero.stage 3`, which came as two, as one; and as it was typed."""
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        both = f"{word}={waiting[0]}" if waiting else ""
        flags = both and _found(word) is not None and _found(waiting[0]) is not None  # --fp16 --gradient_checkpointing
        alone = "=" not in word and both.count("=") == 1 and not waiting[0].startswith("-") and not flags
        if alone and (word in keys() or _found(both) is not None):
            yield both, f"{word} {waiting.pop(0)}"
        else:
            yield word, word


def _steps(words: Iterable[str]) -> int | None:
    """How many steps are typed, in our words or in others'; None where none are."""
    typed = [one for word in words for one in (word, *(_found(word) or _Found(())).write)]
    found = [one.removeprefix("steps=") for one in typed if re.fullmatch(r"steps=\d{1,12}", one)]
    return int(found[-1]) if found else None


def _found(word: str, steps: int | None = None, depth: int = 3) -> _Found | None:
    """The answer to one word, with what it says to type looked up again: `optimizer=muon` is `optim=muon`."""
    key, value = _key_and_value(word)
    line = _line(key, value) if depth and word.isprintable() else None
    if line is None:
        return None
    pattern, to = line
    if pattern.endswith("=*") and to.type and "{" not in to.type and str(value).lower() in _OFF:
        return _Found((), "it is off unless it is asked for")
    values = _values(value or "", steps)
    write, why, more = ([one.format_map(values) for one in text.split()] for text in to)
    own = _Found((), " ".join(suggest.typed(one) if one not in to.why else one for one in why), tuple(more))
    parts = [_found(one, steps, depth - 1) or _Found((one,)) for one in write]
    whys = dict.fromkeys(part.why for part in (own, *parts) if part.why)
    beside = tuple(one for part in (own, *parts) for one in part.more)
    return _Found(tuple(one for part in parts for one in part.write), "; ".join(whys), beside)


def _line(key: str, value: str | None) -> tuple[str, To] | None:
    """The first line that fits; for `trainer.lr` and `optim.wd` that of their last part, if they can mean no other."""
    for pattern, to in SYNONYMS.items():
        name, equals, values = pattern.partition("=")
        if name == key and bool(equals) == bool(value) and fnmatchcase((value or "").lower(), values):
            return pattern, to
    section, _, own = key.rpartition(".")
    found = _line(own, value) if section and key not in keys() else None
    top, dot, rest = section.partition(".")
    meant = [f"{one}{dot}{rest}.{own}" for one in difflib.get_close_matches(top, _sections(), n=1, cutoff=0.8)]
    if found and meant and meant[0] in keys() and meant[0] not in [one.split("=")[0] for one in found[1].type.split()]:
        return None  # a key of ours, its section misspelt
    if found is None or top not in _sections() or all(one.startswith(f"{top}.") for one in found[1].type.split()):
        return found
    return None


def _likely(word: str) -> str:
    """The same with the name of the table that looks most like its own and has an answer, if one does.

    Sections stay as they are: compared with their names, any two keys of one would be alike.
    """
    key, value = _key_and_value(word)
    section, dot, own = key.rpartition(".")
    known = [pattern.partition("=")[0].rpartition(".") for pattern in SYNONYMS]
    names = dict.fromkeys(name for beside, _, name in known if beside in ("", section))
    close = difflib.get_close_matches(own, names, n=1, cutoff=0.85) if value else ()
    likely = f"{section}{dot}{close[0]}={value}" if close else word
    return word if _found(likely) is None else likely


def _sections() -> set[str]:
    return {key.split(".")[0] for key in keys()} | {"hydra"}


def _key_and_value(word: str) -> tuple[str, str | None]:
    """As the table has it; a value as it was typed, None where there is none."""
    key, equals, value = word.lstrip("+~").partition("=")
    return key.lower().replace("-", "_"), value if equals else None


def _values(value: str, steps: int | None) -> dict[str, str]:
    """What the names in braces stand for."""
    plain = value.strip("[]() ")
    numbers = [one.strip() for one in plain.split(",")]
    count = int(value) if value.isdecimal() and len(value) < 10 else 0
    heads = next((one for one in range(count // _HEAD_WIDTH, 0, -1) if count % (2 * one) == 0), 1)
    return {
        "value": value,
        "lower": value.lower(),
        "list": ",".join(numbers),
        "name": value.rstrip("/").rpartition("/")[2],
        "first": numbers[0],
        "second": numbers[-1],
        "count": str(len(numbers)),
        "heads": str(heads),
        "width": str(_HEAD_WIDTH * count),
        "share": "STEPS" if steps is None or not _SHARE.fullmatch(value) else str(round(float(value) * steps)),
        "ours": key_for(value) or value,
    }


def _once(answers: Iterable[tuple[str, tuple[str, ...]]], given: set[str]) -> tuple[str, ...]:
    """What to type, a word for each key that is not given: the one that has a typed value in it, if there is one."""
    by_key: dict[str, tuple[bool, str]] = {}
    for word, write in answers:
        value = (_key_and_value(word)[1] or "").lower()
        for one in write:
            key, has_it = one.split("=")[0], bool(value) and value in one.lower()
            if key not in by_key or (has_it and not by_key[key][0]):
                by_key[key] = has_it, one
    return tuple(one for key, (_, one) in by_key.items() if key not in given)


def _said(word: str, typed: str, found: _Found) -> str:
    key, value = _key_and_value(word)
    if key in keys() or key in _sections():
        head = shown(typed) if found.why else f"{shown(typed)} does not exist"
    elif value is None or word != typed:
        head = shown(typed) if found.why else f"{shown(typed)} is not a setting"
    else:
        head = f"unknown key {key}"
    text = f"{head}: {found.why}" if found.why else head
    return text if found.write else f"{text}; {_LEAVE}"

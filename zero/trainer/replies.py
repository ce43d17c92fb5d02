"""The reply to a command line with other programs' words: what to type in place of all of them, on one line."""

import re
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from zero.core.suggest import shown
from zero.trainer.config import keys
from zero.trainer.synonyms import OUT, SYNONYMS, To

_OFF = ("false", "no", "off", "none", "null", "0", "disabled")
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
        typed = " ".join(self.write)
        if refused:
            end = f"with {typed} in its place: {refused}" if typed else f"without it: {refused}"
        elif typed:
            end = f"type {typed}"
        else:
            end = "" if self.said[-1].endswith(_LEAVE) else _LEAVE
        return "; ".join(filter(None, [*self.said, end]))


def reply(words: Sequence[str]) -> Reply | None:
    """The answer to all words of a command line that are synonyms; None where there is none."""
    answers: list[tuple[str, To]] = []
    said: list[str] = []
    others: list[str] = []
    for word, typed in _joined(words):
        found = _found(word)
        if found is None and word != typed:
            found = To(word, "a setting is written key=value")
        if found is None and "mode=explain" in words and (word in keys() or word in _sections()):
            found = To(f"explain.key={word}", "what is to be explained is explain.key")
        if found is None:
            others.append(word)
        else:
            answers.append((word, found))
            said.append(_said(word, typed, found))
    if not answers:
        return None
    given = {_key_and_value(word)[0] for word in others}
    write = _once(answers, given)
    given |= {one.split("=")[0] for one in write}
    more = _once([("", To(to.more)) for _, to in answers], given)
    return Reply(tuple(said), write, more, tuple(others))


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
        alone = "=" not in word and both.count("=") == 1 and not waiting[0].startswith("-")
        if alone and (word in keys() or _found(both) is not None):
            yield both, f"{word} {waiting.pop(0)}"
        else:
            yield word, word


def _found(word: str, depth: int = 3) -> To | None:
    """The answer to one word, with what it says to type looked up again: `optimizer=muon` is `optim=muon`."""
    key, value = _key_and_value(word)
    line = _line(key, value) if depth and word.isprintable() else None
    if line is None:
        return None
    pattern, to = line
    if pattern.endswith("=*") and to.type and "{" not in to.type and str(value).lower() in _OFF:
        return To(OUT, "it is off unless it is asked for")
    to = To(*(text.format_map(_values(value or "")) for text in to))
    parts = [_found(one, depth - 1) or To(one) for one in to.type.split()]
    whys = dict.fromkeys(part.why for part in (to, *parts) if part.why)
    more = " ".join(part.more for part in (to, *parts) if part.more)
    return To(" ".join(part.type for part in parts), "; ".join(whys), more)


def _line(key: str, value: str | None) -> tuple[str, To] | None:
    """The first line that fits; for `trainer.lr` and `optim.wd` that of their last part, if they can mean no other."""
    for pattern, to in SYNONYMS.items():
        name, equals, values = pattern.partition("=")
        if name == key and bool(equals) == bool(value) and fnmatchcase((value or "").lower(), values):
            return pattern, to
    section, _, own = key.rpartition(".")
    found = _line(own, value) if section and key not in keys() else None
    top = section.split(".")[0]
    if found is None or top not in _sections() or all(one.startswith(f"{top}.") for one in found[1].type.split()):
        return found
    return None


def _sections() -> set[str]:
    return {key.split(".")[0] for key in keys()} | {"hydra"}


def _key_and_value(word: str) -> tuple[str, str | None]:
    """As the table has it; a value as it was typed, None where there is none."""
    key, equals, value = word.lstrip("+~").partition("=")
    return key.lower().replace("-", "_"), value if equals else None


def _values(value: str) -> dict[str, str]:
    """What the names in braces stand for."""
    plain = value.strip("[]() ")
    numbers = [one.strip() for one in plain.split(",")]
    count = int(value) if value.isdecimal() and len(value) < 10 else 0
    heads = next((one for one in range(count // _HEAD_WIDTH, 0, -1) if count % (2 * one) == 0), 1)
    return {
        "value": value,
        "lower": value.lower(),
        "list": plain.replace(" ", ""),
        "name": value.rstrip("/").rpartition("/")[2],
        "first": numbers[0] if len(numbers) == 2 else "0.9",
        "second": numbers[1] if len(numbers) == 2 else "0.95",
        "heads": str(heads),
        "width": str(_HEAD_WIDTH * count),
        "ours": key_for(value) or value,
    }


def _once(answers: Iterable[tuple[str, To]], given: set[str]) -> tuple[str, ...]:
    """What to type, a word for each key that is not given: the one that has a typed value in it, if there is one."""
    by_key: dict[str, tuple[bool, str]] = {}
    for word, to in answers:
        value = (_key_and_value(word)[1] or "").lower()
        for one in to.type.split():
            key, has_it = one.split("=")[0], bool(value) and value in one.lower()
            if key not in by_key or (has_it and not by_key[key][0]):
                by_key[key] = has_it, one
    return tuple(one for key, (_, one) in by_key.items() if key not in given)


def _said(word: str, typed: str, to: To) -> str:
    key, value = _key_and_value(word)
    if key in keys() or key in _sections():
        head = shown(typed) if to.why else f"{shown(typed)} does not exist"
    elif value is None or word != typed:
        head = shown(typed) if to.why else f"{shown(typed)} is not a setting"
    else:
        head = f"unknown key {key}"
    text = f"{head}: {to.why}" if to.why else head
    return text if to.type else f"{text}; {_LEAVE}"

"""Suggestions for misspelt words, and texts of values and names as a user types them."""

import difflib
import re
import shlex
from collections.abc import Iterable, Sequence

SHOWN = 5
"""Number of names that a message lists; of the others it gives only the number."""

_PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./-]*")
_SHELL_LEAVES = re.compile(r"[\w@%+=:,./\[\]-]+")
_NO_TEXT = ("true", "false", "null", "inf", "nan")


def nearest(word: str, options: Iterable[str], cutoff: float = 0.6) -> str:
    """Return a sentence with the option most similar to `word`, or with all options if none is similar."""
    by_lower = {option.lower(): option for option in options}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return f"Did you mean {by_lower[close[0]]}?" if close else f"Choose from {', '.join(by_lower.values())}."


def meant(word: str, options: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ". Did you mean X?" with the option most similar to `word`; "" if none is similar."""
    close = difflib.get_close_matches(word, options, n=1, cutoff=cutoff)
    return f". Did you mean {close[0]}?" if close else ""


def unknown(key: str, known: Sequence[str]) -> str:
    """Return the message for a dotted key that is not among the `known`."""
    if likely := likely_key(key, known):
        return f"{key} is not a setting. Did you mean {likely}?"
    section = key.rpartition(".")[0]
    siblings = [name for name in known if section and name.rpartition(".")[0] == section]
    return f"{key} is not a setting." + (f" Choose from {', '.join(siblings)}." if siblings else "")


def likely_key(key: str, known: Sequence[str]) -> str:
    """Return the known dotted key that `key` most likely stands for, or two or three as "a or b"; "" if none does.

    The last part of the key is compared within its section first, because whole keys of one section are always similar.
    """
    section, _, name = key.rpartition(".")
    siblings = {own.rpartition(".")[2]: own for own in known if own.rpartition(".")[0] == section}
    if close := difflib.get_close_matches(name, siblings, n=1, cutoff=0.7):
        return siblings[close[0]]
    namesakes = [own for own in known if own.rpartition(".")[2] == name]
    if namesakes and section and not siblings:
        return difflib.get_close_matches(key, namesakes, n=1, cutoff=0)[0]
    if len(namesakes) == 1 or (namesakes and not section):
        return alternatives(namesakes[:3])
    if section and siblings:
        return ""
    tops = list(dict.fromkeys(own.split(".")[0] for own in known))
    for options in ([] if section else tops, known, tops):
        if close := difflib.get_close_matches(key, options, n=1, cutoff=0.7):
            return close[0]
    return ""


def some(names: Sequence[str]) -> str:
    """Return at most `SHOWN` of the names on one line, and the number of the others."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(name if name.isprintable() else repr(name) for name in names[:SHOWN]) + more


def alternatives(names: Sequence[str]) -> str:
    """Join names as "a, b or c"."""
    return " or ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def shown(value: object) -> str:
    """Return a value as it was typed, on one line of at most 60 characters, without control characters."""
    if value is None or isinstance(value, bool):
        return word(value)
    if isinstance(value, list | tuple):
        value = f"[{', '.join(map(shown, value[:SHOWN]))}{', ...' * (len(value) > SHOWN)}]"
    text = "".join(letter if letter.isprintable() else "?" for letter in " ".join(str(value).split()))
    return text if len(text) <= 60 else text[:57] + "..."


def command(words: Iterable[str], **instead: object) -> str:
    """Return the command line that starts a run, quoted for a shell.

    Args:
        words: the run's settings as words of a command line.
        instead: keys with a new value.
    """
    kept = [setting for setting in words if setting.partition("=")[0] not in instead]
    return shlex.join(["python", "train.py", *kept, *(f"{key}={word(value)}" for key, value in instead.items())])


def typed(word: str) -> str:
    """Quote one word of a command line for a shell if it needs quotes."""
    if _SHELL_LEAVES.fullmatch(word):
        return word
    return f'"{word}"' if "'" in word and not re.search(r'["$`\\!]', word) else shlex.quote(word)


def word(value: object) -> str:
    """Return a value in the syntax of Hydra's overrides."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{','.join(map(word, value))}]"
    text = str(value)
    if not isinstance(value, str) or (_PLAIN.fullmatch(text) and text.lower() not in _NO_TEXT):
        return text
    # inside quotes a backslash stands for itself, unless a quote follows
    escaped = re.sub(r'(\\*)("|$)', lambda match: 2 * match[1] + (match[2] and '\\"'), text)
    return f'"{escaped}"'

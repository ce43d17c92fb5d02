"""Command lines that are read without being run."""

from collections.abc import Sequence

from zero.errors import ConfigError
from zero.trainer.checks import parse_config
from zero.trainer.compose import compose, settings_in


def refusal_of(words: Sequence[str]) -> str:
    """Return the message about a command line that is rejected; "" for one that is accepted."""
    try:
        parse_config(settings_in(compose([word for word in words if not word.startswith("-")])))
    except ConfigError as error:
        return str(error)
    return ""

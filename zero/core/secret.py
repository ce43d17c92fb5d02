"""Detection of secrets in settings: keys, tokens and passwords.

Settings are written to the run folder, to checkpoints and to dashboards, so none of them may be a secret. A value is a
secret if its key, or the environment variable that it is read from, has the name of a secret, such as API_KEY. Under
any other key a value is a secret if it has the form of a common service's token, or is a URL with a password.
"""

import re
from collections.abc import Iterable, Iterator, Mapping

from zero.errors import ConfigError

_SHAPES = re.compile(
    r"""
      (?<![A-Za-z0-9])(
          wandb_v\d_\w{20,}                                       # Weights & Biases
        | local-[0-9a-f]{40}                                      # a private W&B server
        | hf_[A-Za-z0-9]{30,} | api_org_[A-Za-z0-9]{30,}          # Hugging Face
        | gh[pousr]_[A-Za-z0-9]{30,} | github_pat_\w{30,}         # GitHub
        | glpat-[\w-]{20,}                                        # GitLab
        | sk-(?=[\w-]*\d)[\w-]{20,}                               # OpenAI, Anthropic
        | (?:AKIA|ASIA)[A-Z0-9]{16}                               # AWS
        | AIza[\w-]{35} | ya29\.[\w-]{20,}                        # Google
        | xox[abeprs]-[\w-]{10,}                                  # Slack
        | npm_[A-Za-z0-9]{36}                                     # npm
        | [rs]k_(?:live|test)_[A-Za-z0-9]{16,}                    # Stripe
        | SG\.[\w-]{16,32}\.[\w-]{16,64}                         # SendGrid
        | eyJ[\w-]{10,}\.eyJ[\w-]{10,}                            # a JSON web token
      )
    | -----BEGIN\ [A-Z\ ]*PRIVATE\ KEY-----
    | ://[^/\s:@]*:[^/\s@]+@                                      # an address with a password
    | [?&](?:[a-z_]*(?:key|token|secret|password)|sig|signature)=[^&\s]{8,}
    """,
    re.VERBOSE,
)

_HEX = re.compile(r"[0-9a-fA-F]{40,}")
"""Older keys of W&B. They are matched as whole words only, because paths often contain hashes."""

_SECRET_NAME = re.compile(
    r"(?:_KEY|APIKEY|(?:^|_)TOKEN|(?:SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL)S?(?:_.*)?)$", re.I
)
_PLACE_NAME = re.compile(r"_(?:FILE|PATH|DIR|URL|NAME|ID)$", re.I)
"""Names that match `_SECRET_NAME` but only say where a secret is, such as SECRET_FILE."""

_NAMES = re.compile(r"oc\.env:\s*(\w+)|[{,]\s*(\w+)\s*:")
"""Names of environment variables that a text reads (oc.env:NAME), and keys of a mapping that is written as text."""

SHORTEST = 8
"""Fewest characters of an environment variable's value for which other texts are searched.

A shorter value may be part of any path by chance.
"""


def looks_secret(text: str) -> bool:
    """Return whether some part of `text` has the form of a key, a token, or a URL with a password."""
    return bool(_SHAPES.search(text)) or any(_HEX.fullmatch(word) for word in re.split(r"[\s,;=\[\]{}'\"]+", text))


def hidden(text: str, environment: Mapping[str, str]) -> str:
    """Return `text` with *** in place of words that look like secrets and of secrets in the environment variables."""
    for value in _secrets_of(environment).values():
        text = text.replace(value, "***")
    return " ".join("***" if looks_secret(word) else word for word in text.split(" "))


def refuse_secrets(settings: Mapping[str, object], environment: Mapping[str, str]) -> None:
    """Raise ConfigError if a text in nested settings is a secret.

    Args:
        environment: environment variables; if the name of one is that of a secret, its value is a secret.

    Raises:
        ConfigError: a text is a secret. The message names its key and does not repeat the text.
    """
    secrets = _secrets_of(environment)
    for key, text in _texts(settings, ""):
        used = [key.split(".")[-1], *(name for names in _NAMES.findall(text) for name in names)]
        names = [*filter(_names_secret, used), *(name for name, value in secrets.items() if value in text)]
        if names or looks_secret(text):
            source = f" ({names[0]})" if names else ""
            raise ConfigError(
                f"{key}: this looks like a secret{source}, and settings are written to files and dashboards. Keep it "
                "in an environment variable or in ~/.netrc."
            )


def refuse_secret_words(words: Iterable[str], environment: Mapping[str, str]) -> None:
    """Raise ConfigError if a word of a command line is a secret, before an error message could repeat that word.

    Raises:
        ConfigError: as `refuse_secrets`.
    """
    for word in words:
        key, _, value = word.partition("=")
        refuse_secrets({key: value} if value else {"a word of the command line": word}, environment)


def _names_secret(name: str) -> bool:
    return bool(_SECRET_NAME.search(name)) and not _PLACE_NAME.search(name)


def _secrets_of(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if len(value) >= SHORTEST and _names_secret(name)}


def _texts(node: object, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, str):
        yield key, node
    elif isinstance(node, Mapping):
        for name, inner in node.items():
            yield from _texts(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(node, list | tuple):
        for inner in node:
            yield from _texts(inner, key)

"""Whether a text looks like a key that nobody else should see.

Settings are written to the run folder, to checkpoints and to dashboards, so none of them may be one. No list of shapes
is complete: this one knows those that the services around training give out, and addresses with a password in them.
Whatever its shape, what stands in a variable or under a key that is called like a secret is one, too.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from zero.errors import ConfigError

_SHAPES = re.compile(
    r"""
      (?<![A-Za-z0-9])(
          wandb_v\d_\w{20,}                                       # Weights & Biases
        | local-[0-9a-f]{40}                                      # the same, a server of one's own
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
"""W&B's older keys. Only as a word of its own: hashes are usual inside paths."""


_CALLED = re.compile(r"(?:_KEY|APIKEY|(?:^|_)TOKEN|(?:SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL)S?(?:_.*)?)$", re.I)
_PLACE = re.compile(r"_(?:FILE|PATH|DIR|URL|NAME|ID)$", re.I)
"""What is called like a secret, and what only says where one is."""

_NAMED = re.compile(r"oc\.env:\s*(\w+)|[{,]\s*(\w+)\s*:")
"""Variables that a text asks for, and keys of a mapping that is written as one."""

LEAST = 8
"""Letters of a variable's value that are looked for inside other texts: a shorter one may be in any path by chance."""

NOTHING: Mapping[str, str] = MappingProxyType({})


def looks_secret(text: str) -> bool:
    """Whether some part of `text` has the shape of a key, a token or a password in an address."""
    return bool(_SHAPES.search(text)) or any(_HEX.fullmatch(word) for word in re.split(r"[\s,;=\[\]{}'\"]+", text))


def hidden(text: str, environment: Mapping[str, str] = NOTHING) -> str:
    """`text` without the words that look secret, and without what the environment keeps."""
    for value in _kept(environment).values():
        text = text.replace(value, "***")
    return " ".join("***" if looks_secret(word) else word for word in text.split(" "))


def refuse_secrets(settings: Mapping[str, object], environment: Mapping[str, str] = NOTHING) -> None:
    """Look at every text in a nested mapping.

    Args:
        environment: variables whose values are secrets where their names say so.

    Raises:
        ConfigError: one looks secret; names its key, and does not repeat it.
    """
    kept = _kept(environment)
    for key, text in _texts(settings, ""):
        named = [key.split(".")[-1], *filter(None, (name for found in _NAMED.findall(text) for name in found))]
        names = [*filter(_is_called_secret, named), *(name for name, value in kept.items() if value in text)]
        if names or looks_secret(text):
            of = f" ({names[0]})" if names else ""
            raise ConfigError(
                f"{key}: this looks like a secret{of}, and settings are written to files and dashboards; keep it in an "
                "environment variable or in ~/.netrc"
            )


def _is_called_secret(name: str) -> bool:
    return bool(_CALLED.search(name)) and not _PLACE.search(name)


def _kept(environment: Mapping[str, str]) -> dict[str, str]:
    """The secrets of an environment by their names."""
    return {name: value for name, value in environment.items() if len(value) >= LEAST and _is_called_secret(name)}


def refuse_secret_words(words: Iterable[str], environment: Mapping[str, str] = NOTHING) -> None:
    """Look at the words of a command line, before anything repeats one that it cannot read.

    Raises:
        ConfigError: as `refuse_secrets`.
    """
    for word in words:
        key, _, value = word.partition("=")
        refuse_secrets({key: value} if value else {"a word of the command line": word}, environment)


def _texts(node: object, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, str):
        yield key, node
    elif isinstance(node, Mapping):
        for name, inner in node.items():
            yield from _texts(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(node, list | tuple):
        for inner in node:
            yield from _texts(inner, key)

"""Whether a text looks like a key that nobody else should see.

Settings are written to the run folder, to checkpoints and to dashboards, so none of them may be one. No list of shapes
is complete: this one knows those that the services around training give out, and addresses with a password in them.
"""

import re
from collections.abc import Iterable, Iterator, Mapping

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


def looks_secret(text: str) -> bool:
    """Whether some part of `text` has the shape of a key, a token or a password in an address."""
    return bool(_SHAPES.search(text)) or any(_HEX.fullmatch(word) for word in re.split(r"[\s,;=\[\]{}'\"]+", text))


def hidden(text: str) -> str:
    """`text` without the words that look secret."""
    return " ".join("***" if looks_secret(word) else word for word in text.split(" "))


def refuse_secrets(settings: Mapping[str, object]) -> None:
    """Look at every text in a nested mapping.

    Raises:
        ConfigError: one looks secret; names its key, and does not repeat it.
    """
    for key, text in _texts(settings, ""):
        if looks_secret(text):
            raise ConfigError(
                f"{key}: this looks like a secret, and settings are written to files and dashboards; keep it in an "
                "environment variable or in ~/.netrc"
            )


def refuse_secret_words(words: Iterable[str]) -> None:
    """Look at the words of a command line, before anything repeats one that it cannot read.

    Raises:
        ConfigError: as `refuse_secrets`.
    """
    for word in words:
        key, _, value = word.partition("=")
        refuse_secrets({key: value} if value else {"a word of the command line": word})


def _texts(node: object, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, str):
        yield key, node
    elif isinstance(node, Mapping):
        for name, inner in node.items():
            yield from _texts(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(node, list | tuple):
        for inner in node:
            yield from _texts(inner, key)

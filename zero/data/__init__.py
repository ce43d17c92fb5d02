"""Where batches come from: `text` (files of a folder as bytes), `tokens` (a file of integers), `synthetic`.

The global batch of a step is a pure function of (seed, step): ranks and microbatches only slice it, so a run that
continues on another world reads the same data. Settings are checked without torch; `open_data` loads it.
"""

from typing import TYPE_CHECKING

from zero.data.source import DataConfig, SyntheticConfig, TextConfig, TokensConfig, check_data

if TYPE_CHECKING:
    from zero.data.windows import Data

__all__ = ["DataConfig", "SyntheticConfig", "TextConfig", "TokensConfig", "check_data", "open_data"]


def open_data(config: DataConfig, seq: int, seed: int) -> "Data":
    """Open what `config` names, for rows of seq + 1 tokens.

    Raises:
        ConfigError: as `check_data`.
    """
    check_data(config, seq)
    if isinstance(config, TextConfig):
        from zero.data.text import open_text

        return open_text(config, seq, seed)
    if isinstance(config, TokensConfig):
        from zero.data.tokens import open_tokens

        return open_tokens(config, seq, seed)
    from zero.data.synthetic import Synthetic

    return Synthetic(config, seq, seed)

"""Sources of data: files as bytes, a file of token numbers, texts with a tokenizer, or synthetic tokens.

A row is a pure function of the seed and its number in the run. Ranks and microbatches take slices of a step's rows, so
a run that continues with another number of ranks or another batch reads the rows that follow. Settings are checked
without torch; `open_data` imports it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from zero.errors import ConfigError
from zero.progress import Progress, silent
from zero.trainer.data.source import (
    ChatConfig,
    DataConfig,
    HFTextConfig,
    TextConfig,
    TokenisedConfig,
    TokensConfig,
    apart,
    check_text,
    check_tokens,
)

if TYPE_CHECKING:
    from zero.distributed.world import World
    from zero.trainer.data.windows import Data


def check_data(config: DataConfig, seq: int, held: str | None = None) -> None:
    """Raise ConfigError unless the data has a row of seq + 1 tokens for training and one for validation.

    Texts of data=hf are tokenised later, so only the tokenizer and the first document, or a dataset's columns, are
    checked.

    Args:
        held: the path of other data for validation.

    Raises:
        ConfigError: the message has one line and names the key as the user types it.
    """
    if held is not None:
        training, validation = apart(config, held)
        check_data(training, seq)
        with _named("val.path"):
            check_data(validation, seq)
        return
    try:
        if isinstance(config, TokenisedConfig) and config.mix is not None:
            for name, (_, source) in config.sources.items():
                with _named(f"data.mix: {name}: path"):
                    check_data(source, seq)
        elif isinstance(config, TextConfig):
            check_text(config, seq + 1)
        elif isinstance(config, TokensConfig):
            check_tokens(config, seq + 1)
        elif isinstance(config, HFTextConfig):
            from zero.trainer.data.tokenised import check_hf

            check_hf(config)
        elif isinstance(config, ChatConfig):
            from zero.trainer.data.chat import check_chats

            check_chats(config)
    except OSError as error:
        raise ConfigError(f"data.{config.name}: {error.filename}: {error.strerror}") from error


@contextmanager
def _named(setting: str) -> Iterator[None]:
    """Name another setting than data.path in an error."""
    try:
        yield
    except ConfigError as error:
        if not str(error).startswith("data.path"):
            raise
        raise ConfigError(f"{setting}{str(error).removeprefix('data.path')}") from error


def open_data(
    config: DataConfig,
    seq: int,
    seed: int,
    world: "World | None" = None,
    progress: Progress = silent,
    *,
    held: str | None = None,
) -> "Data":
    """Open the data of `config`, for rows of seq + 1 tokens.

    Args:
        world: the ranks that call this together, because rank 0 alone tokenises; None: this process alone.
        progress: called with the progress of tokenising.
        held: the path of other data, all of which is for validation; None: a share of `config` is held out.

    Raises:
        ConfigError: as `check_data`.
    """
    if held is not None:
        from zero.trainer.data.mixed import Apart

        return Apart(*(open_data(part, seq, seed, world, progress) for part in apart(config, held)))
    if isinstance(config, TokenisedConfig) and config.mix is not None:
        from zero.trainer.data.mixed import Mixed

        weights, sources = zip(*config.sources.values(), strict=True)
        opened = (open_data(source, seq, seed, world, progress) for source in sources)
        return Mixed(dict(zip(config.mix, opened, strict=True)), weights)
    if isinstance(config, HFTextConfig):
        from zero.trainer.data.tokenised import open_hf

        return open_hf(config, seq, seed, world, progress)
    if isinstance(config, ChatConfig):
        from zero.trainer.data.chat import open_chats

        return open_chats(config, seq, seed, world, progress)
    check_data(config, seq)
    if isinstance(config, TextConfig):
        from zero.trainer.data.text import open_text

        return open_text(config, seq, seed)
    if isinstance(config, TokensConfig):
        from zero.trainer.data.tokens import open_tokens

        return open_tokens(config, seq, seed)
    from zero.trainer.data.synthetic import Synthetic

    return Synthetic(config, seq, seed)

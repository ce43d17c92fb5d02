"""What the data settings mean on disk: which files, which of them are held out, and what must be refused.

No torch here, so that a wrong folder is refused at once. Nothing is read but the first bytes of each file.
"""

import codecs
import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from zero.errors import ConfigError
from zero.trainer.data.tokenizer import Tokenizer

HEAD_BYTES = 8000  # how much of a file decides whether it is text; git looks at as much


def _check_holdout(holdout: float) -> None:
    if not 0 < holdout <= 0.5:
        raise ConfigError(f"data.holdout={holdout} must be above 0 and at most 0.5")


def _check_vocab(vocab: int) -> None:
    if vocab < 1:
        raise ConfigError(f"data.vocab={vocab} must be at least 1")


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """Every text file under a folder; a token is a byte, files are joined by a zero byte."""

    name: Literal["text"] = "text"
    folder: str | None = None
    """None: the sources of Python's standard library."""
    skip: tuple[str, ...] = ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test")
    """Names of folders to leave out; those that begin with a dot always are."""
    holdout: float = 0.05
    """Share of the files kept for validation, chosen by a hash of their paths; of one file, its end."""

    def __post_init__(self) -> None:
        _check_holdout(self.holdout)

    @property
    def root(self) -> Path:
        return Path(sysconfig.get_path("stdlib") if self.folder is None else self.folder).expanduser()

    @property
    def vocab(self) -> int:
        return 256


@dataclass(frozen=True, kw_only=True)
class TokensConfig:
    """A file of unsigned integers in this machine's byte order, never read whole."""

    name: Literal["tokens"] = "tokens"
    path: str
    dtype: Literal["uint16", "uint32"] = "uint16"
    vocab: int
    """Number of tokens; a larger one in the file is an error."""
    validation_path: str | None = None
    """A second file of the same kind; None: the end of the first."""
    holdout: float = 0.05
    """Share at the end of `path` kept for validation when there is no second file."""

    def __post_init__(self) -> None:
        _check_holdout(self.holdout)
        _check_vocab(self.vocab)
        if self.dtype not in ("uint16", "uint32"):
            raise ConfigError(f"data.dtype={self.dtype} must be one of uint16, uint32")

    @property
    def item_bytes(self) -> int:
        return 2 if self.dtype == "uint16" else 4

    def lengths(self) -> tuple[int, int]:
        """Tokens for training and for validation."""
        paths = (self.path, *([] if self.validation_path is None else [self.validation_path]))
        train, *held = (Path(path).expanduser().stat().st_size // self.item_bytes for path in paths)
        end = round(train * self.holdout)
        return (train, held[0]) if held else (train - end, end)


@dataclass(frozen=True, kw_only=True)
class SyntheticConfig:
    """Rows that count upwards by a stride of their own: no files, learnt in a few dozen steps."""

    name: Literal["synthetic"] = "synthetic"
    vocab: int = 256

    def __post_init__(self) -> None:
        _check_vocab(self.vocab)


@dataclass(frozen=True, kw_only=True)
class HFTextConfig:
    """Texts for a tokenizer of Hugging Face; its tokens are made once and kept."""

    name: Literal["hf"] = "hf"
    path: str
    """A folder of text and JSONL files, one such file, or a folder that `datasets.save_to_disk` made."""
    column: str = "text"
    """Of a JSONL file and of `datasets`: where the text is."""
    tokenizer: str
    """A tokenizer.json, or a folder with one."""
    end: str | None = None
    """The token after each document; None: as the tokenizer's settings say."""
    holdout: float = 0.05
    """Share of the documents kept for validation."""
    cache: str | None = None
    """Folder of the tokens; None: in the user's own cache."""

    def __post_init__(self) -> None:
        _check_holdout(self.holdout)

    @property
    def root(self) -> Path:
        return Path(self.path).expanduser()

    @property
    def cached(self) -> Path:
        if self.cache is not None:
            return Path(self.cache).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "functional-zero" / "tokens"

    @property
    def vocab(self) -> int:
        """Read from the tokenizer's file.

        Raises:
            ConfigError: there is none.
        """
        return Tokenizer(self.tokenizer, self.end).vocab


DataConfig = TextConfig | TokensConfig | SyntheticConfig | HFTextConfig


def drawn(octets: bytes) -> float:
    """A number in [0, 1) that depends on nothing else."""
    return int.from_bytes(hashlib.sha256(octets).digest()[:6], "big") / 2**48


class TextFile(NamedTuple):
    """One text file below the root."""

    path: Path
    key: str
    """Path below the root, with forward slashes."""
    size: int

    @property
    def draw(self) -> float:
        """A number in [0, 1) that depends on the key alone: adding files moves no other file."""
        return drawn(os.fsencode(self.key))


class Split(NamedTuple):
    """Whole files for training and for validation; `tail` bytes at the end of the only file when there is one."""

    train: list[TextFile]
    held: list[TextFile]
    tail: int = 0


def _is_text(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if not head or b"\0" in head:
        return False
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return True


def text_files(config: TextConfig) -> Iterator[TextFile]:
    """The text files below the root, in one order on every machine. Files that cannot be read are an OSError."""
    root = config.root
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name not in config.skip and not name.startswith("."))
        for name in sorted(files):
            path = Path(folder, name)
            if path.is_file() and _is_text(path):
                yield TextFile(path, path.relative_to(root).as_posix(), path.stat().st_size)


def split_files(files: list[TextFile], holdout: float) -> Split:
    """Hold out each file whose draw is below `holdout`, but always at least one and never all."""
    if len(files) == 1:
        return Split(files, [], tail=max(1, round(files[0].size * holdout)))
    by_draw = sorted(file.draw for file in files)
    below = min(max(holdout, by_draw[1]), by_draw[-1]) if files else holdout
    return Split([file for file in files if file.draw >= below], [file for file in files if file.draw < below])


def check_text(config: TextConfig, row: int) -> None:
    """Refuse a folder that cannot give one row for training and one for validation."""
    root = config.root
    if not root.exists():
        raise ConfigError(f"data.folder={root} does not exist; give a folder with text files")
    if not root.is_dir():
        raise ConfigError(f"data.folder={root} is not a folder; give the folder that it is in")
    files, train, held = [], 0, 0
    for file in text_files(config):
        files.append(file)
        if file.draw < config.holdout:
            held += file.size
        else:
            train += file.size
        if min(train, held) > row:
            return  # a large folder is not walked to its end
    if not files:
        raise ConfigError(f"data.folder={root} holds no text file (not looking into {', '.join(config.skip)})")
    split = split_files(files, config.holdout)
    train = sum(file.size for file in split.train) - split.tail
    check_length(f"data.folder={root}", train, sum(file.size for file in split.held) + split.tail, row)


def check_tokens(config: TokensConfig, row: int) -> None:
    """Refuse files that hold something else, or too little."""
    for key, path in (("path", config.path), ("validation_path", config.validation_path)):
        if path is None:
            continue
        file = Path(path).expanduser()
        if not file.is_file():
            raise ConfigError(f"data.{key}={path} is not a file; give a file of {config.dtype} tokens")
        if file.stat().st_size % config.item_bytes:
            raise ConfigError(
                f"data.{key}={path} has {file.stat().st_size} bytes, "
                f"not a multiple of {config.item_bytes}: it does not hold {config.dtype}"
            )
    check_length(f"data.path={config.path}", *config.lengths(), row)


def check_length(what: str, train: int, held: int, row: int) -> None:
    """Refuse fewer tokens than one row, for training or for validation."""
    for share, length in (("training", train), ("validation", held)):
        if length < row:
            raise ConfigError(
                f"{what} leaves {length} tokens for {share}, fewer than one row of {row}; "
                "give more data, another data.holdout or a smaller model.seq"
            )

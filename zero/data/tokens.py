"""Tokens made elsewhere: a file of uint16 or uint32, mapped into memory, of which only the rows used are read."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from zero.data.source import TokensConfig
from zero.data.windows import Windows

BLOCK_BYTES = 64 * 1024
BLOCKS = 256


def _map(path: str, config: TokensConfig) -> Tensor:
    file = Path(path).expanduser()
    size = file.stat().st_size // config.item_bytes
    # shared=False maps privately: the file is opened for reading only
    return torch.from_file(str(file), shared=False, size=size, dtype=getattr(torch, config.dtype))


def file_digest(path: Path) -> str:
    """SHA-256 of the length and of 256 blocks of 64 KiB spread over the file: all of it up to 16 MiB."""
    size = path.stat().st_size
    digest = hashlib.sha256(size.to_bytes(8, "little"))
    last = max(0, size - BLOCK_BYTES)
    with path.open("rb") as file:
        for start in sorted({last * block // (BLOCKS - 1) for block in range(BLOCKS)}):
            file.seek(start)
            digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()


def decode_numbers(tokens: Tensor) -> str:
    """The numbers themselves: what they stand for is known only to whoever made the file."""
    return " ".join(str(token) for token in tokens.tolist())


def open_tokens(config: TokensConfig, seq: int, seed: int, decode: Callable[[Tensor], str] = decode_numbers) -> Windows:
    """Map the file or files. The digest is `file_digest` of each."""
    train = _map(config.path, config)
    digests = [file_digest(Path(config.path).expanduser())]
    if config.validation_path is None:
        cut = train.numel() - round(train.numel() * config.holdout)
        train, held = train[:cut], train[cut:]
        digests.append(str(cut))
    else:
        held = _map(config.validation_path, config)
        digests.append(file_digest(Path(config.validation_path).expanduser()))
    return Windows(
        train,
        held,
        seq=seq,
        seed=seed,
        vocab_size=config.vocab,
        digest=hashlib.sha256(" ".join(digests).encode()).hexdigest(),
        decode=decode,
    )

"""Data of data=text: all text files as bytes, loaded into memory."""

import hashlib

import torch
from torch import Tensor

from zero.trainer.data.files import Split, TextFile, split_files, text_files
from zero.trainer.data.source import TextConfig
from zero.trainer.data.windows import Windows

END_OF_FILE = b"\0"  # marks the end of a file for the model; text files have no NUL near their start


def _join(files: list[TextFile]) -> bytearray:
    joined = bytearray()
    for file in files:
        joined += file.path.read_bytes() + END_OF_FILE
    return joined


def _read(split: Split) -> tuple[bytearray, bytearray]:
    train, held = _join(split.train), _join(split.held)
    if split.tail:
        cut = len(train) - split.tail - len(END_OF_FILE)
        train, held = train[:cut], train[cut:]
    return train, held


def decode_bytes(tokens: Tensor) -> str:
    """Decode tokens as UTF-8 bytes; invalid bytes, and tokens above 255, become the replacement character."""
    return bytes(min(token, 255) for token in tokens.tolist()).decode("utf-8", errors="replace")


def open_text(config: TextConfig, seq: int, seed: int) -> Windows:
    """Load all text as uint8 tensors. The digest covers every byte, and the split into training and validation."""
    train, held = _read(split_files(list(text_files(config.root, config.skip)), config.holdout))
    digest = hashlib.sha256(len(train).to_bytes(8, "little") + train + held).hexdigest()
    tokens, held_tokens = map(_as_tensor, (train, held))
    return Windows(tokens, held_tokens, seq=seq, seed=seed, vocab_size=256, digest=digest, decode_tokens=decode_bytes)


def _as_tensor(octets: bytearray) -> Tensor:
    return torch.frombuffer(octets, dtype=torch.uint8) if octets else torch.empty(0, dtype=torch.uint8)

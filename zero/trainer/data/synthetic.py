"""Synthetic data: each row counts upwards by a stride, modulo the vocabulary; two tokens determine the others."""

import hashlib

import torch
from torch import Tensor

from zero.errors import ConfigError
from zero.trainer.data.order import draw
from zero.trainer.data.source import SyntheticConfig
from zero.trainer.data.windows import Data, decode_numbers

STRIDES = 8
VALIDATION_ROWS = 1024


class Synthetic(Data):
    """An implementation of `Data` that computes rows on demand."""

    def __init__(self, config: SyntheticConfig, seq: int, seed: int) -> None:
        self.vocab_size = config.vocab
        self.validation_rows = VALIDATION_ROWS
        self.digest = hashlib.sha256(f"synthetic {config.vocab} {STRIDES}".encode()).hexdigest()
        self._seed, self._row = seed, seq + 1

    def rows(self, start: int, stop: int) -> Tensor:
        return self._rows("train", self._seed, range(start, stop))

    def validation(self, index: int, rows: int) -> Tensor:
        numbers = range(index * rows, (index + 1) * rows)
        return self._rows("validation", 0, [number % VALIDATION_ROWS for number in numbers])

    def rows_of_epochs(self, count: int) -> int:
        raise ConfigError("data=synthetic has no end, so epochs means nothing. Set steps.")

    has_text, about = False, ""

    def decode(self, tokens: Tensor) -> str:
        return decode_numbers(tokens)

    def _rows(self, what: str, seed: int, numbers: range | list[int]) -> Tensor:
        first = [draw(seed, row, self.vocab_size, what=f"{what} first") for row in numbers]
        stride = [1 + draw(seed, row, STRIDES, what=f"{what} stride") for row in numbers]
        position = torch.arange(self._row)
        return (torch.tensor(first).reshape(-1, 1) + torch.tensor(stride).reshape(-1, 1) * position) % self.vocab_size

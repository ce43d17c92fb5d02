"""The data of data=chat: rows of whole chats from a file of tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from zero.trainer.data.chat.encoder import TRAINS_BIT
from zero.trainer.data.chat.packing import PackedRows
from zero.trainer.data.rows import coded, tokens_of, trains_of
from zero.trainer.data.tokens import TokenFile
from zero.trainer.data.windows import Data


class ChatPlace(NamedTuple):
    """A chat in the file: its first token and the number of its tokens, cut to a row."""

    start: int
    length: int


@dataclass(eq=False)
class Chats(Data):
    """An implementation of `Data` on the chats of a file.

    Args:
        file: tokens as uint32, with `TRAINS_BIT`.
        train, held: the chats for training and for validation.
        packed: whether a row has several chats.
        pad: the token behind the last chat of a row.
        about: a text about the chats.
        all_lengths: the numbers of tokens of all chats, also of those that are left out, before they are cut.
        has_turns: whether a chat has roles, and is not a prompt with its completion.
    """

    file: TokenFile
    train: Sequence[ChatPlace]
    held: Sequence[ChatPlace]
    seq: int
    seed: int
    packed: bool
    pad: int
    vocab_size: int
    digest: str
    decode_tokens: Callable[[Tensor], str]
    about: str
    all_lengths: Sequence[int]
    has_turns: bool
    has_text: bool = True

    def __post_init__(self) -> None:
        capacity = self.seq + 1 if self.packed else None
        self._train = PackedRows([place.length for place in self.train], capacity, self.seed)
        self._held = PackedRows([place.length for place in self.held], capacity, None)
        self.validation_rows = self._held.of_epochs(1)

    def rows(self, start: int, stop: int) -> Tensor:
        return self._stacked([self._row(self.train, self._train.row(row)) for row in range(start, stop)])

    def validation(self, index: int, rows: int) -> Tensor:
        numbers = (number % self.validation_rows for number in range(index * rows, (index + 1) * rows))
        return self._stacked([self._row(self.held, self._held.row(number)) for number in numbers])

    def decode(self, tokens: Tensor) -> str:
        return self.decode_tokens(tokens_of(tokens))

    def example(self) -> list[tuple[str, bool]]:
        row = torch.cat([self._document(self.train[document]) for document in self._train.row(0)])  # without padding
        trains = trains_of(row)
        starts = [0, *(torch.nonzero(trains[1:] != trains[:-1]).flatten() + 1).tolist(), len(row)]
        return [(self.decode(row[begin:end]), bool(trains[begin])) for begin, end in pairwise(starts)]

    def prompt(self, longest: int) -> tuple[Tensor, int | None]:
        chat = self._document(self.held[0])
        return tokens_of(chat[: int(trains_of(chat).nonzero()[0])])[None, -longest:], self.pad

    def lengths(self) -> Sequence[int]:
        return self.all_lengths

    def rows_of_epochs(self, count: int) -> int:
        """Return the number of training rows in `count` epochs."""
        return self._train.of_epochs(count)

    def _stacked(self, rows: Sequence[Tensor]) -> Tensor:
        return torch.stack([*rows]) if rows else torch.empty(0, self.seq + 1, dtype=torch.int64)

    def _row(self, places: Sequence[ChatPlace], documents: Sequence[int]) -> Tensor:
        """Return (seq + 1,) the row of the documents, padded by tokens that do not train."""
        parts = [self._document(places[document]) for document in documents]
        missing = self.seq + 1 - sum(map(len, parts))
        padding = torch.full((missing,), self.pad)
        return torch.cat([*parts, coded(padding, torch.zeros(missing, dtype=torch.bool), torch.arange(missing))])

    def _document(self, place: ChatPlace) -> Tensor:
        numbers = self.file.read(place.start, place.length).view(torch.int32).long() & 0xFFFFFFFF
        trains = (numbers & TRAINS_BIT) != 0
        trains[0] = False  # nothing before it predicts it
        return coded(numbers & (TRAINS_BIT - 1), trains, torch.arange(place.length))

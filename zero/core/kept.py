"""The forms in which a run keeps master and moments: an update opens them in fp32 and writes them back."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property

import torch
from torch import Tensor

from zero.core.layout import Piece
from zero.core.master import Master
from zero.core.moments import Moments, permutation
from zero.core.optim import Transform


class Kept:
    """The forms in which a run keeps the state that it updates.

    Args:
        master: of the precision.
        optimizer: says how its moments are kept.
    """

    def __init__(self, master: Master, optimizer: Transform) -> None:
        self._master = master
        self._moments: dict[str, Moments] = {kind: optimizer.form(kind) for kind in optimizer.moments}

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtypes of pages by kind: of the part of the master that is kept, if any, and of the moments."""
        master = {} if self._master.kind is None else {self._master.kind: self._master.dtype}
        return master | {kind: form.dtype for kind, form in self._moments.items()}

    def numel(self, kind: str, count: int) -> int:
        """Return the elements of a page of one kind for `count` parameters."""
        return self._moments[kind].numel(count) if kind in self._moments else count

    @cached_property
    def draws(self) -> bool:
        """Writing back takes random bits, so `opened` needs each element's place."""
        return any(form.draws for form in self._moments.values())

    def prepare(self, device: torch.device) -> None:
        """Make the tensor of random bits on `device`, before several threads or streams could each make one."""
        if self.draws:
            permutation(device)

    @contextmanager
    def opened(
        self, params: Sequence[Tensor], kept: Sequence[Sequence[Tensor]], places: Sequence[Sequence[Piece]], step: int
    ) -> Iterator[list[Sequence[Tensor]]]:
        """Yield the master and each moment in fp32, to be updated in place; then write them back.

        Args:
            params: some (K,) tensors in the dtype of compute, which follow their master.
            kept: for each of them its pages of the same elements, in the order of `dtypes`.
            places: for each of them its pieces of parameters; empty where nothing is drawn.
            step: of the update, from 1.
        """
        by_kind = dict(zip(self.dtypes, zip(*kept, strict=True), strict=True))
        with ExitStack() as stack:
            pages = by_kind.pop(str(self._master.kind), ())
            opened = [stack.enter_context(self._master.opened(params, pages))]
            for kind, form in self._moments.items():
                opened.append(stack.enter_context(form.opened(by_kind[kind], places, f"{step}/{kind}")))
            yield opened

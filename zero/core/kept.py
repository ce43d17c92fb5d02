"""Storage formats of a run's master and moments: an update decodes them to fp32 and encodes the results."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from zero.core.layout import Layout, Slot, SlotPiece
from zero.core.master import Master
from zero.core.moments import Moments, permutation
from zero.core.updates import PageUpdate


class Pass(NamedTuple):
    """One pass of an update over all elements of a unit, page by page. Matrices take two passes, all else one."""

    update: PageUpdate
    kept: "Kept"
    reads_grad: bool = True
    """False: the gradients of the pass are the orthogonal directions."""
    updates_params: bool = True
    """False: the pass writes directions in place of parameters."""
    factor: Callable[[Slot], float] | None = None
    """The factor of the learning rate for each parameter; None: 1."""

    @property
    def reads_params(self) -> bool:
        """Whether the pass reads parameters, if it updates them, and does not only write them."""
        return self.updates_params and self.kept.master.reads_params

    def segments(
        self, layout: Layout, start: int, stop: int, settings: Mapping[str, int]
    ) -> list[tuple[int, int, tuple[int, float]]]:
        """Split [start, stop) of a flat where settings or factor change: (start, stop, (index of settings, factor)).

        Args:
            settings: as in `Layout.segments`.
        """
        factor = self.factor
        if factor is None:
            return [(a, b, (number, 1.0)) for a, b, number in layout.segments(start, stop, settings)]
        return [(a, b, (slot.group, factor(slot))) for slot, a, b in layout.extents(start, stop)]


class Kept:
    """The storage formats of the state that a run updates: master and moments.

    Args:
        master: the storage format of the master.
        moments: the storage format of each moment, by name.
    """

    def __init__(self, master: Master, moments: Mapping[str, Moments]) -> None:
        self.master, self.moments = master, moments

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Dtypes of pages by kind of state: the stored part of the master, if there is one, and each moment."""
        master = {} if self.master.kind is None else {self.master.kind: self.master.dtype}
        return master | {kind: form.dtype for kind, form in self.moments.items()}

    def numel(self, kind: str, count: int) -> int:
        """Return the number of elements in a page of `kind` that stores the state of `count` parameters."""
        return self.moments[kind].numel(count) if kind in self.moments else count

    @cached_property
    def draws(self) -> bool:
        """Whether encoding takes random bits, which depend on each element's parameter and index."""
        return any(form.draws for form in self.moments.values())

    def keys(self, step: int) -> list[int]:
        """Return the seeds of the random bits of each moment in update `step`."""
        return [form.key(f"{step}/{kind}") for kind, form in self.moments.items()]

    def prepare(self, device: torch.device) -> None:
        """Create the table of random bits on `device` now, so that threads or streams do not each create one later."""
        if self.draws:
            permutation(device)

    @contextmanager
    def opened(
        self,
        params: Sequence[Tensor],
        kept: Sequence[Sequence[Tensor]],
        places: Sequence[Sequence[SlotPiece]],
        step: int,
    ) -> Iterator[list[Sequence[Tensor]]]:
        """Yield the master and each moment as fp32 tensors to be updated in place, then encode them into their pages.

        Args:
            params: (K,) tensors in the dtype of compute, which are rounded from the updated master.
            kept: for each of `params`, the pages of the same elements, in the order of `dtypes`.
            places: for each of `params`, the pieces of parameters that it consists of; empty if `draws` is False.
            step: the number of the update, from 1; part of the seed of random bits.
        """
        by_kind = dict(zip(self.dtypes, zip(*kept, strict=True), strict=True))
        with ExitStack() as stack:
            pages = by_kind.pop(str(self.master.kind), ())
            opened = [stack.enter_context(self.master.opened(params, pages))]
            for kind, form in self.moments.items():
                opened.append(stack.enter_context(form.opened(by_kind[kind], places, f"{step}/{kind}")))
            yield opened

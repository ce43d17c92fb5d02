"""Which unit's gradient is reduced next, known to every rank beforehand.

A rank may take a path of its own through the model: a branch that others leave out, another number of layers, a second
backward. Reductions must be the same ones in the same order all the same. So units take turns, round after round: a
unit that is ready early waits for its turn, and one that this rank has no use for sends zeros.

At a step's end ranks exchange how many turns they took and in which order their units were ready. Whoever took
fewer takes part in the rest, and the next step's turns follow the order that was seen: where all ranks take one path no
unit ever waits. Every rank takes as many turns as the last step had, unasked. Who has to wait for a turn beyond those
says so first, and those that are at the step's end already join in.

Ranks also meet in the middle of a step, where gradients are read or forgotten. How many turns there are from one
meeting to the next is learned for each of them.

Source: Li et al. 2020, "PyTorch Distributed", section 3.2.3, for the order of buckets that ranks must share.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

REMEMBERED_STEPS = 16
"""How long a unit that no rank uses any more keeps its turn between others: each costs a reduction of zeros."""


class Turns:
    """The turns of one rank; all ranks' are the same.

    Args:
        units: those that train, in the order of the plan. The first step's turns go backward, as backward does.
        expected: rounds of the first step.

    Attributes:
        taken: turns since the step began.
        agreed: turns that every rank will have taken when they meet.
        rounds: of the last step, the one it ended in counted; None before there was one.
        any_used: some rank used some unit, as of the last reports.
    """

    def __init__(self, units: Sequence[int], expected: int) -> None:
        self._units = tuple(units)
        self._order = self._next_order = self._units[::-1]
        self._since = 0  # turns as of the last meeting
        self._places = {unit: float(len(units) - number) for number, unit in enumerate(units)}
        self._idle = dict.fromkeys(units, 0)  # steps since a rank used it
        self._used: dict[int, int] = {}  # by unit: its number in the order of those that were ready in this step
        self._ready: set[int] = set()
        self._expected = [expected * len(units)]  # by meeting of a step: turns since the one before, in the last step
        self._met: list[int] = []  # the same in this step
        self._ready_at: list[list[int]] | None = None  # when units were ready, by rank, as of the last meeting
        self.taken, self.agreed = 0, self._expected[0]
        self.rounds: int | None = None
        self._last_needed: int | None = None
        self.any_used = False

    def begin(self) -> None:
        """A step starts, or starts again."""
        if self._met:
            self._expected, self._met = self._met, []
        if self._ready_at is not None:
            self._learn(self._ready_at)
            self._ready_at = None
        if self._last_needed is not None:
            self.rounds = -(-self._last_needed // len(self._order))
        self.forget()

    def forget(self) -> None:
        """What was taken is void; the step goes on."""
        self._order = self._next_order
        self._used.clear()
        self._ready.clear()
        self.taken, self.any_used = 0, False
        self.go_on()

    def go_on(self) -> None:
        """All ranks have taken what they agreed on."""
        self._since = self.taken
        following = self._expected[len(self._met) :]
        self.agreed = self.taken + (following[0] if following else 0)

    def ready(self, unit: int) -> None:
        """Nothing more comes for `unit` in this round, as far as this rank can tell."""
        self._used.setdefault(unit, len(self._used))
        self._ready.add(unit)

    def is_ready(self, unit: int) -> bool:
        """Return whether the unit waits for its turn."""
        return unit in self._ready

    @property
    def is_due(self) -> bool:
        """The unit whose turn is next is ready."""
        return bool(self._order) and self._order[self.taken % len(self._order)] in self._ready

    def take(self) -> tuple[int, int]:
        """Take the next turn, ready or not; returns its unit and the number of its round, from 0."""
        number, at = divmod(self.taken, len(self._order))
        unit = self._order[at]
        self._ready.discard(unit)
        self.taken += 1
        return unit, number

    def needed(self, units: Iterable[int]) -> int:
        """How many turns are taken when each of `units` has had its next one."""
        wanted, count = set(units), len(self._order)
        left = (self.taken + ahead for ahead in range(count, 0, -1))
        return next((taken for taken in left if self._order[(taken - 1) % count] in wanted), self.taken)

    def report(self, needed: int, *, at_end: bool) -> Tensor:
        """What the other ranks have to know: (2 + units,) int32 in host memory.

        Args:
            needed: turns that this rank needs in this step, as far as it knows.
            at_end: nothing more comes on this rank.
        """
        return torch.tensor(
            [at_end, needed, *(self._used.get(unit, -1) for unit in self._units)], dtype=torch.int32, device="cpu"
        )

    def receive(self, reports: Tensor) -> bool:
        """Take in all ranks' reports, (ranks, 2 + units); whether all of them are at the end."""
        ranks: list[list[int]] = reports.tolist()
        needed = max(report[1] for report in ranks)
        self.agreed = max(self.agreed, needed)
        if not all(report[0] for report in ranks):
            return False
        if all(report == ranks[0] for report in ranks):  # all ranks take one path: one report says it all
            ranks = ranks[:1]
        self._ready_at = [report[2:] for report in ranks]
        self.any_used = any(place >= 0 for places in self._ready_at for place in places)
        self._met.append(needed - self._since)
        self._last_needed = needed
        return True

    def _learn(self, ready_at: list[list[int]]) -> None:
        """The next order, from when each unit was ready on each rank, or on one rank for all."""
        for unit, *places in zip(self._units, *ready_at, strict=True):
            used = [place for place in places if place >= 0]
            self._idle[unit] = 0 if used else self._idle[unit] + 1
            if used:
                self._places[unit] = sum(used) / len(used)
        busy = [unit for unit in self._units if self._idle[unit] < REMEMBERED_STEPS]
        idle = [unit for unit in self._units if self._idle[unit] >= REMEMBERED_STEPS]
        self._next_order = (*sorted(busy, key=self._places.__getitem__), *idle)

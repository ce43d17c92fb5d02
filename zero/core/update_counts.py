"""Count the updates of each parameter, because Adam corrects its moments by the number of updates that made them."""

from collections.abc import Iterable, Mapping, Sequence

from zero.core.layout import Slot
from zero.core.optim import Hyper
from zero.core.updates import GroupSettings


class UpdateCounts:
    """The number of updates of each parameter: steps of the run minus steps in which the parameter rested.

    Parameters of a group train and rest together. Their counts differ only after a checkpoint was loaded without the
    moments of some; these parameters get settings of their own, which follow the groups' in `Hyper.groups`.

    Args:
        slots: the trainable parameters, except matrices, whose update does not depend on the count.
        groups: the number of groups.

    Attributes:
        trains: by group: whether it trained in this step.
        settings: name of a parameter -> index of its settings in `Hyper.groups`, if that is not its group.
    """

    def __init__(self, slots: Iterable[Slot], groups: int) -> None:
        self._slots, self.trains = tuple(slots), [True] * groups
        self._rested: list[int] = []  # number of steps, by index of settings
        self._groups: list[int] = []
        self.settings: dict[str, int] = {}
        self.resume({})

    def begin(self) -> None:
        """Begin a step, in which no group has trained."""
        self.trains = [False] * len(self.trains)

    def train(self, groups: Sequence[GroupSettings]) -> None:
        """Note which groups train in the next forward; a group that trains in any forward of a step is updated."""
        self.trains = [before or now.trains for before, now in zip(self.trains, groups, strict=True)]

    def decide(self, hyper: Hyper) -> Hyper:
        """Return `hyper` with the groups that trained in this step, and the number of updates of each."""
        self._rested = [n + (not self.trains[group]) for n, group in zip(self._rested, self._groups, strict=True)]
        rows = zip(self._rested, self._groups, strict=True)
        made = [hyper.groups[group]._replace(trains=self.trains[group], step=hyper.step - n) for n, group in rows]
        return hyper._replace(groups=tuple(made))

    @property
    def rested(self) -> dict[str, int]:
        """The number of steps in which a parameter was not updated, by its name; zeros are left out."""
        each = {slot.name: self._rested[self.settings.get(slot.name, slot.group)] for slot in self._slots}
        return {name: n for name, n in each.items() if n}

    def resume(self, rested: Mapping[str, int]) -> None:
        """Continue with the counts of another run: steps without an update by name of a parameter, 0 if missing."""
        self._groups, self._rested, self.settings = [*range(len(self.trains))], [0] * len(self.trains), {}
        known: dict[int, dict[int, int]] = {}  # group -> number of steps -> index of settings
        for slot in self._slots:
            n, of_group = rested.get(slot.name, 0), known.setdefault(slot.group, {})
            if not of_group:
                of_group[n], self._rested[slot.group] = slot.group, n
            elif n not in of_group:
                of_group[n] = len(self._groups)
                self._groups.append(slot.group)
                self._rested.append(n)
            if of_group[n] != slot.group:
                self.settings[slot.name] = of_group[n]

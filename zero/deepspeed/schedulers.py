"""Who writes the learning rate: a torch scheduler, or the schedule of the config in the same shape.

Either writes into the optimizer's groups after each step that was really made, as in DeepSpeed.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from zero.core.optim import Transform
from zero.deepspeed.optimizers import ParamGroup


class Scheduler(Protocol):
    """What an engine needs of a scheduler; torch's have it."""

    def step(self, *args: Any, **how: Any) -> None: ...

    def get_last_lr(self) -> Sequence[float]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class Scheduled:
    """A schedule of the config, written into groups.

    Args:
        told: says the learning rate and betas of each step, 1 for the first.
        lr: the config's peak, to which a group's own learning rate is compared: a group with half of it keeps half.
            None: every group gets what is told, as in DeepSpeed where the schedule itself names its peak.
        momenta: the schedule moves these, too; else they are the groups' own.
    """

    def __init__(self, groups: Sequence[ParamGroup], told: Transform, lr: float | None, *, momenta: bool) -> None:
        self._groups, self._told, self._momenta = groups, told, momenta
        self._shares = [group["lr"] / lr if lr else 1.0 for group in groups]
        self.made = 0
        self._write()

    def step(self) -> None:
        """One more step was made."""
        self.made += 1
        self._write()

    def get_last_lr(self) -> list[float]:
        return [group["lr"] for group in self._groups]

    get_lr = get_last_lr

    def state_dict(self) -> dict[str, Any]:
        return {"made": self.made}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.made = int(state_dict["made"])
        self._write()

    def _write(self) -> None:
        told = self._told.groups[0](self.made + 1)
        for group, share in zip(self._groups, self._shares, strict=True):
            group["lr"] = told.lr * share
            if self._momenta and "betas" in group:
                group["betas"] = told.betas
            elif self._momenta and "momentum" in group:
                group["momentum"] = told.betas[0]

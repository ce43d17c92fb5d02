"""The record of an optimizer: all that the rest of the program knows of it."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from zero.core.lr_schedule import Schedule
from zero.core.optim import Transform

PLAIN: Mapping[str, Any] = {"maximize": False, "differentiable": False}
"""Settings that all optimizers of torch have, with the only supported values."""


class Rule(NamedTuple):
    """One optimizer."""

    make: Callable[..., Transform]
    """The public function that makes its transform."""
    build: Callable[[Any, Schedule, Schedule | None, Mapping[str, Any]], Transform]
    """Function from the optimizer's settings (see `zero.settings.optimizers`), the learning rate, the momentum of a
    schedule or None, and the arguments that all optimizers have, to its transform."""
    torch_class: type[torch.optim.Optimizer] | None = None
    """The class of torch with the same update."""
    constants: tuple[str, ...] = ()
    """Settings that are equal in all groups of torch's parameter groups."""
    needs: Mapping[str, Any] = {}
    """Settings of torch with one supported value."""

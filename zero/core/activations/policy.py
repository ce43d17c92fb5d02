"""The record of a policy of activations: all that settings, the plan and the engine know of it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


class ActivationPolicy(NamedTuple):
    """A treatment of the tensors that a unit's forward saves for its backward."""

    name: str
    """The value of `zero.activations`."""
    text: str = ""
    """The treatment in a few words, for the text of the setting; "" if the name says it."""
    trades: str = ""
    """The cost and the benefit, a verb and its object, for the same text; "" for none."""
    offloads: bool = False
    """Whether saved tensors are moved to host memory."""
    recomputes: bool = False
    """Whether backward computes the forward again. A module around other units keeps its activations instead."""
    keeps: Callable[[Any, Sequence[Any], Mapping[str, Any]], bool] | None = None
    """A function of an operator and its arguments: whether the recomputation uses the result that forward computed. It
    is called in forward and in the recomputation. None: the recomputation uses no result."""
    not_compiled: str = ""
    """The reason why `zero.compile` is rejected, a verb and its object; "" if it is accepted."""

"""Recorded operations: the calls of torch functions that will make the values of tensors on meta."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero.core.tree import replaced, tensors_in
from zero.engine.meta.function_names import requested

_ELEMENTWISE = frozenset(
    {"normal_", "uniform_", "_no_grad_trunc_normal_", "exponential_", "bernoulli_", "log_normal_", "cauchy_"}
    | {"zero_", "fill_", "constant_", "add_", "sub_", "mul_", "div_", "clamp_", "clamp_min_", "clamp_max_"}
    | {"__iadd__", "__isub__", "__imul__", "__itruediv__"}
)
"""In-place functions that treat every element alike, if their other arguments are numbers."""

next_number = itertools.count().__next__
"""A function that numbers recorded tensors and operations in their order."""


@dataclass(eq=False)
class RecordedRoot:
    """The storage, not allocated yet, of a recorded tensor and its views.

    Attributes:
        shape: the shape of the parameter or of the operation's result that owns the storage.
        kept: whether operations on the storage are recorded.
        begin: the value that the parameter was registered with; None if it had none.
        is_made: whether an operation's result owns the storage, instead of a parameter.
        number: the number of the tensor that covers the whole storage, unique among recorded tensors and operations.
        operations: the recorded operations that create, view or write the storage, in order.
        is_changed: whether an operation writes into the storage.
        whole: numbers of all tensors that cover the whole storage in the shape of the parameter.
    """

    shape: torch.Size
    kept: bool = True
    begin: Tensor | None = None
    is_made: bool = False
    number: int = field(default_factory=next_number)
    operations: "list[RecordedOperation]" = field(default_factory=list)
    is_changed: bool = False
    whole: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self.whole = {self.number}

    @property
    def is_elementwise(self) -> bool:
        """Whether any part of the values can be computed alone."""
        return not self.is_made and all(operation.is_elementwise for operation in self.operations)

    @property
    def is_written(self) -> bool:
        return self.begin is not None or self.is_made or self.is_changed


class Recipe(NamedTuple):
    """A recorded tensor: the root that it is a view of, and its unique number."""

    root: RecordedRoot
    number: int

    @classmethod
    def of(cls, root: RecordedRoot) -> "Recipe":
        return cls(root, root.number)


class RecordedOperation:
    """One recorded call of a torch function.

    Args:
        recipes: the recorded tensors among the arguments, by id.
        within: the root that the call writes into or views; that root's `operations` has this operation. None if the
            call creates new tensors.

    Attributes:
        name: the name of the function.
        number: a counter that orders all recorded calls.
        reads: the roots that the call reads, except `within`.
        made: position of a recorded tensor in the call's result -> the tensor's number.
        is_alias: whether the call returns the whole root once more.
        is_elementwise: whether the call is an alias, or changes each element of the whole root in the same way and
            reads nothing else, so that it can run on a part of the root.
    """

    def __init__(
        self, func: Any, args: Any, kwargs: Any, recipes: Mapping[int, Recipe], within: RecordedRoot | None = None
    ) -> None:
        self.number, self._func, self.name = next_number(), func, requested(func)[0]
        tensors = {id(tensor): tensor for tensor in tensors_in((args, kwargs))}
        with torch._C.DisableTorchFunctionSubclass():
            meta = {key: tensors[key].detach() for key in recipes}
        others = {key: tensor.detach().clone() for key, tensor in tensors.items() if key not in meta}
        self._call = replaced((args, kwargs), meta | others)
        self._numbers = {id(meta[key]): recipe.number for key, recipe in recipes.items()}
        is_whole = within is not None and within.whole.issuperset(self._numbers.values()) and len(self._numbers) == 1
        has_generator = any(isinstance(argument, torch.Generator) for argument in (*args, *kwargs.values()))
        self.is_alias = is_whole and self.name in ("data", "detach")
        self.is_elementwise = self.is_alias or (
            is_whole and self.name in _ELEMENTWISE and not others and not has_generator
        )
        self.reads = [recipe.root for recipe in recipes.values() if recipe.root is not within]
        self.made: dict[int, int] = {}

    def run(self, values: dict[int, Tensor]) -> None:
        """Execute the call on tensors of `values` (tensor number -> tensor) and add its recorded results to them."""
        args, kwargs = replaced(self._call, {key: values[number] for key, number in self._numbers.items()})
        result = tensors_in(self._func(*args, **kwargs))
        values.update({number: result[place] for place, number in self.made.items()})

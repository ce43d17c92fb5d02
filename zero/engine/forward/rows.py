"""Run a recomputed unit on chunks of its rows (`zero.rows`), with the inner activations of one chunk at a time.

Each chunk is a call of its own, recomputed in backward. The unit is gathered once for all chunks. The gradients of each
parameter are added up in fp32, chunk by chunk in row order, and passed on once, in the parameter's dtype. Autograd runs
calls from the last to the first, so forward runs the last rows first.

A row of the outputs has the bits that a call with all rows gives, if the kernels give a row the same bits whatever the
number of rows. A parameter's gradient is a sum over rows, so its last bits depend on the rows of a chunk. It is that of
microbatches of as many rows whose gradients are added up in fp32.

A mode of the user sees the operators that split rows, join them and add gradients up, as a plan's trace does.
"""

from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from enum import Enum
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zero.core.tree import leaves_in, replaced, tensors_in
from zero.distributed.world import World
from zero.engine.forward.graph import RUN_FIRST
from zero.engine.model import Body
from zero.errors import ConfigError
from zero.platform.modes import unobserved

KNOWN = (Tensor, NoneType, bool, int, float, complex, str, Enum, torch.dtype, torch.device, World)
"""Classes of arguments whose rows are known: those of a tensor, or none."""

OF_EVERY_MODULE = frozenset(vars(nn.Module()))

Call = Callable[[Mapping[str, Tensor], Any, Any], Any]
"""A call of a unit with parameters, args and kwargs."""


class Chunks(NamedTuple):
    """The chunks in which a unit runs.

    Attributes:
        rows: the number of rows in a chunk; the last chunk may have fewer.
        name: the unit's name, for messages.
        compared: the unit's body, whose first call is compared with itself on other rows; None to compare none.
    """

    rows: int
    name: str
    compared: Body | None = None

    @unobserved()
    def split_in(self, given: Any) -> list[Tensor]:
        """Return the tensors in args and kwargs that have rows, each once; none if one chunk has all rows.

        They are the first tensor with dimensions, and those with as many rows.

        Raises:
            ConfigError: it is unknown which tensors have rows.
        """
        leaves = leaves_in(given)
        tensors = [*{id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim}.values()]
        if not tensors or len(tensors[0]) <= self.rows:
            return []
        for leaf in leaves:
            if not isinstance(leaf, KNOWN):
                raise self._unknown(f"an argument of class {type(leaf).__name__}", "such as a cache")
        count, *others = tensors[0].shape
        for tensor in tensors[1:]:
            if len(tensor) not in (1, count, *others):
                raise self._unknown(_described(tensor), f"beside {count} rows")
            if len(tensor) == count and count in others:
                raise self._unknown(_described(tensor), f"and {count} is not the number of rows alone")
        return [tensor for tensor in tensors if len(tensor) == count]

    def run(
        self,
        call: Call,
        alone: Call,
        module: nn.Module,
        parameters: Mapping[str, Tensor],
        given: tuple[Any, Any],
        rows: Sequence[Tensor],
    ) -> Any:
        """Run a call chunk by chunk, and return its outputs for all rows.

        Args:
            call: runs a chunk, and recomputes it in backward.
            alone: runs a chunk without recomputation and without changing buffers, for the comparison.
            module: the unit's module.
            given: args and kwargs.
            rows: the tensors in them to split, see `split_in`.

        Raises:
            ConfigError: rows meet, because an output is not one for each row, or forward writes into the module.
        """
        count = len(rows[0])
        if self.compared is not None and not self.compared.compared:
            self.compared.compared = True
            self._compare(alone, parameters, given, rows)
        before, summed = _kept_in(module), _summed(parameters)
        parts = {id(tensor): tensor.split(self.rows) for tensor in rows}
        outputs = [
            call(_shared(*summed), *replaced(given, {key: split[number] for key, split in parts.items()}))
            for number in reversed(range(-(-count // self.rows)))
        ][::-1]
        if written := [name for name, kept in _kept_in(module).items() if before.get(name) != kept]:
            raise self._meet(f"writes {written[0]} in its forward, as batch norm and balancing losses do")
        return self._joined(outputs, count)

    def _joined(self, outputs: Sequence[Any], count: int) -> Any:
        """Return the outputs of all chunks as those of one call."""
        each = [tensors_in(output) for output in outputs]
        counts = [min(self.rows, count - first) for first in range(0, count, self.rows)]
        for tensors, number in zip(each, counts, strict=True):
            for tensor in tensors:
                if not tensor.ndim or len(tensor) != number:
                    raise self._meet(f"returns {_described(tensor)} for {number} rows, as a balancing loss is")
        if len({len(tensors) for tensors in each}) > 1:
            raise self._meet("returns more tensors for some rows than for others")
        return replaced(outputs[0], {id(parts[0]): torch.cat(parts) for parts in zip(*each, strict=True)})

    @unobserved()
    @torch.no_grad()
    def _compare(self, alone: Call, parameters: Mapping[str, Tensor], given: Any, rows: Sequence[Tensor]) -> None:
        """Raise ConfigError if the first row's outputs depend on the rows beside it.

        The unit runs twice on as many rows and with the same random numbers: on its first rows, and on copies of the
        first row in place of the others.
        """
        number = max(self.rows, 2)
        index = rows[0].get_device()
        together, copied = {id(t): t[:number] for t in rows}, {id(t): t[:1].repeat_interleave(number, 0) for t in rows}
        outputs: list[list[Tensor]] = []
        for chunk in (together, copied):
            with torch.random.fork_rng([index] if index >= 0 else []):
                outputs.append(tensors_in(alone(parameters, *replaced(given, chunk))))
        for a, b in zip(*outputs, strict=True):
            if not a.ndim or len(a) != number:
                raise self._meet(f"returns {_described(a)} for {number} rows, as a balancing loss is")
            tolerance = torch.finfo(a.dtype).eps ** 0.5 if a.is_floating_point() else 0
            if (a[0].double() - b[0].double()).norm() > tolerance * a[0].double().norm():
                raise self._meet("computes a row from the rows beside it, as batch norm does")

    def _unknown(self, text: str, why: str) -> ConfigError:
        return ConfigError(
            f"zero.rows={self.rows}: {self.name} gets {text}, {why}, so its rows are unknown. Set zero.rows=0."
        )

    def _meet(self, text: str) -> ConfigError:
        return ConfigError(f"zero.rows={self.rows}: {self.name} {text}, so its rows meet. Set zero.rows=0.")


def _described(tensor: Tensor) -> str:
    return f"a tensor of shape {tuple(tensor.shape)}"


def _kept_in(module: nn.Module) -> dict[str, list[tuple[int, int, Tensor]]]:
    """Return (id, version, tensor) of each tensor that a forward could write or leave, by the name of its place.

    Places are buffers and other attributes of the module, and context variables, in which transformers records router
    logits. The tensor keeps its id from being used again. Values are never compared: ids differ before.
    """
    places = {variable.name: value for variable, value in copy_context().items()}
    for path, part in module.named_modules():
        values = vars(part)
        own = {name: values[name] for name in values.keys() - OF_EVERY_MODULE}
        places |= {f"{path}.{name}".rpartition("module.")[2]: value for name, value in (part._buffers | own).items()}
    kept = {
        name: [(id(tensor), tensor._version, tensor) for tensor in tensors_in(value)]
        for name, value in places.items()
        if isinstance(value, Tensor | list | tuple | dict)
    }
    return {name: tensors for name, tensors in kept.items() if tensors}


class _Sums:
    """The gradients of a unit's parameters, added up in fp32 as chunks deliver them, by number."""

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}

    def add(self, number: int, grad: Tensor) -> None:
        if number in self._sums:
            self._sums[number].add_(grad)
        else:
            wide = torch.promote_types(grad.dtype, torch.float32)
            self._sums[number] = grad.to(wide, copy=True)

    def take(self, number: int, dtype: torch.dtype) -> Tensor | None:
        """Return a sum in `dtype`, and free it; None if no gradient arrived."""
        total = self._sums.pop(number, None)
        return None if total is None else total.to(dtype)


class _Total(torch.autograd.Function):
    """The identity function on the parameters of all chunks; its backward runs after those of all chunks."""

    @staticmethod
    def forward(ctx: Any, sums: _Sums, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.sums, ctx.dtypes = sums, [parameter.dtype for parameter in parameters]
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> Any:
        return None, *(ctx.sums.take(number, dtype) for number, dtype in enumerate(ctx.dtypes))


class _Share(torch.autograd.Function):
    """The identity function on a parameter of one chunk, which adds its gradient to the sum of the chunks."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, sums: _Sums, number: int) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.sums, ctx.number = sums, number
        return parameter.view_as(parameter)

    @staticmethod
    @torch.no_grad()
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if grads[0] is not None:
            ctx.sums.add(ctx.number, grads[0])
        return None, None, None


@unobserved()
def _summed(parameters: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str], _Sums]:
    """Return the parameters for `_shared`, the names of those with an autograd history, and the sums of gradients."""
    names, sums = [name for name, parameter in parameters.items() if parameter.requires_grad], _Sums()
    totals = _Total.apply(sums, *(parameters[name] for name in names)) if names else ()
    return {**parameters, **dict(zip(names, totals, strict=True))}, names, sums


@unobserved()
def _shared(parameters: Mapping[str, Tensor], names: Sequence[str], sums: _Sums) -> dict[str, Tensor]:
    """Return the parameters of one chunk, whose gradients are added to `sums`."""
    shares = {name: _Share.apply(parameters[name], sums, number) for number, name in enumerate(names)}
    for share in shares.values():
        share.grad_fn._set_sequence_nr(RUN_FIRST)
    return {**parameters, **shares}

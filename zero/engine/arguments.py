"""Checks of the arguments of public functions.

Each check raises ConfigError with the correct call, before any work is done. Users mix up plan, state and model easily,
because every training loop has all three.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any

import torch
from torch import Tensor

from zero.core.checks import type_text
from zero.errors import ConfigError

NOTHING_TRAINS = (
    "the loss has no gradient, because it does not depend on a trainable parameter. Compute it with the model that "
    "loss_fn gets, without torch.no_grad() or .detach()."
)


def check_type(value: object, cls: type, call: str, line: str) -> None:
    """Raise ConfigError unless `value` is an instance of `cls`.

    Args:
        call: the name of the called function, as a user writes it, such as "zero.init".
        line: a correct call of that function, for the message.
    """
    if not isinstance(value, cls):
        raise ConfigError(f"{call} takes a {cls.__name__}, not {type_text(value)}. Write {line}")


def check_folder(value: object, call: str, line: str) -> None:
    """Raise ConfigError unless `value`, the second argument of `call`, is a path and not empty.

    Args:
        call: the name of the called function, as a user writes it.
        line: a correct call of that function, for the message.
    """
    if not isinstance(value, str | os.PathLike):
        raise ConfigError(f"{call} takes a folder second, not {type_text(value)}. Write {line}")
    if value == "":
        raise ConfigError(f"{call}: the folder is ''. Write its path, or '.' for the current one.")


def check_function(value: object, key: str, line: str) -> None:
    """Raise ConfigError unless `value`, the argument named `key`, is callable; `line` is a correct call."""
    if not callable(value):
        raise ConfigError(f"{key} is {type_text(value)}. Pass a function that takes (model, microbatch): {line}")


def check_loss_fn(function: Callable[..., Any]) -> None:
    """Raise ConfigError if `function` is a loss of `torch.nn`.

    Such a loss takes outputs and targets, but a `loss_fn` takes a model and a microbatch.
    """
    if str(getattr(function, "__module__", None)).startswith("torch.nn."):
        name = getattr(function, "__name__", type(function).__name__)
        raise ConfigError(
            f"loss_fn is torch's {name}, which does not call the model. "
            "Write def loss_fn(model, batch): ... return loss"
        )


def check_microbatches(value: Any, accumulate: int) -> None:
    """Raise ConfigError unless `value` is a list of `accumulate` microbatches."""
    is_single = isinstance(value, Tensor | Mapping | str) or (isinstance(value, tuple) and type(value) is not tuple)
    if is_single or not (isinstance(value, Sized) and isinstance(value, Iterable)):
        raise ConfigError(f"microbatches is {type_text(value)}. Pass a list of microbatches: step(state, [batch]).")
    if len(value) != accumulate:
        raise ConfigError(
            f"a step takes batch.accumulate={accumulate} microbatches (in Python Plan(accumulate=...)), not "
            f"{len(value)}. Pass one batch, also a tuple of tensors, as [batch]."
        )


def loss_aux_and_count(returned: Any) -> tuple[Tensor, Mapping[str, Any], Any]:
    """Return the loss, the dict of further numbers, and the count of tokens or None that a loss function returned.

    Raises:
        ConfigError: `returned` is neither a loss nor a tuple of a loss, a count, a dict, or both, or the loss has no
            gradient.
    """
    if returned is None:
        raise ConfigError("loss_fn returned None. End it with return loss.")
    loss, *beside = returned if isinstance(returned, tuple) and len(returned) > 1 else (returned,)
    aux = beside.pop() if beside and isinstance(beside[-1], Mapping) else {}
    count = beside.pop() if beside and is_count(beside[-1]) else None
    if beside or isinstance(loss, tuple):
        inside = ", ".join(map(type_text, returned))
        raise ConfigError(
            f"loss_fn returned a tuple ({inside}). Write return loss, or return loss_sum, count for a loss by tokens; "
            'or one of these with a dict behind it: return loss, {"accuracy": accuracy}'
        )
    check_loss(loss)
    if not loss.requires_grad:
        raise ConfigError(NOTHING_TRAINS)
    return loss, aux, count


def is_count(value: object) -> bool:
    """Return whether a value is a number of tokens: an int, or a tensor of integers without dimensions."""
    if isinstance(value, Tensor):
        return value.ndim == 0 and value.dtype in INTEGERS
    return type(value) is int and value >= 0


INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def check_loss(loss: object, line: str = "return {}") -> None:
    """Raise ConfigError unless `loss` is a tensor with one element.

    Args:
        line: correct code for the message, with `{}` in place of the loss.
    """
    if not isinstance(loss, Tensor):
        expression = 'outputs["loss"]' if isinstance(loss, Mapping) else "loss"
        without = ", without .item() or float()" if isinstance(loss, int | float) else ""
        raise ConfigError(
            f"the loss is {type_text(loss)}, but must be a tensor. Write {line.format(expression)}{without}"
        )
    if loss.numel() != 1:
        raise ConfigError(f"the loss has shape {tuple(loss.shape)}. Return a scalar: the mean of the microbatch.")


def numbers_by_name(values: Mapping[str, Any], where: str = "beside the loss") -> dict[str, Tensor]:
    """Return each value as a 0-dim tensor without a gradient; Python numbers become fp64.

    Args:
        where: describes the values in the error message.

    Raises:
        ConfigError: a value is not one real number.
    """
    numbers = {}
    for name, value in values.items():
        try:
            number = value.detach() if isinstance(value, Tensor) else torch.as_tensor(value, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError):
            raise ConfigError(f"{name!r} {where} is {type_text(value)}, but must be a number") from None
        if number.numel() != 1 or number.is_complex():
            dtype = str(number.dtype).removeprefix("torch.")
            raise ConfigError(
                f"{name!r} {where} is {dtype} of shape {tuple(number.shape)}, but must be one real number"
            )
        numbers[name] = number.reshape(())
    return numbers

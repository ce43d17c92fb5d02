"""Checks of arguments that reject the wrong object in one line, before anything is done.

A plan, a state and a model stand beside each other in every loop, and each call takes exactly one of them. Each check
raises ConfigError with the line to write.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any

import torch
from torch import Tensor

from zero.errors import ConfigError

NOTHING_TRAINS = (
    "the loss has no gradient: no parameter that trains is in it; compute it with the model that trains, which loss_fn "
    "is given, without torch.no_grad() or .detach()"
)


def check_type(value: object, cls: type, call: str, line: str) -> None:
    """Reject a value that is not a `cls`.

    Args:
        call: the function, as a user writes it.
        line: a correct call of it.
    """
    if not isinstance(value, cls):
        raise ConfigError(f"{call} takes a {cls.__name__}, and this is {type_text(value)}; write {line}")


def check_folder(value: object, call: str, line: str) -> None:
    """Reject a second argument that is not a path, or is empty; `line` is the call with `folder`."""
    if not isinstance(value, str | os.PathLike):
        raise ConfigError(f"{call} takes a folder second, and this is {type_text(value)}; write {line}")
    if value == "":
        raise ConfigError(f"{call}: the folder is ''. Write its path, or '.' for the current one.")


def check_function(value: object, key: str, line: str) -> None:
    """Reject an argument `key` that cannot be called; `line` is the call that takes it."""
    if not callable(value):
        raise ConfigError(f"{key} is {type_text(value)}; give a function of the model and a microbatch: {line}")


def check_loss_fn(function: Callable[..., Any]) -> None:
    """Reject torch's losses, which are functions of outputs and targets."""
    if str(getattr(function, "__module__", None)).startswith("torch.nn."):
        name = getattr(function, "__name__", type(function).__name__)
        raise ConfigError(
            f"loss_fn is torch's {name}, which does not call the model; "
            "write def loss_fn(model, batch): ... return loss"
        )


def check_microbatches(value: Any, accumulate: int) -> None:
    """Reject a value that is not a list of microbatches, or a list of another length than a step takes."""
    is_single = isinstance(value, Tensor | Mapping | str) or (isinstance(value, tuple) and type(value) is not tuple)
    if is_single or not (isinstance(value, Sized) and isinstance(value, Iterable)):
        raise ConfigError(f"microbatches is {type_text(value)}; pass a list of them: step(state, [batch])")
    if len(value) != accumulate:
        raise ConfigError(
            f"a step takes batch.accumulate={accumulate} microbatches, not {len(value)}; in Python it is "
            "Plan(accumulate=...). One batch, a tuple of tensors too, is passed as [batch]"
        )


def loss_and_aux(returned: Any) -> tuple[Tensor, Mapping[str, Any]]:
    """Return the loss and the numbers beside it from the result of a loss function; reject any other result."""
    if returned is None:
        raise ConfigError("loss_fn returned None; end it with return loss")
    loss: Any = returned
    aux: Mapping[str, Any] = {}
    if isinstance(returned, tuple):
        if len(returned) != 2 or not isinstance(returned[1], Mapping):
            inside = ", ".join(map(type_text, returned))
            raise ConfigError(
                f'loss_fn returned a tuple ({inside}); write return loss, or return loss, {{"accuracy": accuracy}}'
            )
        loss, aux = returned
    check_loss(loss)
    if not loss.requires_grad:
        raise ConfigError(NOTHING_TRAINS)
    return loss, aux


def check_loss(loss: object, line: str = "return {}") -> None:
    """Reject a loss that is not a tensor of one number; `line` is the line to write, with a place for the loss."""
    if not isinstance(loss, Tensor):
        expression = 'outputs["loss"]' if isinstance(loss, Mapping) else "loss"
        without = ", without .item() or float()" if isinstance(loss, int | float) else ""
        raise ConfigError(
            f"the loss is {type_text(loss)}, and it must be a tensor; write {line.format(expression)}{without}"
        )
    if loss.numel() != 1:
        raise ConfigError(f"the loss has shape {tuple(loss.shape)}; it must be a scalar: the mean of the microbatch")


def numbers_by_name(values: Mapping[str, Any], where: str = "beside the loss") -> dict[str, Tensor]:
    """Return each value as 0-dim tensor without a gradient, Python's numbers in fp64; reject other values.

    Args:
        where: which numbers they are, for the message.
    """
    numbers = {}
    for name, value in values.items():
        try:
            number = value.detach() if isinstance(value, Tensor) else torch.as_tensor(value, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError):
            raise ConfigError(f"{name!r} {where} is {type_text(value)}, and it must be a number") from None
        if number.numel() != 1 or number.is_complex():
            dtype = str(number.dtype).removeprefix("torch.")
            raise ConfigError(f"{name!r} {where} is {dtype} of shape {tuple(number.shape)}; it must be one real number")
        numbers[name] = number.reshape(())
    return numbers


def type_text(value: object) -> str:
    """Return the type of a value with its article, for a sentence."""
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    if value is None:
        return "None"
    name = type(value).__qualname__
    return f"{'an' if name[0].lower() in 'aeio' else 'a'} {name}"

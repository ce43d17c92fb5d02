"""What a call got in place of what it takes: refused before anything is done, with the line to write.

A plan, a state and a model stand beside each other in every loop, and each of these calls takes exactly one of them.
"""

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any

import torch
from torch import Tensor, nn

from zero.distributed.world import World
from zero.engine.plan import Plan
from zero.engine.state import State
from zero.engine.totals import NOTHING_TRAINS
from zero.errors import ConfigError


def check_plan(given: object, call: str, line: str) -> None:
    """Refuse what is no plan.

    Args:
        call: the function, as a user writes it.
        line: how it is called with a plan of the name `plan`.

    Raises:
        ConfigError: with that line; where a state was given, with the plan that the state has.
    """
    if isinstance(given, Plan):
        return
    line = line.replace("plan", "state.plan") if isinstance(given, State) else line
    raise ConfigError(f"{call} takes a Plan, and this is {kind_of(given)}; write {line}")


def check_state(given: object, call: str, line: str) -> None:
    """Refuse what is no state.

    Args:
        call: the function, as a user writes it.
        line: how it is called with a state of the name `state`.

    Raises:
        ConfigError: with that line, and with where a state comes from.
    """
    if isinstance(given, State):
        return
    got = kind_of(given)
    if isinstance(given, tuple) and given and isinstance(given[0], State):
        raise ConfigError(
            f"{call} takes a State, and this is {got} with one; write state, metrics = step(state, [batch])"
        )
    first = "state = zero.init(plan, store), and then " if isinstance(given, Plan) else ""
    raise ConfigError(f"{call} takes a State, and this is {got}; write {first}{line}")


def check_world(given: object, call: str, line: str) -> None:
    """Refuse what is no world.

    Args:
        call: the function, as a user writes it.
        line: how it is called with a world of the name `world`.

    Raises:
        ConfigError: with that line.
    """
    if not isinstance(given, World):
        raise ConfigError(f"{call} takes a World first, and this is {kind_of(given)}; write {line}")


def check_folder(given: object, call: str, line: str) -> None:
    """Raise ConfigError unless `given`, the second argument of `call`, is a path that is not empty.

    Args:
        call: the function, as a user writes it.
        line: how it is called with a path of the name `folder`.

    Raises:
        ConfigError: with that line.
    """
    if not isinstance(given, str | os.PathLike):
        raise ConfigError(f"{call} takes a folder second, and this is {kind_of(given)}; write {line}")
    if given == "":
        raise ConfigError(f"{call}: the folder is ''. Write its path, or '.' for the current one.")


def check_function(given: object, key: str, line: str) -> None:
    """Refuse what cannot be called.

    Args:
        key: the argument that it is.
        line: how the function is called that takes it.

    Raises:
        ConfigError: with that line.
    """
    if not callable(given):
        raise ConfigError(f"{key} is {kind_of(given)}; give a function of the model and a microbatch: {line}")


def check_loss_fn(given: Callable[..., Any]) -> None:
    """Refuse what cannot be called with a model and a microbatch, such as torch's own losses of outputs and targets.

    Raises:
        ConfigError: with the line to write.
    """
    right = "write def loss_fn(model, batch): ... return loss"
    name = getattr(given, "__name__", type(given).__name__)
    if str(getattr(given, "__module__", None)).startswith("torch.nn."):
        raise ConfigError(f"loss_fn is torch's {name}, which does not call the model; {right}")
    try:
        signature = inspect.signature(given.forward if isinstance(given, nn.Module) else given)
    except (TypeError, ValueError):  # what is not written in Python may have none
        return
    try:
        signature.bind(None, None)
    except TypeError:
        takes = ", ".join(signature.parameters)
        raise ConfigError(
            f"loss_fn is called with the model and a microbatch, and {name} takes ({takes}); {right}"
        ) from None


def check_microbatches(given: Any, accumulate: int) -> None:
    """Refuse what is no list of microbatches, or one of another length than a step takes.

    Raises:
        ConfigError: with the line to write.
    """
    is_one = isinstance(given, Tensor | Mapping | str) or (isinstance(given, tuple) and type(given) is not tuple)
    if is_one or not (isinstance(given, Sized) and isinstance(given, Iterable)):
        raise ConfigError(f"microbatches is {kind_of(given)}; pass a list of them: step(state, [batch])")
    if len(given) == accumulate:
        return
    if given and isinstance(given, tuple) and all(isinstance(one, Tensor) for one in given):
        raise ConfigError(
            f"microbatches is a tuple of {len(given)} tensors, and a step takes batch.accumulate={accumulate} "
            "microbatches; if it is one batch, pass it in a list: step(state, [batch])"
        )
    raise ConfigError(
        f"a step takes batch.accumulate={accumulate} microbatches, not {len(given)}; in Python it is "
        "Plan(accumulate=...)"
    )


def loss_and_aux(returned: Any) -> tuple[Tensor, Mapping[str, Any]]:
    """What a loss function returned: a loss, or one and a dict of numbers.

    Raises:
        ConfigError: it is neither; with the line to write.
    """
    if returned is None:
        raise ConfigError("loss_fn returned None; end it with return loss")
    loss: Any = returned
    aux: Mapping[str, Any] = {}
    if isinstance(returned, tuple):
        if len(returned) != 2 or not isinstance(returned[1], Mapping):
            inside = ", ".join(kind_of(one) for one in returned)
            raise ConfigError(
                f'loss_fn returned a tuple ({inside}); write return loss, or return loss, {{"accuracy": accuracy}}'
            )
        loss, aux = returned
    check_loss(loss)
    if not loss.requires_grad:
        raise ConfigError(NOTHING_TRAINS)
    return loss, aux


def check_loss(loss: object, write: str = "return {}") -> None:
    """Refuse what has no backward, or begins none from one number.

    Args:
        write: where the loss stands in the line to write.

    Raises:
        ConfigError: with the line to write.
    """
    if isinstance(loss, Mapping):
        right = write.format('outputs["loss"]')
        raise ConfigError(f"the loss is {kind_of(loss)}, and it must be a tensor; write {right}")
    if isinstance(loss, int | float):
        right = write.format("loss")
        raise ConfigError(
            f"the loss is {kind_of(loss)}, and it must be a tensor; write {right}, without .item() or float()"
        )
    if not isinstance(loss, Tensor):
        right = write.format("loss")
        raise ConfigError(f"the loss is {kind_of(loss)}, and it must be a tensor of one number; write {right}")
    if loss.numel() != 1:
        raise ConfigError(f"the loss has shape {tuple(loss.shape)}; it must be a scalar: the mean of the microbatch")


def numbers_by_name(given: Mapping[str, Any], where: str = "beside the loss") -> dict[str, Tensor]:
    """What is logged, each as 0-dim tensor without a gradient; Python's numbers in fp64.

    Args:
        where: which numbers they are, in a message.

    Raises:
        ConfigError: a value is no number, or several; with the line to write.
    """
    found = {}
    for name, value in given.items():
        try:
            number = value.detach() if isinstance(value, Tensor) else torch.as_tensor(value, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError):
            raise ConfigError(f"{name!r} {where} is {kind_of(value)}, and it must be a number") from None
        if number.numel() != 1 or number.is_complex():
            is_what = f"has shape {tuple(number.shape)}" if number.numel() != 1 else "is complex"
            advice = ": write its mean()" if number.numel() > 1 else ""
            raise ConfigError(f"{name!r} {where} {is_what}, and it must be one number{advice}")
        found[name] = number.reshape(())
    return found


def kind_of(given: object) -> str:
    """What something is, as a sentence has it."""
    if isinstance(given, type):
        return f"the class {given.__qualname__}"
    if given is None:
        return "None"
    name = type(given).__qualname__
    return f"{'an' if name[0].lower() in 'aeio' else 'a'} {name}"

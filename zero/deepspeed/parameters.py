"""What DeepSpeed's scripts do with single parameters: the names of `deepspeed.zero` and of its utilities.

A parameter of a model that was taken over knows its engine. Everything here is collective, as it is there.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

from torch import Tensor, nn

from zero.engine.empty import empty
from zero.engine.full import Source, gathered, get_full, set_full
from zero.engine.placeholder import ParameterPlaceholder
from zero.errors import ConfigError, StaleStateError

MOMENTS = {"exp_avg": "mu", "exp_avg_sq": "nu", "momentum_buffer": "mu"}
"""Torch's words for what an optimizer keeps of a parameter, in ours."""


class ZeroParamStatus(Enum):
    """For scripts that compare `ds_status` where there is a `ds_id`: no parameter here has one, each reads as whole."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


@contextmanager
def Init(module: nn.Module | None = None, *ignored: Any, enabled: bool = True, **further: Any) -> Iterator[None]:
    """`zero.empty()`: parameters are made on meta; whatever else DeepSpeed's takes is settled in `zero.initialize`."""
    if module is not None:
        raise ConfigError("zero.Init(module=...): the model is whole already; give it to zero.initialize as it is")
    if not enabled:
        yield
        return
    with empty():
        yield


@contextmanager
def GatheredParameters(
    params: Iterable[Tensor] | Tensor,
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Inside, parameters are whole fp32 tensors on every rank, to read and, on `modifier_rank`, to write.

    Raises:
        ConfigError: an edit without `modifier_rank`, or of a parameter whose engine is still to come.
    """
    held = [
        one
        for one in ([params] if isinstance(params, Tensor) else list(params))
        if isinstance(one, ParameterPlaceholder)
    ]
    if not enabled or not held:
        yield
        return
    modify = False if modifier_rank is None else modifier_rank
    with gathered(_source_of(held[0]), [one.full_name for one in held], modify) as full:
        try:
            for one in held:
                one.whole = full[one.full_name]
            yield
        finally:
            for one in held:
                one.whole = None


def safe_get_full_fp32_param(param: Tensor) -> Tensor | None:
    return _read(param, "param")


def safe_get_full_grad(param: Tensor) -> Tensor | None:
    try:
        return _read(param, "grad")
    except StaleStateError:
        return None


def safe_get_full_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    return _read(param, MOMENTS.get(optim_state_key, optim_state_key))


def safe_set_full_fp32_param(param: Tensor, value: Tensor) -> None:
    set_full(_source_of(param), _name_of(param), value)


def safe_set_full_grad(param: Tensor, value: Tensor) -> None:
    set_full(_source_of(param), _name_of(param), value, "grad")


def safe_set_full_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    set_full(_source_of(param), _name_of(param), value, MOMENTS.get(optim_state_key, optim_state_key))


def register_external_parameter(module: nn.Module, parameter: Tensor) -> None:
    """Nothing to do: whoever reads a parameter gathers it."""


def unregister_external_parameter(module: nn.Module, parameter: Tensor) -> None:
    """Nothing to do."""


@contextmanager
def unwrap_model_for_generation(model: Any, *_: Any, **__: Any) -> Iterator[nn.Module]:
    """The model of an engine, which generates as it is."""
    yield getattr(model, "module", model)


def set_z3_leaf_modules(model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str]) -> list[nn.Module]:
    """Have modules of these classes gathered whole, never in parts: `zero.initialize` hears of it.

    Raises:
        ConfigError: the model has none of a class.
    """
    names = [one if isinstance(one, str) else one.__name__ for one in leaf_module_classes]
    present = {type(module).__name__ for module in model.modules()}
    if unknown := [name for name in names if name not in present]:
        raise ConfigError(f"set_z3_leaf_modules: the model has no module of class {unknown[0]}")
    model.__dict__[LEAVES] = [*vars(model).get(LEAVES, ()), *names]
    return [module for module in model.modules() if type(module).__name__ in names]


LEAVES = "_leaf_classes"
"""Where a model keeps what `set_z3_leaf_modules` was told."""


def _read(param: Tensor, kind: str) -> Tensor | None:
    return get_full(_source_of(param), _name_of(param), kind).to(param.device)


def _source_of(param: Tensor) -> Source:
    engine = param.source() if isinstance(param, ParameterPlaceholder) and param.source is not None else None
    if engine is None:
        raise ConfigError("this parameter belongs to no engine; give its model to zero.initialize first")
    source: Source = engine
    return source


def _name_of(param: Tensor) -> str:
    assert isinstance(param, ParameterPlaceholder)
    return param.full_name

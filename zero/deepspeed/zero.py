"""The functions of `deepspeed.zero`, which make a model on one rank, and read and write full parameters.

All functions are collective, except those about leaf modules.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from enum import Enum
from typing import Any

from torch import Tensor, nn

from zero.distributed.opening import open_default_group
from zero.distributed.rendezvous import rank_of_process
from zero.distributed.world import World
from zero.engine.meta import Unmade, absent
from zero.engine.model import ParameterPlaceholder
from zero.engine.whole import Source, gathered, get_full, set_full
from zero.errors import ConfigError, StaleStateError
from zero.user_loop.full_models import close_full
from zero.user_loop.grads import is_trained

MOMENT_NAMES = {"exp_avg": "mu", "exp_avg_sq": "nu", "momentum_buffer": "mu"}
"""Torch's names of moments -> this library's."""


ZeroParamStatus = Enum("ZeroParamStatus", "AVAILABLE NOT_AVAILABLE INFLIGHT")
"""The values of a parameter's `ds_status`. Parameters have no `ds_status` here, because each can be read in full."""


def Init(
    module: nn.Module | None = None,
    *ignored: Any,
    enabled: bool = True,
    world: World | None = None,
    **others: Any,
) -> AbstractContextManager[None]:
    """Return a context in which rank 0 makes modules as usual, and other ranks make them without values or memory.

    `zero.initialize` then gives every rank its shard of rank 0's values. Until then, on other ranks a write to a
    parameter has no effect, and a read raises an error. In `zero.empty()`, rank 0 needs no memory either.

    Args:
        module: ignored, for compatibility with DeepSpeed; a module that exists keeps its values.
        *ignored: ignored, for compatibility with DeepSpeed; the settings of `zero.initialize` count.
        enabled: False makes modules as usual on every rank.
        world: the ranks; None: those of the environment.
        **others: ignored, for compatibility with DeepSpeed.
    """
    if enabled and world is None:
        open_default_group()
    rank = rank_of_process() if world is None else world.rank
    return absent() if enabled and module is None and rank != 0 else nullcontext()


@contextmanager
def GatheredParameters(
    params: Iterable[Tensor] | Tensor,
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Context manager in which parameters are full fp32 tensors on every rank. Collective.

    Every rank may read them, and `modifier_rank` may write them. Inside the block, all code sees these edits:
    `state_dict()`, a forward without gradients, a save. A single rank may read, run and load a module whose parameters
    are all full.

    Args:
        params: one or several parameters; parameters that belong to no engine are left unchanged. Before
            `zero.initialize` only rank 0 can read and write them.
        modifier_rank: the rank whose writes all ranks get at the end; None: nothing may be written.
        fwd_module: ignored, for compatibility with DeepSpeed.
        enabled: False: the context manager has no effect.

    Raises:
        ConfigError: a parameter was written without `modifier_rank` after `zero.initialize`, or a parameter is already
            in an enclosing block.
    """
    tensors = [params] if isinstance(params, Tensor) else list(params)
    if enabled and modifier_rank and any(isinstance(tensor, Unmade) for tensor in tensors):
        raise ConfigError(
            f"modifier_rank={modifier_rank}: before zero.initialize only rank 0 has the values. Write modifier_rank=0."
        )
    held = [tensor for tensor in tensors if isinstance(tensor, ParameterPlaceholder)]
    if not enabled or not held:
        yield
        return
    if outer := [placeholder.full_name for placeholder in held if placeholder.full_value is not None]:
        raise ConfigError(
            f"{outer[0]} is already in an outer block of GatheredParameters. Leave it out of the inner one."
        )
    modify = False if modifier_rank is None else modifier_rank
    engines = {id(engine): engine for engine in (_home_of(placeholder)[0] for placeholder in held)}
    with ExitStack() as blocks:
        for engine in engines.values():
            of_engine = [placeholder for placeholder in held if _home_of(placeholder)[0] is engine]
            full = blocks.enter_context(gathered(engine, [placeholder.full_name for placeholder in of_engine], modify))
            blocks.callback(close_full, of_engine)
            for placeholder in of_engine:
                placeholder.full_value, placeholder.may_be_edited = full[placeholder.full_name], modify is not False
        yield


def safe_get_full_fp32_param(param: Tensor) -> Tensor | None:
    """Return the fp32 master of `param`, with its shape, on its device; None if it is not trained. Collective."""
    return _read(param, "param")


def safe_get_full_grad(param: Tensor) -> Tensor | None:
    """Return the mean fp32 gradient of `param`, with its shape, on its device; None if it has none. Collective."""
    try:
        return _read(param, "grad")
    except StaleStateError:
        return None


def safe_get_full_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """Return a moment of `param` in fp32, with its shape, on its device; None if it is not trained. Collective.

    Args:
        param: the parameter.
        optim_state_key: exp_avg, exp_avg_sq or momentum_buffer.
    """
    return _read(param, MOMENT_NAMES.get(optim_state_key, optim_state_key))


def safe_set_full_fp32_param(param: Tensor, value: Tensor) -> None:
    """Set the fp32 master of `param` to `value`, a tensor of its shape that is the same on every rank. Collective."""
    set_full(*_home_of(param), value)


def safe_set_full_grad(param: Tensor, value: Tensor) -> None:
    """Set the mean gradient of `param` to `value`, a tensor of its shape that is the same on every rank. Collective."""
    set_full(*_home_of(param), value, "grad")


def safe_set_full_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Set a moment of `param` (see `safe_get_full_optimizer_state`) to `value`, a tensor of its shape. Collective."""
    set_full(*_home_of(param), value, MOMENT_NAMES.get(optim_state_key, optim_state_key))


def register_external_parameter(module: nn.Module, parameter: Tensor) -> None:
    """Do nothing, because a parameter is gathered wherever it is read."""


# Leaf modules. A plan names units by class, so a leaf makes every module of its class a unit.


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Make each module of these classes a unit, whose parameters are gathered together. Call before `zero.initialize`.

    Args:
        model: the model.
        leaf_module_classes: classes, including their subclasses, or names of classes, with or without their module.
        raise_if_not_found: whether to raise ConfigError if the model has no module of these classes.

    Returns:
        The modules of these classes.

    Raises:
        ConfigError: the model has no module of these classes, and `raise_if_not_found` is true.
    """
    classes = list(leaf_module_classes)
    leaves = flag_leaf_modules(model, classes)
    if not leaves and raise_if_not_found:
        names = ", ".join(str(getattr(item, "__name__", item)) for item in classes)
        raise ConfigError(f"set_z3_leaf_modules: the model has no module {names}")
    return leaves


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of `model` that are marked as leaf modules."""
    return [module for module in model.modules() if vars(module).get("_z3_leaf", False)]


def flag_leaf_modules(model: nn.Module, classes: Iterable[type[nn.Module] | str]) -> list[nn.Module]:
    """Mark the modules of these classes as leaf modules, and return them; there may be none."""
    items = list(classes)
    types = tuple(item for item in items if isinstance(item, type))
    names = {item for item in items if isinstance(item, str)}
    leaves = [module for module in model.modules() if isinstance(module, types) or names & _class_names(module)]
    for module in leaves:
        module.__dict__["_z3_leaf"] = True
    return leaves


def _class_names(module: nn.Module) -> set[str]:
    return {type(module).__name__, f"{type(module).__module__}.{type(module).__qualname__}"}


def _read(param: Tensor, part: str) -> Tensor | None:
    engine, name = _home_of(param)
    return get_full(engine, name, part).to(param.device) if is_trained(engine, name) else None


def _home_of(param: Tensor) -> tuple[Source, str]:
    if not isinstance(param, ParameterPlaceholder) or param.source is None or (engine := param.source()) is None:
        raise ConfigError("this parameter belongs to no engine. Give its model to zero.initialize first.")
    return engine, param.full_name

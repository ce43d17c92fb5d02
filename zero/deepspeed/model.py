"""The model that the script passed, after `zero.initialize`: its parameters and its gradients.

A model that was compiled comes first, then the names of `deepspeed.zero` and `deepspeed.utils` for single parameters,
`parameter.grad`, and DeepSpeed's activation checkpointing, which is torch's.
"""

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from enum import Enum
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from zero.distributed.world import World, open_default_group, rank_of_process
from zero.engine.compile import Backend
from zero.engine.empty import Unmade, absent
from zero.engine.full import Source, gathered, get_full, set_full
from zero.engine.placeholder import ParameterPlaceholder
from zero.errors import ConfigError, StaleStateError

MOMENTS = {"exp_avg": "mu", "exp_avg_sq": "nu", "momentum_buffer": "mu"}
"""Torch's names of what an optimizer keeps of a parameter -> this library's."""


# A model that was given to torch.compile before zero.initialize


def uncompiled(model: nn.Module) -> nn.Module:
    """The module that `torch.compile` was given; `model` itself where it was given none."""
    return model._orig_mod if _is_compiled(model) else model  # type: ignore[return-value]


def bypass_compiled(model: nn.Module) -> tuple[Backend, Callable[[], None]]:
    """Have `model` and its parts run uncompiled, because units are compiled instead, where parameters are whole.

    torch's compiler would trace how a unit is gathered. So what it made of a module passes calls on to the module.

    Returns:
        The backend that something was compiled with, False where nothing was; and a function that undoes all of it.
    """
    backend: Backend = False
    undo = ExitStack()
    for module in list(model.modules()):
        if _is_compiled(module):
            backend = backend or _backend(module.dynamo_ctx.callback)  # type: ignore[union-attr]
            undo.callback(setattr, module, "forward", module.forward)
            module.forward = partial(operator.call, module._orig_mod)  # type: ignore[arg-type]
        if module._compiled_call_impl is not None:
            backend = backend or _backend(_closed_over(module._compiled_call_impl, "callback"))
            undo.callback(setattr, module, "_compiled_call_impl", module._compiled_call_impl)
            module._compiled_call_impl = None

    return backend, undo.close


def _is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` made it. Known by its name, so that torch's compiler is not imported."""
    return type(module).__name__ == "OptimizedModule"


def _backend(callback: Any) -> Backend:
    from torch._dynamo.eval_frame import innermost_backend  # it has been imported: something was compiled

    return True if callback is None else innermost_backend(callback)


def _closed_over(function: Callable[..., Any], name: str) -> Any:
    """What `torch.compile` keeps of its arguments in the function that it returns."""
    free = getattr(function, "__code__", None)
    cells = zip(free.co_freevars, getattr(function, "__closure__", ()) or (), strict=False) if free else ()
    return next((cell.cell_contents for own, cell in cells if own == name), None)


# Parameters, by DeepSpeed's names; everything here is collective


ZeroParamStatus = Enum("ZeroParamStatus", "AVAILABLE NOT_AVAILABLE INFLIGHT")
"""For scripts that compare `ds_status` where a parameter has a `ds_id`: none has one here, each reads in full."""


def Init(
    module: nn.Module | None = None,
    *ignored: Any,
    enabled: bool = True,
    world: World | None = None,
    **others: Any,
) -> AbstractContextManager[None]:
    """Inside, rank 0 makes modules as usual, and other ranks make them without values or memory.

    `zero.initialize` gives every rank its part of rank 0's values. Until then all that rank 0 writes counts; writes of
    other ranks have no effect, and reading raises there. `zero.empty()` takes no memory on rank 0 either.

    Args:
        module: for old calls: it keeps its values.
        *ignored: for old calls; `zero.initialize` decides all of it.
        enabled: False makes modules as usual.
        world: the ranks; None: those of the environment.
        **others: for old calls.
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
    """Inside, parameters are full fp32 tensors on every rank, to read and, on `modifier_rank`, to write. Collective.

    Whatever reads them in the block reads the edits: `state_dict()`, a forward without gradients, a save. Modules of
    which all parameters are full may be read, run and loaded by one rank alone.

    Args:
        params: one or several; those that belong to no engine are left as they are. Before `zero.initialize` only
            rank 0 reads and writes them.
        modifier_rank: the rank whose writes all ranks get at the end; None: nothing may be written.
        fwd_module: for old calls; it has no effect.
        enabled: False has no effect.

    Raises:
        ConfigError: a write without `modifier_rank`, or parameters of a block around this one.
    """
    tensors = [params] if isinstance(params, Tensor) else list(params)
    if enabled and modifier_rank and any(isinstance(tensor, Unmade) for tensor in tensors):
        raise ConfigError(
            f"modifier_rank={modifier_rank}: before zero.initialize rank 0 alone has the values; write modifier_rank=0"
        )
    held = [tensor for tensor in tensors if isinstance(tensor, ParameterPlaceholder)]
    if not enabled or not held:
        before = [_writes(parameter) for parameter in tensors]
        yield
        if enabled and modifier_rank is None and before != [_writes(parameter) for parameter in tensors]:
            raise ConfigError(
                "GatheredParameters: a parameter was written in the block. Pass modifier_rank=0 to keep it."
            )
        return
    if outer := [placeholder.full_name for placeholder in held if placeholder.full_value is not None]:
        raise ConfigError(f"{outer[0]} is in a block of GatheredParameters already; leave it out of the inner one")
    modify = False if modifier_rank is None else modifier_rank
    engines = {id(engine): engine for engine in (_home_of(placeholder)[0] for placeholder in held)}
    with ExitStack() as blocks:
        for engine in engines.values():
            of_engine = [placeholder for placeholder in held if _home_of(placeholder)[0] is engine]
            full = blocks.enter_context(gathered(engine, [placeholder.full_name for placeholder in of_engine], modify))
            blocks.callback(_close_full, of_engine)
            for placeholder in of_engine:
                placeholder.full_value, placeholder.may_be_edited = full[placeholder.full_name], modify is not False
        yield


def _writes(parameter: Tensor) -> int:
    """Count the writes to a parameter of no engine."""
    return len(parameter.recipe.root.writes) if isinstance(parameter, Unmade) else parameter._version


def _close_full(placeholders: Iterable[ParameterPlaceholder]) -> None:
    for placeholder in placeholders:
        placeholder.full_value, placeholder.may_be_edited = None, False


def safe_get_full_fp32_param(param: Tensor) -> Tensor | None:
    """(shape of the parameter) the fp32 master of `param`, on its device; None if it is not trained. Collective."""
    return _read(param, "param")


def safe_get_full_grad(param: Tensor) -> Tensor | None:
    """(shape of the parameter) fp32, the mean gradient of `param`, on its device; None if there is none. Collective."""
    try:
        return _read(param, "grad")
    except StaleStateError:
        return None


def safe_get_full_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """(shape of the parameter) fp32, a moment of `param`: exp_avg, exp_avg_sq or momentum_buffer. Collective.

    None if the parameter is not trained.
    """
    return _read(param, MOMENTS.get(optim_state_key, optim_state_key))


def safe_set_full_fp32_param(param: Tensor, value: Tensor) -> None:
    """Set the fp32 master of `param` to `value`, which has its shape and is the same on every rank. Collective."""
    set_full(*_home_of(param), value)


def safe_set_full_grad(param: Tensor, value: Tensor) -> None:
    """Set the mean gradient of `param` to `value`, which has its shape and is the same on every rank. Collective."""
    set_full(*_home_of(param), value, "grad")


def safe_set_full_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Set a moment of `param` (see `safe_get_full_optimizer_state`) to `value`, which has its shape. Collective."""
    set_full(*_home_of(param), value, MOMENTS.get(optim_state_key, optim_state_key))


def register_external_parameter(module: nn.Module, parameter: Tensor) -> None:
    """No effect: a parameter is gathered wherever it is read."""


unregister_external_parameter = register_external_parameter


def unwrap_model_for_generation(model: Any, *_: Any, **__: Any) -> AbstractContextManager[nn.Module]:
    """The model of an engine, which can generate as it is."""
    return nullcontext(getattr(model, "module", model))


# Leaf modules. A plan names units by class, so a leaf makes every module of its class a unit.


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Gather modules of these classes as units, never in parts. Call it before `zero.initialize`.

    Args:
        model: the model.
        leaf_module_classes: classes, whose subclasses count, or names of classes, also with their module in front.
        raise_if_not_found: raise where the model has no module of any of them.

    Returns:
        The modules of these classes.

    Raises:
        ConfigError: there is none.
    """
    return _flag_classes(model, list(leaf_module_classes), True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take back `set_z3_leaf_modules`, whose arguments these are."""
    return _flag_classes(model, list(leaf_module_classes), False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """`set_z3_leaf_modules` for modules by their names in `model.named_modules()`; also returns unknown names."""
    modules = dict(model.named_modules())
    names = list(module_names)
    leaves = [modules[name] for name in names if name in modules]
    return _flagged(leaves, flag), _missing([name for name in names if name not in modules], raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """`set_z3_leaf_modules_by_name` for the ends of names."""
    suffixes = tuple(module_name_suffixes)
    leaves = {name: module for name, module in model.named_modules() if name.endswith(suffixes)}
    unknown = [suffix for suffix in suffixes if not any(name.endswith(suffix) for name in leaves)]
    return _flagged(list(leaves.values()), flag), _missing(unknown, raise_if_not_found)


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Make one module a leaf, or not."""
    _flagged([model], flag)


def z3_leaf_module(model: nn.Module) -> bool:
    """Return whether the module is a leaf."""
    return vars(model).get("_z3_leaf", False)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The leaves in `model`."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def _flag_classes(
    model: nn.Module, classes: Sequence[type[nn.Module] | str], flag: bool, raise_if_not_found: bool
) -> list[nn.Module]:
    types = tuple(item for item in classes if isinstance(item, type))
    names = {item for item in classes if isinstance(item, str)}

    def is_meant(module: nn.Module) -> bool:
        kind = type(module)
        return isinstance(module, types) or not names.isdisjoint(
            {kind.__name__, f"{kind.__module__}.{kind.__qualname__}"}
        )

    leaves = [module for module in model.modules() if is_meant(module)]
    _missing([] if leaves else sorted([*names, *(kind.__name__ for kind in types)]), raise_if_not_found)
    return _flagged(leaves, flag)


def _flagged(modules: list[nn.Module], flag: bool) -> list[nn.Module]:
    for module in modules:
        module.__dict__["_z3_leaf"] = flag
    return modules


def _missing(unknown: list[str], raise_if_not_found: bool) -> list[str]:
    if unknown and raise_if_not_found:
        raise ConfigError(f"leaf modules: the model has no module {', '.join(unknown)}")
    return unknown


def _read(param: Tensor, kind: str) -> Tensor | None:
    engine, name = _home_of(param)
    return get_full(engine, name, kind).to(param.device) if _is_trained(engine, name) else None


def _is_trained(engine: Source, name: str) -> bool:
    return any(slot.name == name for unit in engine.state.plan.units for slot in unit.trainable.slots)


def _home_of(param: Tensor) -> tuple[Source, str]:
    """The engine of a parameter, and its name there."""
    if not isinstance(param, ParameterPlaceholder) or param.source is None or (engine := param.source()) is None:
        raise ConfigError("this parameter belongs to no engine; give its model to zero.initialize first")
    return engine, param.full_name


# parameter.grad


class Grads:
    """`parameter.grad` between backward and step: the full mean over the global batch, which may be edited.

    Below stage 2 every rank holds gradients, or gathers them, so it reads as in torch, and what a script writes into it
    counts. From stage 2 on no rank holds full gradients, and reading one is refused.

    Args:
        engine: whose current step it is; not kept alive.
    """

    def __init__(self, engine: Source) -> None:
        self._engine: Source = weakref.proxy(engine)
        self._given: dict[str, tuple[Tensor, Tensor]] = {}  # and a copy, to find edits
        self._outdated: list[tuple[str, weakref.ref[Tensor], Tensor]] = []  # still held by somebody

    def of(self, name: str) -> Tensor | None:
        """(shape of the parameter) fp32, on the device; the same tensor until `take_back`. Collective.

        Raises:
            ConfigError: gradients are sharded.
        """
        plan = self._engine.state.plan
        if not _is_trained(self._engine, name):
            return None
        if plan.stage.gradients:
            raise ConfigError(
                f"{name}.grad: stage {plan.stage.level} shards gradients, and no rank has a full one; read it with "
                "zero.get_full(engine, name, kind='grad'), write it with zero.set_full or in a hook of the parameter"
            )
        if name not in self._given:
            full = get_full(self._engine, name, kind="grad").to(plan.world.device)
            self._given[name] = full, full.clone()
        return self._given[name][0]

    def take_back(self) -> None:
        """Write back what a script has edited. Collective where something was.

        Raises:
            ConfigError: a gradient was edited that another backward has made outdated.
        """
        for name, held, before in self._outdated:
            if (now := held()) is not None and not torch.equal(now, before):
                raise ConfigError(
                    f"{name}.grad was read before another backward, and then edited: that copy is outdated; read again"
                )
        edited = _edited(self._given)
        self._outdate()
        for name, value in edited.items():
            set_full(self._engine, name, value, kind="grad")

    def arriving(self) -> None:
        """More of a gradient arrives, from a backward without `take_back`.

        Raises:
            ConfigError: a gradient was edited.
        """
        for name in _edited(self._given):
            raise ConfigError(
                f"{name}.grad was edited, and loss.backward() would lose the edit; use engine.backward(loss), or "
                "engine.scale(loss).backward()"
            )
        self._outdate()

    def drop(self) -> None:
        """Forget all of them, edits too."""
        self._given.clear()
        self._outdated.clear()

    def _outdate(self) -> None:
        given = [(name, weakref.ref(now)) for name, (now, _) in self._given.items()]
        self._given.clear()  # what lives on is held by the script
        self._outdated += [(name, ref, now.clone()) for name, ref in given if (now := ref()) is not None]


def _edited(given: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    return {name: now for name, (now, before) in given.items() if not torch.equal(now, before)}


# deepspeed.checkpointing


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`, computed again in backward instead of keeping its activations: torch's checkpoint.

    Args:
        function: what to compute.
        *args: its arguments.
        **kwargs: its arguments by name, and torch's options.
    """
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)


non_reentrant_checkpoint = checkpoint


def configure(mpu_: Any = None, *ignored: Any, **others: Any) -> None:
    """No effect: inputs of `checkpoint` stay where they are, in full."""


def is_configured() -> bool:
    """True: `checkpoint` needs no `configure`."""
    return True


def reset() -> None:
    """No effect: nothing is kept between two calls."""

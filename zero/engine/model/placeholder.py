"""Placeholders for the parameters of a sharded model: they have shape and dtype, and gather their values when read."""

import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zero.core.tree import replaced, tensors_in
from zero.engine.memory import storage_address
from zero.engine.meta import Recipe, Unmade, is_meta, requested
from zero.engine.model.read_only import (
    METADATA_ATTRIBUTES,
    call_for_reading,
    reject_writing,
    reject_written,
    version_of,
)
from zero.errors import ConfigError, OutsideUnitError, PlanError

_MEMORY = frozenset({"numpy", "__array__", "__dlpack__", "untyped_storage", "storage"})
"""Attributes and methods that expose a tensor's memory as another object than a tensor."""


NO_GRADIENT = (
    "{}.grad is None, because the gradients of this model are in shards: clip_grad_norm_, GradScaler and zero_grad "
    'have no effect. Clip with optimizer=zero.adamw(lr, clip=1.0), scale with precision="fp16" in the plan, and read '
    "gradients with zero.get_full(step, name, kind='grad')."
)

Hook = Callable[[Tensor], Tensor | None]
"""A gradient hook: it gets the gradient and may return a replacement."""


class ParameterPlaceholder(nn.Parameter):
    """A parameter of a sharded model, without values of its own.

    Its shape, dtype and device are those of the gathered parameter. Reading its values gathers its unit, so every rank
    must read placeholders in the same order. With gradients enabled the result is a view whose gradient is delivered
    like those of the unit, else it is a copy. Writing values raises `OutsideUnitError` with the parameter's name.
    Reading them before `zero.init` has made them raises it too.

    Attributes:
        home: the device of the gathered parameter.
        regather: a function that gathers the unit and returns a view of the parameter; its argument says whether with
            an autograd history. None before there are values.
        gradient: a function that returns the value of `grad`; None if `grad` is always None.
        source: a function that returns the engine of the parameter; None without an engine.
        full_value: the tensor that replaces the parameter in reads and writes inside a block of `GatheredParameters`.
        may_be_edited: whether writes into `full_value` change the parameter.
        recipe: the recorded initialization, see `empty`; None if there is no record.
        hooks: gradient hooks, called in order on this rank's gradient before it is reduced.
        is_constant: whether this is the detached form of the parameter, as `detach` returns it.
        is_part: whether the parameter is the local part of a DTensor, which only the modules of its unit may read.
    """

    full_name: str
    home: torch.device
    regather: Callable[[bool], Tensor] | None
    gradient: Callable[[], Tensor | None] | None
    source: Callable[[], Any] | None
    full_value: Tensor | None
    may_be_edited: bool
    recipe: Recipe | None
    hooks: "OrderedDict[int, Hook]"
    is_constant: bool
    is_part: bool

    @classmethod
    def taken(
        cls, parameter: nn.Parameter, name: str, dtype: torch.dtype, home: torch.device
    ) -> "ParameterPlaceholder":
        """Turn `parameter` into a placeholder in place, so that every reference to it becomes one.

        The placeholder drops the values. The caller can keep `parameter.data` to restore them.

        Args:
            name: the full name of the parameter.
            dtype, home: dtype and device of the gathered parameter.

        Raises:
            PlanError: the parameter has a hook that runs after accumulation.
        """
        if parameter._post_accumulate_grad_hooks:
            raise PlanError(f"parameter {name} has a hook that follows accumulation. Use parameter.register_hook.")
        hooks, parameter._backward_hooks = parameter._backward_hooks or {}, None
        device = torch.device("meta") if is_meta(parameter) else home
        element = torch.full((), torch.nan, dtype=dtype, device=device)
        parameter.grad = None
        with torch._C.DisableTorchFunctionSubclass():
            parameter.data = element.expand(parameter.shape)
        parameter.__class__ = cls  # like torch's lazy parameters
        placeholder = cast(ParameterPlaceholder, parameter)._begin(name, home, vars(parameter).get("recipe"))
        placeholder.hooks.update(hooks)
        with torch._C.DisableTorchFunctionSubclass():
            trains, _ = placeholder.requires_grad, placeholder.requires_grad_(True)  # hooks need requires_grad
            nn.Parameter.register_post_accumulate_grad_hook(placeholder, _pass_on)
            placeholder.requires_grad_(trains)
        return placeholder

    def given_back(self, cls: type[Tensor], values: Tensor) -> None:
        """Turn the placeholder back into a parameter of class `cls` with `values`, in place."""
        hooks, recipe = self.hooks, self.recipe
        with torch._C.DisableTorchFunctionSubclass():
            self.__class__ = cls  # type: ignore[assignment]
            self.data = values
            self._post_accumulate_grad_hooks.clear()  # assigning None alone would leave the hooks in autograd
            self._post_accumulate_grad_hooks = None  # type: ignore[assignment]
        for name in ParameterPlaceholder.__annotations__:
            vars(self).pop(name, None)
        if issubclass(cls, Unmade):
            vars(self)["recipe"] = recipe
        register_hooks(self, hooks)

    def _begin(self, name: str, home: torch.device, recipe: Recipe | None) -> "ParameterPlaceholder":
        self.recipe = recipe
        self.full_name, self.home, self.regather = name, home, None
        self.gradient = self.source = self.full_value = None
        self.hooks = OrderedDict()
        self.is_constant = self.may_be_edited = self.is_part = False
        return self

    @property
    def trains(self) -> bool:
        """The value of `requires_grad`, read without `__torch_function__`.

        This takes a fifth of the time, which matters because it is read for each parameter in each call.
        """
        with torch._C.DisableTorchFunctionSubclass():
            return self.requires_grad

    def register_hook(self, hook: Hook) -> RemovableHandle:
        """Register a gradient hook, as `Tensor.register_hook` does.

        `hook` gets this rank's gradient, the sum over all uses in a backward, and may return a replacement.
        """
        handle = RemovableHandle(self.hooks)
        self.hooks[handle.id] = hook
        return handle

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> NoReturn:
        raise OutsideUnitError(
            f"{self.full_name}: its gradient is accumulated in shards, so no hook can follow that. Use register_hook."
        )

    def through_hooks(self, grad: Tensor) -> Tensor:
        """Call the hooks on a gradient in order, and return the last result."""
        for hook in list(self.hooks.values()):
            result = hook(grad)
            if result is not None and (result.shape != grad.shape or result.dtype != grad.dtype):
                raise RuntimeError(
                    f"a hook of {self.full_name} returned {tuple(result.shape)} of {result.dtype} for a gradient of "
                    f"shape {tuple(grad.shape)} of {grad.dtype}"
                )
            grad = grad if result is None else result
        return grad

    def constant(self) -> "ParameterPlaceholder":
        """Return a detached placeholder for the same parameter."""
        with torch._C.DisableTorchFunctionSubclass():
            made = Tensor._make_subclass(ParameterPlaceholder, self.data, False)._begin(self.full_name, self.home, None)
        made.regather, made.full_value, made.is_constant = self.regather, self.full_value, True
        made.is_part = self.is_part
        return made

    def _local_grad(self) -> Tensor | None:
        return None if self.gradient is None else self.gradient()

    def _set_grad(self, value: Tensor | None) -> None:
        if value is not None or self._local_grad() is not None:
            raise OutsideUnitError(
                f"{self.full_name}.grad cannot be set, because it is in shards. Edit it in place below stage 2, with "
                "zero.set_full(engine, name, value, kind='grad'), or drop all gradients with engine.zero_grad()."
            )

    def value(self, *, constant: bool = False) -> Tensor:
        """Gather the unit and return a view of the parameter, or its full value in a block of `GatheredParameters`.

        The view has an autograd history if the parameter trains and gradients are enabled, unless `constant`.

        Raises:
            OutsideUnitError: the parameter has no values yet, or is a part of a DTensor and not `constant`.
        """
        if (full := self.seen_in_full(constant=constant)) is not None:
            return full
        if self.is_part and not constant:
            raise OutsideUnitError(
                f"{self.full_name} is a DTensor, of which this rank has a part, and was read outside of its unit. Read "
                "the part with zero.gathered or state_dict(), or compute with it in the forward of its module."
            )
        if self.regather is None:
            raise OutsideUnitError(
                f"parameter {self.full_name} has no values yet. Call zero.init or zero.initialize first."
            )
        return self.regather(not constant and self.requires_grad and torch.is_grad_enabled())

    def seen_in_full(self, *, constant: bool = False) -> Tensor | None:
        """Return `full_value` in the dtype and on the device of the gathered parameter, or None.

        None means that the caller has to gather: there is no full value, or the caller needs a gradient and the full
        value cannot have been edited.

        Raises:
            OutsideUnitError: the caller needs a gradient, and the full value may have been edited.
        """
        if self.full_value is None:
            return None
        if not constant and self.trains and torch.is_grad_enabled():
            if self.may_be_edited:
                raise OutsideUnitError(
                    f"{self.full_name} was used with gradients on while its values may be edited. Use it under "
                    "torch.no_grad(), or after the block of GatheredParameters."
                )
            return None
        return self.full_value.detach().to(self.home, self.dtype)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.value(constant=True).detach().clone().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return nn.Parameter(self.value(constant=True).detach().clone(), self.requires_grad)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, (request, is_attribute) = kwargs or {}, requested(func)
        if request in ("device", "is_meta", "is_cuda", "is_cpu"):  # `home`, even if the placeholder is on meta
            home = args[0].home
            return home if request == "device" else home.type == request.removeprefix("is_")
        if request == "grad" and is_attribute:
            if func.__name__ == "__set__":
                return args[0]._set_grad(args[1])
            if args[0].source is None and args[0].trains:
                warnings.warn(NO_GRADIENT.format(args[0].full_name), stacklevel=2)
            return args[0]._local_grad()
        if request == "stride" or request == "is_contiguous":  # the answer for the gathered parameter
            args = (torch.empty(args[0].shape, device="meta"), *args[1:])
        _refuse_gradient(func, request, args, kwargs)
        if request in METADATA_ATTRIBUTES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if full := _full_values_of((args, kwargs)):
            args, kwargs = replaced((args, kwargs), full)
            return func(*args, **kwargs)
        reject_writing(cls, func, request, args, kwargs)
        if request in ("detach", "data"):
            return args[0].constant()
        return _read(func, args, kwargs, clone=request in _MEMORY)


def _pass_on(placeholder: ParameterPlaceholder) -> None:
    """Deliver a gradient that autograd has accumulated in the placeholder itself.

    This happens if a parameter is passed to a custom `torch.autograd.Function`, because `apply` does not call
    `__torch_function__`: autograd then treats the placeholder as a leaf. Kernels that fuse a language model's head with
    its loss work like that.
    """
    with torch._C.DisableTorchFunctionSubclass():
        grad, placeholder.grad = placeholder.grad, None
    with torch.enable_grad():
        view = placeholder.value()
    torch.autograd.backward(view, grad)


def _full_values_of(arguments: Any) -> dict[int, Tensor]:
    """Return the `full_value` of each placeholder among `arguments` that has one, by the placeholder's `id`."""
    return {
        id(tensor): tensor.full_value
        for tensor in tensors_in(arguments)
        if isinstance(tensor, ParameterPlaceholder) and tensor.full_value is not None
    }


def _refuse_gradient(func: Any, request: str, args: Any, kwargs: Any) -> None:
    """Raise OutsideUnitError for `torch.autograd.grad` of a parameter, and for `requires_grad` of a detached one."""
    if func is torch.autograd.grad:
        inputs = tensors_in((args, kwargs))
        name = next(tensor.full_name for tensor in inputs if isinstance(tensor, ParameterPlaceholder))
        raise OutsideUnitError(
            f"torch.autograd.grad by {name}: gradients of parameters leave a backward in shards. Read one between "
            "backward and step with zero.get_full(engine, name, kind='grad'), or differentiate copies that are put in "
            "place with torch.func.functional_call."
        )
    begins = func.__name__ == "__set__" if request == "requires_grad" else request == "requires_grad_"
    if begins and args[0].is_constant and next(iter((*args[1:], *kwargs.values())), True):
        raise OutsideUnitError(
            f"{args[0].full_name}: a detached parameter cannot require a gradient, because its values are in shards. "
            "Use a copy: .detach().clone().requires_grad_()."
        )


def reject_optimizer(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Raise ConfigError if a torch optimizer that holds parameters of a `State` is about to step.

    It is registered by `register_optimizer_step_pre_hook`, so torch calls it before each step of every optimizer.
    """
    for group in optimizer.param_groups:
        parameter = next(iter(group["params"]), None)
        if isinstance(parameter, ParameterPlaceholder) and parameter.source is None:
            raise ConfigError(
                f"a torch optimizer holds {parameter.full_name}, whose gradients are in shards: its step would change "
                "nothing. Write state, metrics = step(state, [batch]) with step = zero.make_step(plan, loss_fn), or "
                "pass the optimizer to zero.initialize."
            )


def _read(func: Any, args: Any, kwargs: Any, *, clone: bool) -> Any:
    """Call `func` with gathered values in place of placeholders.

    Args:
        clone: pass copies of the values, because the result exposes their memory.

    Raises:
        OutsideUnitError: `func` wrote into the values.
    """
    inputs = tensors_in((args, kwargs))
    placeholders = {id(tensor): tensor for tensor in inputs if isinstance(tensor, ParameterPlaceholder)}
    values = {key: placeholder.value() for key, placeholder in placeholders.items()}
    names = {storage_address(value): placeholders[key].full_name for key, value in values.items()}
    operands = {key: value.clone() for key, value in values.items()} if clone else values
    before = {key: version_of(value) for key, value in values.items()}
    args, kwargs = replaced((args, kwargs), operands)
    result = call_for_reading(func, args, kwargs, names, clone_views=True)  # other units reuse the gathered memory
    for key, value in values.items():
        if version_of(value) != before[key]:
            reject_written(placeholders[key].full_name, func.__name__)
    return result


def register_hooks(parameter: Tensor, hooks: Mapping[int, Hook]) -> None:
    for hook in hooks.values():
        parameter.register_hook(hook)


def in_backward() -> bool:
    """Return whether autograd is running a backward pass on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)

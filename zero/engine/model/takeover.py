"""Convert a model to sharded training in place, and back.

Each parameter becomes a `ParameterPlaceholder` but stays the same Python object. When a site is called, it gathers its
units, runs its original forward, and releases them.
"""

import types
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zero.core.suggest import some
from zero.distributed.mesh import Placed, is_dtensor, local_part
from zero.engine.meta import Unmade, is_meta
from zero.engine.model.adapted_parameters import put_in_place
from zero.engine.model.padded_encoder import watch_encoders
from zero.engine.model.placeholder import ParameterPlaceholder, register_hooks, reject_optimizer
from zero.engine.model.read_only import version_of
from zero.engine.model.unit import Site, Splitting
from zero.errors import ConfigError, PlanError, StaleStateError, if_it_fails
from zero.platform.modes import unobserved

BATCH_NORM = nn.BatchNorm1d.forward
"""The forward that torch's batch norms of all dimensions share; buffers of subclasses that override it keep dtypes."""

NOT_PLACED: Mapping[str, Any] = MappingProxyType({})

META, CPU = torch.device("meta"), torch.device("cpu")


class Form(NamedTuple):
    """The class, dtype and device that a tensor had before the model was taken over."""

    type: type[Tensor]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> "Form":
        return cls(type(tensor), tensor.dtype, META if is_meta(tensor) else tensor.device)


class Takeover:
    """The conversion of a model to sharded training.

    Its parameters become placeholders. Buffers move to `device` and keep their dtype, except those of torch's batch
    norm, whose kernel needs statistics and weights of the same dtype.

    Args:
        model: the model, which is changed in place; if an error is raised it is unchanged.
        dtype, device: dtype and device of gathered parameters.
        placed: the placements of parameters that are DTensors, by name. Their local parts become new parameters.

    Raises:
        PlanError: the model is already taken over.
    """

    def __init__(
        self,
        model: nn.Module,
        splitting: Splitting,
        dtype: torch.dtype,
        device: torch.device,
        placed: Mapping[str, Placed] = NOT_PLACED,
    ) -> None:
        refuse_taken(model)
        _watch_optimizers()
        self._model, self._splitting, self._placed = model, splitting, placed
        self._undo, self._detach = ExitStack(), ExitStack()
        self._parameters: dict[str, tuple[ParameterPlaceholder, Form]] = {}
        self._buffers = [
            (module, name, Form.of(buffer))
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        with if_it_fails(self.undo):
            for name in placed:
                dtensor = model.get_parameter(name)
                local = nn.Parameter(local_part(dtensor).detach(), dtensor.requires_grad)
                self._undo.callback(self._exchange, local, dtensor)
                self._exchange(dtensor, local)
            for name in splitting.names:
                parameter, form = model.get_parameter(name), Form.of(model.get_parameter(name))
                values = parameter.data
                placeholder = ParameterPlaceholder.taken(parameter, name, dtype, device)
                self._undo.callback(placeholder.given_back, form.type, values)
                self._parameters[name] = placeholder, form
            for module, name, _ in self._buffers:
                self._undo.callback(module._buffers.__setitem__, name, module._buffers[name])
            move_buffers(model, dtype, device)

    def undo(self) -> None:
        """Restore the original parameters and buffers of the model."""
        self._undo.close()
        self._parameters = {}

    def commit(self) -> None:
        """Free the original values and the recorded initializations; `undo` has no effect afterwards."""
        self._undo.pop_all()
        for placeholder, _ in self._parameters.values():
            placeholder.recipe = None

    def attach(self, run: Callable[[Site], "SiteRun"]) -> None:
        """Replace the call of each site by `run(site)`, see `attach`."""
        self._detach.callback(attach(self._model, self._splitting, run))

    @property
    def is_over(self) -> bool:
        """Whether the model is an ordinary one again."""
        return not self._parameters

    @property
    def forms(self) -> Mapping[str, Form]:
        """The original form of each parameter, by name."""
        return {name: form for name, (_, form) in self._parameters.items()}

    def release(self, values: Mapping[str, Tensor] | None) -> None:
        """Make the model an ordinary one again.

        Parameters and buffers get their original dtype and device, but parameters that were on meta get the CPU. A
        parameter that moves from or to meta becomes a new object, because torch cannot move it in place. Shared buffers
        stay shared.

        Args:
            values: the values of all parameters by name; None: all parameters are put on meta.
        """
        self._detach.close()
        for name, (placeholder, form) in self._parameters.items():
            if values is None:
                value = torch.empty(placeholder.shape, dtype=form.dtype, device=META)
            else:
                value = values[name].to(CPU if form.device == META else form.device, form.dtype)
            cls = nn.Parameter if issubclass(form.type, Unmade) else form.type
            if is_meta(placeholder) == (values is None):
                placeholder.given_back(cls, value)
            else:
                self._give(placeholder, nn.Parameter(value, placeholder.requires_grad))
        for name, placement in self._placed.items():
            local = self._model.get_parameter(name)
            dtensor = nn.Parameter(placement.wrap(local.detach()), local.requires_grad)
            register_hooks(dtensor, local._backward_hooks or {})
            self._exchange(local, dtensor)
        moved: dict[tuple[int, Form], tuple[Tensor, Tensor]] = {}  # keeps the old buffers, so that no id is used again
        for module, name, form in self._buffers:
            buffer = module._buffers.get(name)
            if buffer is not None:
                _, back = moved.setdefault((id(buffer), form), (buffer, buffer.to(form.device, form.dtype)))
                module._buffers[name] = back
        self._parameters = {}

    def _give(self, placeholder: ParameterPlaceholder, parameter: nn.Parameter) -> None:
        register_hooks(parameter, placeholder.hooks)
        self._exchange(placeholder, parameter)

    def _exchange(self, parameter: nn.Parameter, other: nn.Parameter) -> None:
        """Put `other` in place of `parameter` everywhere in the model."""
        for module in self._model.modules():
            for name, held in module._parameters.items():
                if held is parameter:
                    module._parameters[name] = other


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(reject_optimizer)


def refuse_taken(model: nn.Module) -> None:
    """Raise PlanError if `model` is already taken over."""
    if any(isinstance(parameter, ParameterPlaceholder) for parameter in model.parameters()):
        raise PlanError(
            "model: an earlier zero.init or zero.initialize has taken it over. Write copy.deepcopy(model) before "
            "zero.Plan to keep an original, or close that state or engine first."
        )


def move_buffers(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Move buffers to `device`, and those of torch's batch norm to `dtype`. Shared buffers stay shared."""
    moved: dict[int, Tensor] = {}
    for module in model.modules():
        cast = dtype if type(module).forward is BATCH_NORM else None
        for name, buffer in module._buffers.items():
            if buffer is not None:
                moved.setdefault(id(buffer), buffer.to(device, cast if buffer.is_floating_point() else None))
                module._buffers[name] = moved[id(buffer)]


# -- calls of a site ---------------------------------------------------------------------------------------------------


class Body(nn.Module):
    """A wrapper that runs the original call of a site's module. Names of its parameters begin with "module.".

    Attributes:
        compared: whether a call was compared with one on other rows, see `zero.engine.forward.rows`.
    """

    compared = False

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._call = module._compiled_call_impl or module._call_impl

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


SiteRun = Callable[[Body, Any, Any], Any]
"""A function of (body of a site, args, kwargs) that runs a call of the site and returns its outputs."""


def attach(model: nn.Module, splitting: Splitting, run: Callable[[Site], SiteRun]) -> Callable[[], None]:
    """Replace the call of each site of `model` by `run(site)`; return a function that undoes this.

    The user's hooks on a site run inside `run`, with the full parameters in place. `state_dict` returns full values.
    """
    undo = ExitStack()
    for site in splitting.sites:
        module = model.get_submodule(site.path)
        undo.callback(call_through(module, partial(run(site), Body(module))))
    undo.callback(watch_encoders(model, splitting.sites))
    undo.callback(put_in_place(model))
    for owner in splitting.owners:
        hook = model.get_submodule(owner.path).register_state_dict_post_hook(_full_values)
        undo.callback(hook.remove)
    return undo.close


def call_through(module: nn.Module, run: Callable[[Any, Any], Any]) -> Callable[[], None]:
    """Replace the call of `module` by `run(args, kwargs)`, and make copying it raise; return a function to undo this.

    `nn.Module.__call__` calls `self._call_impl`, so an attribute of the instance replaces it, and the class stays.
    """

    def call(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run(args, kwargs)

    def undo() -> None:
        for name in attributes:
            vars(module).pop(name, None)
        vars(module).update(before)

    attributes = {
        "_no_copy": NoCopy(type(module).__name__),
        "_call_impl": types.MethodType(call, module),
        "_compiled_call_impl": None,
    }
    before = {name: vars(module).pop(name) for name in attributes if name in vars(module)}
    vars(module).update(attributes)
    return undo


class NoCopy:
    """An attribute that makes copying or pickling its module raise ConfigError."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ConfigError(
            f"a {self._name} that trains in shards cannot be copied or pickled. Take its values with "
            "model.state_dict() on every rank, or zero.gathered."
        )


@unobserved()
def _full_values(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    """Replace detached placeholders in a state dict by full values on the CPU, in the dtype of compute.

    A hook for `register_state_dict_post_hook`.
    """
    for name, parameter in module._parameters.items():
        if isinstance(parameter, ParameterPlaceholder) and state_dict.get(prefix + name) is not parameter:
            state_dict[prefix + name] = parameter.value(constant=True).detach().to("cpu", copy=True)


def call_with(
    parameters: Mapping[str, Tensor],
    module: nn.Module,
    args: Any,
    kwargs: Any,
    *,
    buffers: Mapping[str, Tensor] | None = None,
    path: str = "",
    check_writes: bool = False,
    placed: Mapping[str, Placed] = NOT_PLACED,
) -> Any:
    """Run `module` with `parameters`, and `buffers` if given, in place of its own.

    Args:
        placed: the placements of parameters that the module sees as DTensors, by their names in `parameters`.
        path: the path of the module in the model, for messages.
        check_writes: also compare the values of parameters before and after, and undo writes.

    Raises:
        StaleStateError: the forward wrote into a parameter or replaced it, which would change only the gathered copy of
            this rank.
    """
    if placed:
        parameters = {name: _as_placed(value, placed.get(name)) for name, value in parameters.items()}
    held = dict(parameters) | dict(buffers or {})
    versions = [version_of(parameter) for parameter in parameters.values()]
    copies = {name: local_part(value).detach().clone() for name, value in parameters.items() if check_writes}
    try:
        return functional_call(module, held, args, kwargs, tie_weights=False)
    finally:
        changed: dict[str, list[str]] = {}
        for (name, parameter), version in zip(parameters.items(), versions, strict=True):
            written = version_of(parameter) != version
            if check_writes and not same_bits(local_part(parameter).detach(), copies[name]):
                local_part(parameter).data.copy_(copies[name])
                written = True
            if written or held[name] is not parameter:
                full_name = f"{path}.{name.rpartition('module.')[2]}".lstrip(".")
                changed.setdefault("written to in place" if written else "replaced", []).append(full_name)
        for what, names in changed.items():
            # parameters of a gathered buffer share one version
            which = f"parameter {names[0]}" if len(names) == 1 else f"one of the parameters {some(names)}"
            raise StaleStateError(
                f"{which} was {what} by a forward, and only the optimizer changes parameters. Keep such a tensor in a "
                "buffer, or write between steps: zero.gathered(state or engine, names, modify=True)."
            )


def _as_placed(value: Tensor, placement: Placed | None) -> Tensor:
    return value if placement is None or is_dtensor(value) else placement.wrap(value)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of equal dtype and shape have equal bits; works for float8, unlike `torch.equal`."""
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the persistent buffers of a model by full name."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }

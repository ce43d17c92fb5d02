"""Take a model over for training in shards, and give it back.

Each parameter becomes a `ParameterPlaceholder`, and stays the object that it is. A site gathers its units when it is
called, runs as it did before, and releases them.
"""

import types
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cache, partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zero.engine.empty import Unmade, is_meta
from zero.engine.placeholder import ParameterPlaceholder, register_hooks, reject_optimizer, version_of
from zero.engine.unit import Site, Splitting
from zero.errors import ConfigError, PlanError, StaleStateError, if_it_fails

BATCH_NORM = nn.BatchNorm1d.forward
"""The forward of all dimensions. A subclass with its own forward chooses its dtype itself."""

META, CPU = torch.device("meta"), torch.device("cpu")


class Form(NamedTuple):
    """The class, dtype and device of a tensor in the given model."""

    type: type[Tensor]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> "Form":
        return cls(type(tensor), tensor.dtype, META if is_meta(tensor) else tensor.device)


class Takeover:
    """A model that trains in shards.

    Buffers move to `device`. They keep their dtype, except those of torch's batch norm, whose kernel takes statistics
    and weights of one dtype only.

    Args:
        model: it is changed; where this raises it is as before.
        dtype, device: of gathered parameters.

    Raises:
        PlanError: the model was taken over already.
    """

    def __init__(self, model: nn.Module, splitting: Splitting, dtype: torch.dtype, device: torch.device) -> None:
        refuse_taken(model)
        _watch_optimizers()
        self._model, self._splitting = model, splitting
        self._undo, self._detach = ExitStack(), ExitStack()
        self._parameters: dict[str, tuple[ParameterPlaceholder, Form]] = {}
        self._buffers = [
            (module, name, Form.of(buffer))
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        with if_it_fails(self.undo):
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
        """Put the given values and buffers back."""
        self._undo.close()
        self._parameters = {}

    def commit(self) -> None:
        """Free the given values and the records of how to make them: `undo` is not possible any more."""
        self._undo.pop_all()
        for placeholder, _ in self._parameters.values():
            placeholder.recipe = None

    def attach(self, run: Callable[[Site], "Run"]) -> None:
        """Have each site run through `run`."""
        self._detach.callback(attach(self._model, self._splitting, run))

    @property
    def is_over(self) -> bool:
        """The model is an ordinary one again."""
        return not self._parameters

    @property
    def forms(self) -> Mapping[str, Form]:
        """Of the given parameters, by name."""
        return {name: form for name, (_, form) in self._parameters.items()}

    def release(self, values: Mapping[str, Tensor] | None) -> None:
        """Make the model an ordinary one again.

        Parameters and buffers get the dtype and device that they were given with; parameters that were given on meta
        are on the CPU, as new objects where torch cannot exchange the memory.

        Args:
            values: of all parameters by name; None: parameters are on meta.
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
                self._exchange(placeholder, nn.Parameter(value, placeholder.requires_grad))
        for module, name, form in self._buffers:
            buffer = module._buffers.get(name)
            if buffer is not None:
                module._buffers[name] = buffer.to(form.device, form.dtype)
        self._parameters = {}

    def _exchange(self, placeholder: ParameterPlaceholder, parameter: nn.Parameter) -> None:
        register_hooks(parameter, placeholder.hooks)
        for module in self._model.modules():
            for name, held in module._parameters.items():
                if held is placeholder:
                    module._parameters[name] = parameter


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(reject_optimizer)


def refuse_taken(model: nn.Module) -> None:
    """Raise PlanError if `model` trains in shards already."""
    if any(isinstance(parameter, ParameterPlaceholder) for parameter in model.parameters()):
        raise PlanError(
            "model: an earlier zero.init or zero.initialize has taken it over. Write copy.deepcopy(model) before "
            "zero.Plan to keep an original, or close that state or engine first."
        )


def move_buffers(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Move buffers to `device`, and those of torch's batch norm to `dtype`. A shared one stays one."""
    moved: dict[int, Tensor] = {}
    for module in model.modules():
        cast = dtype if type(module).forward is BATCH_NORM else None
        for name, buffer in module._buffers.items():
            if buffer is not None:
                moved.setdefault(id(buffer), buffer.to(device, cast if buffer.is_floating_point() else None))
                module._buffers[name] = moved[id(buffer)]


# -- calls of a site ---------------------------------------------------------------------------------------------------


class Body(nn.Module):
    """Calls a site's module as torch did before it was taken over. Names of parameters begin with `module.`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._call = module._compiled_call_impl or module._call_impl

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


Run = Callable[[Body, Any, Any], Any]
"""Takes a site's body and the arguments of its call."""


def attach(model: nn.Module, splitting: Splitting, run: Callable[[Site], Run]) -> Callable[[], None]:
    """Have each site of `model` run through `run`, whichever reference it is called by; returns a function to undo it.

    Hooks of a site run inside, with the full parameters in place. `state_dict` has full values.
    """
    undo = ExitStack()
    for site in splitting.sites:
        module = model.get_submodule(site.path)
        undo.callback(call_through(module, partial(run(site), Body(module))))
    for owner in splitting.owners:
        hook = model.get_submodule(owner.path).register_state_dict_post_hook(_full_values)
        undo.callback(hook.remove)
    return undo.close


def call_through(module: nn.Module, run: Callable[[Any, Any], Any]) -> Callable[[], None]:
    """Send calls of `module` to `run(args, kwargs)`, and reject copies of it; returns a function to undo it.

    torch calls a module by `_call_impl`, here an attribute of the instance. The class stays what it is.
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
    """Raises when the module that has it as an attribute is copied or pickled."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ConfigError(
            f"a {self._name} that trains in shards cannot be copied or pickled; take its values: model.state_dict() on "
            "every rank, or zero.gathered"
        )


def _full_values(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    """Put values on the CPU, in the dtype of compute, into a state dict in place of detached placeholders."""
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
) -> Any:
    """Run `module` with `parameters`, and perhaps `buffers`, in place of its own.

    Args:
        path: where in the model it is, for messages.
        check_writes: compare the values of parameters too, and undo what was written.

    Raises:
        StaleStateError: it wrote into a parameter, or put another tensor in its place. That would change a gathered
            copy, on one rank only.
    """
    held = dict(parameters) | dict(buffers or {})
    versions = {name: version_of(parameter) for name, parameter in parameters.items()}
    copies = {name: parameter.detach().clone() for name, parameter in parameters.items() if check_writes}
    try:
        return functional_call(module, held, args, kwargs, tie_weights=False)
    finally:
        for name, parameter in parameters.items():
            full_name = f"{path}.{name.rpartition('module.')[2]}".lstrip(".")
            written = version_of(parameter) != versions[name]
            if check_writes and not same_bits(parameter.detach(), copies[name]):
                parameter.data.copy_(copies[name])
                written = True
            if written or held[name] is not parameter:
                what = "written to in place" if written else "replaced"
                raise StaleStateError(
                    f"parameter {full_name} was {what} by a forward, and only the optimizer changes parameters. Keep "
                    "such a tensor in a buffer, or write between steps: zero.gathered(state or engine, names, "
                    "modify=True)."
                )


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of one dtype and shape are equal in every bit; torch compares no float8."""
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the persistent buffers of a model by name."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }

"""A model that runs on gathered units: a copy of the user's, or the user's own, taken over.

A `ParameterPlaceholder` takes each parameter's place. A site gathers when it is called, runs as it would have, and
releases.
"""

import copy
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from zero.engine.copyable import made_by_hooks, naming_what_cannot, refuse_own_copies, refuse_shared_memory
from zero.engine.functions import Closures, Held
from zero.engine.placeholder import ParameterPlaceholder, hooks_of, version_of
from zero.engine.unit import Site, Splitting
from zero.errors import ConfigError, StaleStateError, if_it_fails
from zero.platform.files import memory_of

BATCH_NORM = nn.BatchNorm1d.forward
"""All dimensions share it. A subclass with a forward of its own knows itself in what dtype it computes."""


def call_with(
    parameters: Mapping[str, Tensor],
    module: nn.Module,
    args: Any,
    kwargs: Any,
    *,
    buffers: Mapping[str, Tensor] | None = None,
    path: str = "",
    doubted: bool = False,
    watched: bool = False,
) -> Any:
    """Run `module` with `parameters`, and perhaps `buffers`, in place of its own.

    Args:
        path: where in the model it is, for messages.
        doubted: its code may write into parameters without being counted by torch, so their values are compared, and
            what was written is undone.
        watched: they are compared, by a checksum where they are in host memory: a copy would be a unit more.

    Raises:
        StaleStateError: it wrote into a parameter, or put another tensor in its place: that would change a copy, and
            one rank's at that.
    """
    held = dict(parameters) | dict(buffers or {})
    before = {name: (version_of(one), _seen(one, doubted, watched)) for name, one in parameters.items()}
    try:
        return functional_call(module, held, args, kwargs, tie_weights=False)
    finally:
        for name, given in parameters.items():
            own, (version, values) = name.rpartition("module.")[2], before[name]
            if isinstance(values, int) and values != _checksum(given):
                _refuse_change(f"{own} of {path or 'the model'} was written to in place")
            if isinstance(values, Tensor) and not same_bits(given.detach(), values):
                given.data.copy_(values)
                _refuse_change(f"{own} of {path or 'the model'} was written to in place")
            if version_of(given) != version:
                _refuse_change(f"a parameter of {path or 'the model'} was written to in place")
            if held[name] is not given:
                _refuse_change(f"{own} of {path or 'the model'} was replaced")


def _seen(tensor: Tensor, doubted: bool, watched: bool) -> Tensor | int | None:
    """What to compare a parameter with after the call."""
    if watched and not doubted and tensor.is_cpu:
        return _checksum(tensor)
    return tensor.detach().clone() if doubted or watched else None


def _checksum(tensor: Tensor) -> int:
    held = tensor.detach().contiguous()  # held here for as long as its memory is read
    return zlib.crc32(memory_of(held))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of one dtype and shape are equal in every bit; torch compares no float8."""
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _refuse_change(what: str) -> None:
    raise StaleStateError(
        f"{what} by its own forward; only the optimizer changes parameters, so keep such a tensor in a buffer, and "
        "write into parameters between steps: with zero.gathered(state or engine, names, modify=True)"
    )


class Body(nn.Module):
    """Calls a site's module while its parameters are in place; their names begin with `module.`."""

    def __init__(self, module: nn.Module, kind: type[nn.Module]) -> None:
        super().__init__()
        self.module, self.kind = module, kind

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.kind.__call__(self.module, *args, **kwargs)


def detached_copy(model: nn.Module, splitting: Splitting, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A copy of `model` with real buffers, on `device`, and a `ParameterPlaceholder` in place of every parameter.

    Buffers keep their dtype, except torch's batch norm's, whose kernel takes statistics and weights of one dtype only.
    Functions among its attributes and hooks reach the copy where they reached the model; hooks of parameters go along.

    Args:
        dtype: that parameters are gathered in.

    Raises:
        PlanError: what cannot be copied, or would not be a copy: see `functions` and `copyable`.
    """
    refuse_shared_memory(model)
    given = {name: model.get_parameter(name) for name in splitting.names}
    placeholders = {name: ParameterPlaceholder(name, parameter, dtype, device) for name, parameter in given.items()}
    memo: dict[int, Any] = {id(parameter): placeholders[name] for name, parameter in given.items()}
    held = [
        Held(name, "a hook", hook)
        for name, parameter in given.items()
        for kind in hooks_of(parameter)
        for hook in kind.values()
    ]
    closures = Closures(model, held)
    closures.begin(memo)
    for module in model.modules():
        memo |= {id(made): made.detach().clone() for made in made_by_hooks(module).values()}
        cast = dtype if type(module).forward is BATCH_NORM else None
        for buffer in module._buffers.values():
            if buffer is not None and id(buffer) not in memo:  # one of two modules stays one
                with naming_what_cannot(model, memo):
                    copied_buffer = copy.deepcopy(buffer, memo)
                memo[id(buffer)] = copied_buffer.to(device, cast if buffer.is_floating_point() else None)
    with naming_what_cannot(model, memo):
        copied = copy.deepcopy(model, memo)
        closures.end(copied, memo)
        for name, parameter in given.items():
            hooks, afterwards = hooks_of(parameter)
            placeholders[name].hooks.update(closures.carried(hooks, memo))
            placeholders[name].afterwards.update(closures.carried(afterwards, memo))
    refuse_own_copies(model, copied, splitting, placeholders)
    return copied


def take_over(model: nn.Module, splitting: Splitting, dtype: torch.dtype, device: torch.device) -> Callable[[], None]:
    """Do to `model` itself what `detached_copy` does to a copy; returns a function that undoes it.

    Its parameters and buffers stay the objects that they are, where a buffer need not move. What the parameters held,
    and buffers that moved, are kept as long as that function. Where this fails it is undone.
    """
    refuse_shared_memory(model)
    held: list[tuple[ParameterPlaceholder, type[nn.Parameter], Tensor]] = []
    buffers = [(module, dict(module._buffers)) for module in model.modules()]

    def undo() -> None:
        for placeholder, kind, values in held:
            placeholder.given_back(kind, values)
        for module, before in buffers:
            module._buffers.update(before)

    with if_it_fails(undo):
        for name in splitting.names:
            parameter = model.get_parameter(name)
            kind, values = type(parameter), parameter.data
            held.append((ParameterPlaceholder.taken(parameter, name, dtype, device), kind, values))
        for module, before in buffers:
            cast = dtype if type(module).forward is BATCH_NORM else None
            for name, buffer in before.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device, cast if buffer.is_floating_point() else None)
    return undo


Run = Callable[[Body, Any, Any], Any]
"""Takes a site's body and the arguments of its call."""


def attach(model: nn.Module, splitting: Splitting, run: Callable[[Site], Run]) -> None:
    """Have each site of `model` run through `run`, whichever reference it is called by.

    Its class becomes a subclass with another `__call__`, which equals the class that it was. Hooks fire inside, with
    the full parameters in place.
    """
    kinds: dict[type[nn.Module], type[nn.Module]] = {}
    for site in splitting.sites:
        module = model.get_submodule(site.path)
        kind = type(module)
        call_through(module, partial(run(site), Body(module, kind)), kinds)
    for owner in splitting.owners:
        model.get_submodule(owner.path).register_state_dict_post_hook(_full_values)


def call_through(
    module: nn.Module,
    run: Callable[[Any, Any], Any],
    kinds: dict[type[nn.Module], type[nn.Module]] | None = None,
    methods: Mapping[str, Any] | None = None,
) -> Callable[[Any, Any], Any]:
    """Send calls of `module` to `run(args, kwargs)`; returns what was called before.

    Args:
        kinds: classes that were made for others already.
        methods: and properties, in place of its own.
    """
    kind = type(module)
    before = vars(module).get("_called_through") or (lambda args, kwargs: kind.__call__(module, *args, **kwargs))
    module.__dict__["_called_through"] = run
    module.__class__ = ({} if kinds is None else kinds).setdefault(kind, _called_otherwise(kind, methods or {}))
    return before


def _called_otherwise(kind: type[nn.Module], methods: Mapping[str, Any]) -> type[nn.Module]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._called_through(args, kwargs)

    def refuse(self: Any, *_: Any) -> Any:
        raise ConfigError(
            f"a {kind.__name__} that trains in shards cannot be copied or pickled; take its values: model.state_dict() "
            "on every rank, or zero.gathered"
        )

    names: dict[str, Any] = {"__call__": call, "__deepcopy__": refuse, "__reduce_ex__": refuse}
    names |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return _passing_for(kind)(kind.__name__, (kind,), names | dict(methods))


def _passing_for(kind: type) -> type:
    """The metaclass of a class that equals `kind`, as in `type(layer) == nn.Linear`; `is` tells them apart."""
    names = {"__eq__": lambda cls, other: other is cls or other is kind, "__hash__": lambda cls: hash(kind)}
    return type(type(kind).__name__, (type(kind),), names)


def _full_values(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    """Put values on the CPU, in the dtype of compute, into a state dict in place of detached placeholders."""
    for name, parameter in module._parameters.items():
        if isinstance(parameter, ParameterPlaceholder) and state_dict.get(prefix + name) is not parameter:
            state_dict[prefix + name] = parameter.value(constant=True).detach().to("cpu", copy=True)


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """The persistent buffers of a model."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }

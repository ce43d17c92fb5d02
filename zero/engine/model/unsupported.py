"""Reject parts of a model that cannot be sharded, computed in a plan's precision, or saved; name them in the error.

Classes of other libraries are recognized by the name of their Python module, to avoid importing these libraries.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.spectral_norm import SpectralNorm

from zero.core.precision import DTYPES, Precision
from zero.core.suggest import some
from zero.distributed.mesh import is_dtensor
from zero.engine.meta import Unmade, is_meta
from zero.engine.model.adapted_parameters import is_adapted_parameter
from zero.errors import PlanError
from zero.platform.safetensors_files import DTYPE_NAMES

WRAPPERS = (
    ("torch.distributed.fsdp", "which shards it already. Pass the model as it is before FSDP."),
    ("torch.nn.parallel", "which reduces gradients itself. Pass its .module."),
)
"""(Python module of a wrapper's class, end of the error message) for wrappers that are rejected."""

ROUNDED = "Load the model in bf16 or fp32, without quantization_config, load_in_4bit or load_in_8bit"

_ABOUT_DTYPES = re.compile(r"\bdtypes?\b|scalar type|type \(c10::")


def check_model(model: nn.Module) -> None:
    """Raise PlanError, with the name of the part, if a part of `model` cannot be sharded, computed or saved."""
    for path, module in model.named_modules():
        _refuse(f"{path or 'the model'} is a {type(module).__name__}", _faults_of_module(module))
        for name, parameter in module._parameters.items():
            if parameter is not None:
                full_name = f"{path}.{name}".lstrip(".")
                _check_name(full_name)
                _refuse(f"parameter {full_name} of a {type(module).__name__}", _faults_of_parameter(parameter))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                full_name, saved = f"{path}.{name}".lstrip("."), name not in module._non_persistent_buffers_set
                if saved:
                    _check_name(full_name)
                _refuse(f"buffer {full_name}", _faults_of_buffer(buffer, saved=saved))
    _check_memory(model)


Faults = Iterator[tuple[bool, str]]
"""(whether the fault is present, end of the error message) for each fault that a part can have."""


def _refuse(part: str, faults: Faults) -> None:
    for is_there, text in faults:
        if is_there:
            raise PlanError(f"{part}{text}")


def _faults_of_module(module: nn.Module) -> Faults:
    yield (
        isinstance(module, torch.jit.ScriptModule),
        ", which is compiled code with its own parameters. Pass the module that was compiled.",
    )
    tensors = (*module._parameters.values(), *module._buffers.values())
    yield (
        any(tensor is not None and is_lazy(tensor) for tensor in tensors),
        " whose sizes are not known yet. Run one batch through the model before you make the plan.",
    )
    wrapper = cast(Any, module)
    yield (
        is_adapted_parameter(module) and wrapper.parameter_name not in wrapper.get_base_layer()._parameters,
        f" of peft for {getattr(module, 'parameter_name', '')}, which is parametrized. Adapt a linear layer instead.",
    )
    for home, line in WRAPPERS:
        yield type(module).__module__.startswith(home), f", {line}"


def _faults_of_parameter(parameter: nn.Parameter) -> Faults:
    cls, dtype = type(parameter), parameter.dtype
    library = cls.__module__.partition(".")[0]
    yield (
        cls.__name__ == "Params4bit",
        " has codes of bitsandbytes. Write from zero.formats import from_bitsandbytes; weights = "
        'from_bitsandbytes(model), then zero.Plan(..., precision=zero.Precision("bf16", frozen="nf4", '
        "coded=list(weights.codes))) and zero.init(..., weights=weights).",
    )
    is_packed = library == "bitsandbytes" or not (issubclass(cls, nn.Parameter | Unmade) or is_dtensor(parameter))
    yield is_packed, f" is a {cls.__name__} of {library}, whose values zero cannot shard. {ROUNDED}."
    yield (
        dtype.is_complex,
        f" is {dtype}, which zero cannot train. Keep torch.view_as_real of it, and view that as complex in forward.",
    )
    yield dtype == torch.float64, f" is {dtype}, but training keeps at most fp32. Write model.float() first."
    is_narrow = not dtype.is_floating_point or dtype.itemsize < 2
    yield is_narrow, f" is {dtype}. {ROUNDED}, or in your own module register it as a buffer."
    yield parameter.layout is not torch.strided, f" is {parameter.layout}. Make it dense."
    yield bool(parameter._post_accumulate_grad_hooks), " has a hook that follows accumulation. Use register_hook."


def _faults_of_buffer(buffer: Tensor, *, saved: bool) -> Faults:
    yield (
        isinstance(buffer, Unmade),
        " is computed from parameters, which have no values under zero.empty(). Build its module without zero.empty().",
    )
    yield (
        is_meta(buffer),
        " is on meta and has no values. Build the model under zero.empty(), which puts only parameters on meta.",
    )
    form = "nested" if buffer.is_nested else buffer.dtype if buffer.dtype not in DTYPE_NAMES else buffer.layout
    yield (
        saved and form is not torch.strided,
        f" is {form}, which a checkpoint cannot hold. Register it with persistent=False, and compute it in the "
        "constructor.",
    )


def _check_name(name: str) -> None:
    if not name.isprintable():  # also false for lone surrogates, which UTF-8 cannot encode
        raise PlanError(
            f"{name!r} has a character that cannot be printed, as names in a checkpoint must be. Rename it."
        )


def _check_memory(model: nn.Module) -> None:
    """Raise PlanError if a parameter shares memory with another tensor, because its update would miss the other."""
    tensors: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers(), *_attributes(model)):
        tensors.setdefault(id(tensor), (name, tensor))
    by_memory: dict[int, list[tuple[tuple[int, int], int, str, bool]]] = defaultdict(list)
    for place, (name, tensor) in enumerate(tensors.values()):
        if tensor.layout is torch.strided and tensor.numel():
            entry = _extent(tensor), place, name, isinstance(tensor, nn.Parameter)
            by_memory[tensor.untyped_storage()._cdata].append(entry)
    for sharing in by_memory.values():
        ends = {True: (0, 0, ""), False: (0, 0, "")}  # the largest end so far, of parameters and of others
        for (first, last), place, name, is_parameter in sorted(sharing):
            end, other_place, other = max(ends.values()) if is_parameter else ends[True]
            if first < end:
                earlier, later = (name, other) if place < other_place else (other, name)
                raise PlanError(
                    f"{later} and {earlier} are two tensors in the same memory: one would be updated without the "
                    "other. Register the same Parameter twice to tie them, or clone one."
                )
            ends[is_parameter] = max(ends[is_parameter], (last, place, name))


def _attributes(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of tensors that are plain attributes of modules.

    Skip those that torch's older `spectral_norm` computes before each forward.
    """
    for path, module in model.named_modules():
        computed = [hook.name for hook in module._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)]
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and name not in computed:
                yield f"{path}.{name}".lstrip("."), value


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the range of bytes of a tensor in its storage."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = int(tensor.storage_offset())
    return first * tensor.element_size(), (first + reach + 1) * tensor.element_size()


# -- in a forward ------------------------------------------------------------------------------------------------------


def note_dtypes(error: RuntimeError, names: Sequence[str], precision: Precision) -> None:
    """Add a note with the names of a site's parameters to torch's error about dtypes, unless compute is in fp32.

    Args:
        error: an error from a call of the site. If it has a note already (from a nested site), none is added.
        names: the full names of the site's parameters.
    """
    is_noted = bool(getattr(error, "__notes__", ()))
    if precision.compute == torch.float32 or not names or is_noted or not _ABOUT_DTYPES.search(str(error)):
        return
    setting = next(name for name, dtype in DTYPES.items() if dtype == precision.compute)
    error.add_note(
        f"{some(names)} compute in {precision.compute}, by precision={setting} or the config's {setting}. "
        "Cast the input or the weight in the forward, because keep_in_fp32_modules has no effect."
    )

"""Reject, by name, parts of a model that cannot be sharded, computed in a plan's precision, or saved.

Classes of other libraries are recognised by the name of their module, so that nothing is imported for them.
"""

import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from zero.core.precision import DTYPES, Precision
from zero.core.suggest import some
from zero.engine.empty import Unmade, is_meta
from zero.errors import PlanError
from zero.platform.safetensors_files import NAMES

WRAPPERS = (
    ("torch.distributed.fsdp", "which shards it already; pass the model as it is before FSDP"),
    ("torch.nn.parallel", "which reduces gradients itself; pass its .module"),
)
"""The module that a wrapper's class is from -> the rest of the message."""

ROUNDED = "load the model in bf16 or fp32, without quantization_config, load_in_4bit or load_in_8bit"

_ABOUT_DTYPES = re.compile(r"\bdtypes?\b|scalar type|type \(c10::")


def check_model(model: nn.Module) -> None:
    """Raise PlanError, with the name of the part, unless all of `model` can be sharded, computed with and saved."""
    for path, module in model.named_modules():
        _check_module(module, f"{path or 'the model'} is a {type(module).__name__}")
        for name, parameter in module._parameters.items():
            if parameter is not None:
                _check_parameter(parameter, f"{path}.{name}".lstrip("."), type(module).__name__)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                _check_buffer(
                    buffer, f"{path}.{name}".lstrip("."), saved=name not in module._non_persistent_buffers_set
                )
    _check_memory(model)


def _check_module(module: nn.Module, what: str) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise PlanError(f"{what}: compiled code that keeps its own parameters; give the module that it was made from")
    tensors = (*module._parameters.values(), *module._buffers.values())
    if any(tensor is not None and is_lazy(tensor) for tensor in tensors):
        raise PlanError(
            f"{what} whose sizes are not known yet; run one batch through the model before the plan is made"
        )
    for home, line in WRAPPERS:
        if type(module).__module__.startswith(home):
            raise PlanError(f"{what}, {line}")


def _check_parameter(parameter: nn.Parameter, name: str, owner: str) -> None:
    cls = type(parameter)
    library, what = cls.__module__.partition(".")[0], f"parameter {name} of a {owner} is"
    _check_name(name)
    if cls.__module__.startswith("torch.distributed"):
        raise PlanError(
            f"{what} a {cls.__name__}, sharded already; pass the model as it is before "
            "fully_shard or parallelize_module"
        )
    if library == "bitsandbytes" or not issubclass(cls, nn.Parameter | Unmade):
        raise PlanError(f"{what} a {cls.__name__} of {library}, whose values zero cannot shard; {ROUNDED}")
    if parameter.is_complex():
        raise PlanError(f"{what} {parameter.dtype}: keep torch.view_as_real(it), and view it as complex in forward")
    if parameter.dtype == torch.float64:
        raise PlanError(f"{what} torch.float64, and training keeps at most fp32; write model.float() first")
    if not parameter.is_floating_point() or parameter.itemsize < 2:
        raise PlanError(f"{what} {parameter.dtype}: {ROUNDED}; in a module of your own register it as a buffer")
    if parameter.layout is not torch.strided:
        raise PlanError(f"{what} {parameter.layout}: keep it dense")
    if parameter._post_accumulate_grad_hooks:
        raise PlanError(f"parameter {name} has a hook of register_post_accumulate_grad_hook; use register_hook")


def _check_buffer(buffer: Tensor, name: str, *, saved: bool) -> None:
    if isinstance(buffer, Unmade):
        raise PlanError(
            f"buffer {name} is computed from parameters, which have no values under zero.empty(); build its module "
            "without zero.empty()"
        )
    if is_meta(buffer):
        raise PlanError(
            f"buffer {name} is on meta and has no values; build the model under zero.empty(), which "
            "sends only parameters to meta"
        )
    if not saved:
        return
    _check_name(name)
    if buffer.dtype not in NAMES or buffer.layout is not torch.strided or buffer.is_nested:
        form = "nested" if buffer.is_nested else buffer.dtype if buffer.dtype not in NAMES else buffer.layout
        raise PlanError(
            f"buffer {name} is {form}, which a checkpoint cannot hold; register it with persistent=False, and compute "
            "it in the constructor"
        )


def _check_name(name: str) -> None:
    if not name.isprintable():  # no lone surrogates either: they have no bytes
        raise PlanError(f"{name!r} has a character that cannot be printed, and a checkpoint needs names; rename it")


def _check_memory(model: nn.Module) -> None:
    """Reject memory that a parameter shares with another tensor: one would be updated without the other."""
    tensors: dict[int, list[tuple[str, Tensor]]] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        made = _made_by_hooks(module)
        attributes = {name: value for name, value in vars(module).items() if name not in made}
        for name, tensor in (*module._parameters.items(), *module._buffers.items(), *attributes.items()):
            if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or not tensor.numel():
                continue
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            full_name = f"{path}.{name}".lstrip(".")
            others = tensors.setdefault(tensor.untyped_storage()._cdata, [])
            for other_name, other in others:
                has_parameter = isinstance(tensor, nn.Parameter) or isinstance(other, nn.Parameter)
                if has_parameter and _overlap(tensor, other):
                    raise PlanError(
                        f"{full_name} and {other_name} are two tensors in the same memory: one would be updated "
                        "without the other; to tie parameters register the same Parameter twice, else clone one"
                    )
            others.append((full_name, tensor))


def _made_by_hooks(module: nn.Module) -> list[str]:
    """Names of attributes that torch's older weight_norm, spectral_norm and prune compute before every forward."""
    hooks = module._forward_pre_hooks.values()
    names = [hook.name for hook in hooks if isinstance(hook, WeightNorm | SpectralNorm)]
    return names + [hook._tensor_name for hook in hooks if isinstance(hook, BasePruningMethod)]


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Return whether the ranges of two tensors in one storage have a byte in common."""
    (first, last), (other_first, other_last) = _extent(a), _extent(b)
    return first < other_last and other_first < last


def _extent(tensor: Tensor) -> tuple[int, int]:
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = int(tensor.storage_offset())
    return first * tensor.element_size(), (first + reach + 1) * tensor.element_size()


# -- in a forward ------------------------------------------------------------------------------------------------------


def note_dtypes(error: RuntimeError, names: Sequence[str], precision: Precision) -> None:
    """Add a note with the parameters of a site to an error of torch about dtypes, where they are not fp32.

    Args:
        error: from a call of the site; an inner site may have added its note already.
        names: of the site's parameters.
    """
    is_noted = bool(getattr(error, "__notes__", ()))
    if precision.compute == torch.float32 or not names or is_noted or not _ABOUT_DTYPES.search(str(error)):
        return
    setting = next(name for name, dtype in DTYPES.items() if dtype == precision.compute)
    error.add_note(
        f"{some(names)} compute in {precision.compute}, by precision={setting} or the config's {setting}. "
        "Cast the input or the weight in the forward; keep_in_fp32_modules has no effect"
    )

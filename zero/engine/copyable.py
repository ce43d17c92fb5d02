"""Refuse, by name, what of a model cannot be copied or would share memory with its copy."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from zero.engine.unit import Splitting
from zero.errors import PlanError, one_line


def made_by_hooks(module: nn.Module) -> dict[str, Tensor]:
    """Attributes that a hook computes before every forward: of torch's older weight_norm, spectral_norm, prune."""
    hooks = module._forward_pre_hooks.values()
    names = [hook.name for hook in hooks if isinstance(hook, WeightNorm | SpectralNorm)]
    names += [hook._tensor_name for hook in hooks if isinstance(hook, BasePruningMethod)]
    return {name: made for name in names if isinstance(made := vars(module).get(name), Tensor)}


def refuse_shared_memory(model: nn.Module) -> None:
    """Refuse memory that a parameter shares with another tensor: one is updated, and the other would not be."""
    known: dict[int, list[tuple[str, Tensor]]] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        tensors = (
            (kind, name, one)
            for kind in ("_parameters", "_buffers", "__dict__")
            for name, one in _tensors(module, kind)
        )
        for kind, name, tensor in tensors:
            if id(tensor) in seen or tensor.layout is not torch.strided or not tensor.numel():
                continue
            seen.add(id(tensor))
            full_name = f"{path}.{name}".lstrip(".")
            others = known.setdefault(tensor.untyped_storage()._cdata, [])
            for other_name, other in others:
                if (kind == "_parameters" or isinstance(other, nn.Parameter)) and _overlap(tensor, other):
                    raise PlanError(
                        f"{full_name} and {other_name} are two tensors in the same memory: one would be updated "
                        "without the other; to tie parameters register the same Parameter twice, else clone one"
                    )
            others.append((full_name, tensor))


def _tensors(module: nn.Module, kind: str) -> Iterator[tuple[str, Tensor]]:
    made = made_by_hooks(module)
    for name, value in vars(module).items() if kind == "__dict__" else vars(module)[kind].items():
        if isinstance(value, Tensor) and name not in made:
            yield name, value


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one storage have an element in common: strided ones may lie between each other."""
    (first, last), (other_first, other_last) = _extent(a), _extent(b)
    if last <= other_first or other_last <= first:
        return False
    if a.dtype != b.dtype:
        return True
    begin, end = (edge // a.element_size() for edge in (min(first, other_first), max(last, other_last)))
    marks = torch.zeros(end - begin, dtype=torch.bool, device="cpu")
    marks.as_strided(a.shape, a.stride(), a.storage_offset() - begin).fill_(True)
    return bool(marks.as_strided(b.shape, b.stride(), b.storage_offset() - begin).any())


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Bytes of its storage: from the first element's to behind the last one's."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = int(tensor.storage_offset())
    return first * tensor.element_size(), (first + reach + 1) * tensor.element_size()


@contextmanager
def naming_what_cannot(model: nn.Module, memo: Mapping[int, Any]) -> Iterator[None]:
    """Name what of `model` cannot be copied, if the block fails."""
    try:
        yield
    except Exception as error:
        parts = [one for module in model.modules() for one in (module, *module._buffers.values())]
        known = {id(one): one for one in parts} | dict(memo)
        for path, module in model.named_modules():
            for attribute, value in vars(module).items():
                try:
                    copy.deepcopy(value, dict(known))
                except Exception as inner:
                    raise PlanError(
                        f"{f'{path}.{attribute}'.lstrip('.')}, {type(value).__qualname__}, cannot be copied, and "
                        f"zero.Plan copies the model: {one_line(inner)}; set it on state.model after zero.init, "
                        "give its class a __deepcopy__, or let zero.Plan(in_place=True) take the model over"
                    ) from inner
        raise PlanError(
            f"{type(model).__name__} cannot be copied: {type(error).__name__}: {one_line(error)}"
        ) from error


def refuse_own_copies(
    model: nn.Module, copied: nn.Module, splitting: Splitting, placeholders: Mapping[str, Tensor]
) -> None:
    """Refuse a class whose own `__deepcopy__` copies parameters as well."""
    for owner in splitting.owners:
        for own, name in owner.slots:
            try:
                there = copied.get_submodule(owner.path)._parameters.get(own)
            except AttributeError:
                there = None
            if there is not placeholders[name]:
                around = [
                    path for path, _ in model.named_modules() if f"{owner.path}.".startswith(f"{path}.") or not path
                ]
                kinds = [type(model.get_submodule(path)) for path in around]
                kind = next((one for one in kinds if "__deepcopy__" in dir(one)), kinds[-1])
                raise PlanError(
                    f"{kind.__name__} has a __deepcopy__ of its own that makes another {name}; it has to hand its memo "
                    "on: copy.deepcopy(value, memo)"
                )

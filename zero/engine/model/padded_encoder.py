"""`nn.TransformerEncoder` around units: its outputs at padded positions, which torch decides by looking at parameters.

In eval mode torch packs the rows that are not padded into a nested tensor, if the parameters of the first layer are
plain tensors that need no gradient. The outputs of padded positions are 0 then. `ParameterPlaceholder` is not a plain
tensor, so torch would never pack.

The layers of such an encoder therefore answer torch's own function, and no other caller, with stand-ins. This holds
however the function is reached: by a call, or by `super().forward` in the methods of a subclass.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from zero.engine.model.placeholder import ParameterPlaceholder
from zero.engine.model.unit import Site

FORWARD = nn.TransformerEncoder.forward.__code__


def watch_encoders(model: nn.Module, sites: Iterable[Site]) -> Callable[[], None]:
    """Have encoders around sites decide as if their parameters were plain; return a function that undoes this."""
    undo, paths = ExitStack(), [site.path for site in sites]
    for path, module in model.named_modules():
        if not isinstance(module, nn.TransformerEncoder):
            continue
        layers = module._modules.get("layers")
        if not isinstance(layers, nn.ModuleList) or isinstance(layers, _Layers):
            continue
        if any(inner.startswith(f"{path}.".lstrip(".")) for inner in paths if inner != path):
            undo.callback(setattr, layers, "__class__", type(layers))
            layers.__class__ = _watched(cast(Any, type(layers)))
    return undo.close


class _Layers(nn.ModuleList):
    """Layers whose first one is a `_Seen` for torch's function, and which it runs as one."""

    def __getitem__(self, index: Any) -> Any:
        layer = super().__getitem__(index)
        return _Seen(layer) if _asked_by_torch() else layer

    def __iter__(self) -> Iterator[Any]:
        return iter([self._run] if _asked_by_torch() else super().__iter__())

    def _run(self, output: Tensor, **arguments: Any) -> Tensor:
        """Run all layers. Packed rows are padded for them, because a layer around units cannot read packed ones."""
        packed = output.is_nested
        if packed:
            lengths = output._nested_tensor_size()[:, 0].to(output.device)
            output = output.to_padded_tensor(0.0)
            is_padded = torch.arange(output.shape[1], device=output.device) >= lengths[:, None]
            arguments["src_key_padding_mask"] = is_padded
        for layer in super().__iter__():
            output = layer(output, **arguments)
        return torch._nested_tensor_from_mask(output, ~is_padded, mask_check=False) if packed else output


@cache
def _watched(layers: type[nn.ModuleList]) -> type[nn.ModuleList]:
    """Return `layers` with the methods of `_Layers`, under the same name."""
    return type(layers.__name__, (_Layers, layers), {})


def _asked_by_torch() -> bool:
    """Return whether torch's encoder has called the caller; False while compiling, when torch does not pack."""
    return not torch.compiler.is_compiling() and sys._getframe(2).f_code is FORWARD


class _Seen:
    """A module for torch's checks: placeholders are plain tensors without elements."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if isinstance(value, ParameterPlaceholder):
            return torch.empty(0, device=value.home, requires_grad=value.trains)
        return _Seen(value) if isinstance(value, nn.Module) else value

"""`nn.TransformerEncoder` around units: its outputs at padded positions, which torch decides by looking at parameters.

In eval mode torch packs the rows that are not padded into a nested tensor, if the parameters of the first layer are
plain tensors that need no gradient. The outputs of padded positions are 0 then. `ParameterPlaceholder` is not a plain
tensor, so torch would never pack.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from zero.engine.model.placeholder import ParameterPlaceholder
from zero.engine.model.unit import Site

FORWARD = nn.TransformerEncoder.forward


def watch_encoders(model: nn.Module, sites: Iterable[Site]) -> Callable[[], None]:
    """Have encoders around sites decide as if their parameters were plain; return a function that undoes this.

    Encoders whose forward was replaced stay as they are.
    """
    undo, paths = ExitStack(), [site.path for site in sites]
    for path, module in model.named_modules():
        if type(module).forward is not FORWARD or "forward" in vars(module):
            continue
        if any(inner.startswith(f"{path}.".lstrip(".")) for inner in paths if inner != path):
            vars(module)["forward"] = MethodType(_forward, module)
            undo.callback(vars(module).pop, "forward", None)
    return undo.close


def _forward(
    module: nn.TransformerEncoder,
    src: Tensor,
    mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool | None = None,
) -> Tensor:
    if torch.compiler.is_compiling():  # torch does not pack then
        return FORWARD(module, src, mask, src_key_padding_mask, is_causal)

    def run(output: Tensor, **arguments: Any) -> Tensor:
        """Run all layers. Packed rows get their padding back, because a layer around units cannot read packed rows."""
        packed = output.is_nested
        if packed:
            output, arguments["src_key_padding_mask"] = src, src_key_padding_mask
        for layer in module.layers:
            output = layer(output, **arguments)
        if packed:
            assert src_key_padding_mask is not None
            is_padded = src_key_padding_mask.bool()  # an additive mask has -inf there
            output = torch._nested_tensor_from_mask(output, ~is_padded, mask_check=False)
        return output

    return FORWARD(_Encoder(module, run), src, mask, src_key_padding_mask, is_causal)  # type: ignore[arg-type]


class _Seen:
    """A module for torch's checks: placeholders are plain tensors without elements."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if isinstance(value, ParameterPlaceholder):
            return torch.empty(0, device=value.home, requires_grad=value.trains)
        return _Seen(value) if isinstance(value, nn.Module) else value


class _Encoder:
    """An encoder whose first layer is a `_Seen`, and whose layers run as one function."""

    def __init__(self, module: nn.TransformerEncoder, run: Callable[..., Tensor]) -> None:
        self._module, self.layers = module, _Layers(module.layers, run)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Layers:
    def __init__(self, layers: nn.ModuleList, run: Callable[..., Tensor]) -> None:
        self._layers, self._run = layers, run

    def __getitem__(self, index: int) -> _Seen:
        return _Seen(self._layers[index])

    def __iter__(self) -> Iterator[Callable[..., Tensor]]:
        return iter([self._run])

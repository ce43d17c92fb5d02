"""Take over a model whose layers bitsandbytes keeps in nf4: the layers become torch's, their codes go into shards.

The classes are recognized by their names, so bitsandbytes is not imported. Codes of bitsandbytes have one offset for a
tensor, which is written into each row of `zero.core.formats.nf4`.
"""

from typing import Any

import torch
from torch import Tensor, nn

from zero.core import checks
from zero.core.formats.nf4 import NF4
from zero.core.layout import VECTOR
from zero.engine.model import CodedWeights
from zero.errors import PlanError

SCALES = 256
"""Scales that share one scale of scales."""


def from_bitsandbytes(model: nn.Module) -> CodedWeights:
    """Replace each `Linear4bit` of `model` by an `nn.Linear` on meta; return the weights of the whole model.

    Codes go to host memory; each layer is freed before the next is copied.

        weights = from_bitsandbytes(model)
        precision = zero.Precision("bf16", frozen="nf4", coded=list(weights.codes))
        state = zero.init(plan, zero.open_store(plan), weights=weights)
        del weights  # frees this copy of the codes

    Adapters of peft around these layers stay.

    Raises:
        PlanError: a layer is in another format than nf4 in blocks of 64 with double quantization. The model is
            unchanged then.
    """
    checks.instance("model", model, nn.Module, "Pass a torch.nn.Module.")
    layers = {path: module for path, module in model.named_modules() if _is_4bit(module)}
    for path, layer in layers.items():
        _check(path, layer.weight)
    shapes = {f"{path}.weight".lstrip("."): tuple(layer.weight.quant_state.shape) for path, layer in layers.items()}
    codes = {}
    for path in [*layers]:
        layer = layers.pop(path)  # freed before the next one is copied
        codes[f"{path}.weight".lstrip(".")] = _codes(layer.weight).cpu()
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, _plain(layer))
    tensors = {name: value.detach() for name, value in model.named_parameters() if name not in codes}
    return CodedWeights(NF4, codes, tensors | dict(model.named_buffers()), shapes)


def _is_4bit(module: nn.Module) -> bool:
    names = {cls.__name__ for cls in type(module).__mro__ if cls.__module__.startswith("bitsandbytes")}
    return "Linear4bit" in names


def _check(path: str, weight: Any) -> None:
    state = weight.quant_state
    if state is None:
        raise PlanError(f"{path} of bitsandbytes has no codes yet. Move the model to its device first.")
    form = state.quant_type, state.blocksize, state.nested and state.state2.blocksize
    if form != ("nf4", VECTOR, SCALES):
        raise PlanError(
            f"{path} is in {state.quant_type} with blocks of {state.blocksize}. Load the model with "
            "bnb_4bit_quant_type='nf4' and bnb_4bit_use_double_quant=True."
        )


def _codes(weight: Any) -> Tensor:
    """Return the codes of a `Params4bit` in the rows of `zero.core.formats.nf4`."""
    state, packed = weight.quant_state, weight.data.view(torch.uint8).view(-1)
    vectors = -(-state.shape.numel() // VECTOR)
    nibbles = packed.new_zeros(vectors * VECTOR // 2)
    nibbles[: packed.numel()] = packed
    parts = []
    for number, (scales, codes) in enumerate(
        zip(state.absmax.split(SCALES), nibbles.split(SCALES * VECTOR // 2), strict=True)
    ):
        head = torch.stack([state.offset.float(), state.state2.absmax[number].float()])
        parts += [head.view(torch.uint8), scales, codes]
    return torch.cat(parts)


def _plain(layer: Any) -> nn.Linear:
    linear = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, "meta")
    linear.weight.requires_grad_(False)
    linear.bias = layer.bias
    return linear.train(layer.training)

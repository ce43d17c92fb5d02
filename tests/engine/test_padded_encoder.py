"""Torch's fast path of encoders, which decides what is at padded positions, around units."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero

LAYERS = ("TransformerEncoderLayer",)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("stage", "units"), [(3, None), (0, LAYERS), (3, LAYERS), (3, ("Linear", "LayerNorm"))])
@pytest.mark.parametrize("grads", ["off", "on", "frozen"])
def test_a_padded_encoder_has_torchs_outputs(stage, units, grads):
    """In eval mode torch gives 0 at padded positions, before the last norm, except if a parameter needs a gradient."""
    torch.manual_seed(0)
    layer, norm = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.LayerNorm(8)
    plain = nn.Sequential()
    plain.encoder, plain.head = nn.TransformerEncoder(layer, 2, norm), nn.Linear(8, 8)
    plain.eval().encoder.requires_grad_(grads != "frozen")
    nn.init.normal_(norm.bias)
    x, padded = torch.randn(2, 5, 8), torch.tensor([[False] * 3 + [True] * 2, [False] * 4 + [True]])

    def output(model: nn.Module) -> Tensor:
        with torch.set_grad_enabled(grads != "off"):
            return model.head(model.encoder(x, src_key_padding_mask=padded))

    model = copy.deepcopy(plain)
    plan = zero.Plan(model, optimizer=zero.sgd(0.1), world=zero.open_world(), stage=zero.Stage(stage), units=units)
    state = zero.init(plan, zero.open_store(plan))
    step = zero.Step(state)
    step.microbatch()
    torch.testing.assert_close(output(state.model), output(plain))
    step.abandon()
    state.close()
    torch.testing.assert_close(output(model), output(plain), rtol=0, atol=0)


class Doubling(nn.TransformerEncoder):
    """A subclass that reaches torch's fast path through `super().forward` in its own forward and in a method."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        assert [type(layer) for layer in self.layers] == [type(self.layers[0])] * len(self.layers)
        return super().forward(*args, **kwargs) * 2

    def encoded(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(*args, **kwargs)


class DoublingLayer(nn.TransformerEncoderLayer):
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(*args, **kwargs) * 2


class Layers(nn.ModuleList):
    """A list of layers of a class of its own."""


def encoder(make: type[nn.TransformerEncoder] = nn.TransformerEncoder, layer: Any = nn.TransformerEncoderLayer) -> Any:
    return make(layer(8, 2, 16, batch_first=True), 2, nn.LayerNorm(8))


def with_own_list() -> nn.TransformerEncoder:
    model = encoder()
    model.layers = Layers(model.layers)
    return model


PADDED = torch.tensor([[False] * 3 + [True] * 2, [False] * 4 + [True], [True] * 5])
SOURCE = {"src_key_padding_mask": PADDED}
TARGET = {"tgt_key_padding_mask": PADDED[:2], "memory_key_padding_mask": PADDED[:2]}
REACHES_THE_FAST_PATH = {
    "a subclass": (lambda: encoder(Doubling), lambda model, x: model(x, **SOURCE)),
    "a method of a subclass": (lambda: encoder(Doubling), lambda model, x: model.encoded(x, **SOURCE)),
    "torch's function": (lambda: encoder(Doubling), lambda model, x: nn.TransformerEncoder.forward(model, x, **SOURCE)),
    "a subclass of layers": (lambda: encoder(layer=DoublingLayer), lambda model, x: model(x, **SOURCE)),
    "layers of its own": (with_own_list, lambda model, x: model(x, **SOURCE)),
    "a mask of floats": (
        encoder,
        lambda model, x: model(x, src_key_padding_mask=torch.zeros(3, 5).masked_fill(PADDED, -torch.inf)),
    ),
    "a layer alone": (
        lambda: nn.Sequential(DoublingLayer(8, 2, 16, batch_first=True)),
        lambda model, x: model[0](x[:2], src_key_padding_mask=PADDED[:2]),
    ),
    "a decoder": (
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), 2),
        lambda model, x: model(x[:2], x[:2], **TARGET),
    ),
    "a transformer": (
        lambda: nn.Transformer(8, 2, 2, 2, 16, batch_first=True),
        lambda model, x: model(x[:2], x[:2], src_key_padding_mask=PADDED[:2], **TARGET),
    ),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("units", [None, ("Linear",)], ids=["layers", "linear"])
@pytest.mark.parametrize("grads", ["off", "inference", "frozen"])
@pytest.mark.parametrize("name", REACHES_THE_FAST_PATH)
def test_callers_of_torchs_fast_path_have_its_outputs_at_padded_positions(name, grads, units):
    """The callers are a subclass, another method, and a module of torch around it."""
    make, call = REACHES_THE_FAST_PATH[name]
    torch.manual_seed(0)
    plain = make().eval().requires_grad_(grads != "frozen")
    plain.trained = nn.Parameter(torch.zeros(1))
    for norm in (module for module in plain.modules() if isinstance(module, nn.LayerNorm)):
        nn.init.normal_(norm.bias)
    x, model = torch.randn(3, 5, 8), copy.deepcopy(plain)
    mode = {"off": torch.no_grad, "inference": torch.inference_mode, "frozen": torch.enable_grad}[grads]
    with mode():
        wanted = call(plain, x)
    plan = zero.Plan(model, optimizer=zero.sgd(0.1), world=zero.open_world(), stage=3, units=units)
    state = zero.init(plan, zero.open_store(plan))
    step = zero.Step(state)
    step.microbatch()
    with mode():
        torch.testing.assert_close(call(state.model, x), wanted)
    step.abandon()
    state.close()
    with mode():
        torch.testing.assert_close(call(model, x), wanted, rtol=0, atol=0)
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]

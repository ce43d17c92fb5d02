"""A model with layers of bitsandbytes is taken over code by code."""

import pytest
import torch
from torch import nn

import zero
from zero.engine.model.coded import CodedWeights
from zero.engine.whole.read import full_state_dict
from zero.errors import PlanError
from zero.formats import from_bitsandbytes
from zero.testing import run_ranks

bitsandbytes = pytest.importorskip("bitsandbytes")


class Adapted(nn.Module):
    """A layer in 4 bits beside one that trains."""

    def __init__(self, rows: int, columns: int, **form) -> None:
        super().__init__()
        form = {"quant_type": "nf4", "compress_statistics": True, "compute_dtype": torch.bfloat16, **form}
        self.base = bitsandbytes.nn.Linear4bit(columns, rows, bias=rows % 2 == 1, **form)
        self.extra = nn.Linear(columns, rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.extra(x)


def build(**form) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Adapted(200, 130, **form), Adapted(131, 200, **form)).to("cpu")  # which makes the codes


def taken(world, stage: int):
    with world.exclusive():
        model = build()
        expected = {
            f"{path}.base.weight": bitsandbytes.functional.dequantize_4bit(
                layer.base.weight.data, layer.base.weight.quant_state
            )
            for path, layer in model.named_children()
        }
    weights = from_bitsandbytes(model)
    assert isinstance(weights, CodedWeights)
    precision = zero.Precision("bf16", frozen="nf4", coded=list(weights.codes))
    plan = zero.Plan(model, optimizer=zero.adamw(1e-3), world=world, stage=stage, precision=precision)
    state = zero.init(plan, zero.open_store(plan), weights=weights)
    step = zero.make_step(plan, lambda model, x: model(x.bfloat16()).float().square().mean())
    state, _ = step(state, [torch.randn(3, 130, generator=torch.Generator().manual_seed(1))])
    return expected, full_state_dict(state)


@pytest.mark.parametrize(("size", "stage"), [(1, 0), (2, 3), (3, 2)])
def test_codes_are_taken_over_as_they_are(size, stage):
    for expected, actual in run_ranks(size, taken, stage):
        for name, value in expected.items():
            assert torch.equal(actual[name], value.bfloat16().float()), name


def test_as_a_mapping_the_weights_are_values():
    model = build()
    expected = bitsandbytes.functional.dequantize_4bit(model[1].base.weight.data, model[1].base.weight.quant_state)
    weights = from_bitsandbytes(model)
    assert torch.equal(weights["1.base.weight"], expected.float())
    assert {*weights} == {name for name, _ in model.named_parameters()}
    assert len(weights) == len([*weights])


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (
            {"quant_type": "fp4"},
            "0.base is in fp4 with blocks of 64. Load the model with bnb_4bit_quant_type='nf4' and",
        ),
        (
            {"compress_statistics": False},
            "0.base is in nf4 with blocks of 64. Load the model with bnb_4bit_quant_type=",
        ),
    ],
)
def test_another_format_is_refused_with_what_to_type(form, message):
    model = build(**form)
    with pytest.raises(PlanError) as caught:
        from_bitsandbytes(model)
    assert str(caught.value).startswith(message)
    assert str(caught.value).endswith("bnb_4bit_use_double_quant=True.")
    assert type(model[0].base).__name__ == "Linear4bit"

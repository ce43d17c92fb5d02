"""A master in two halves is the master: every fp32 number goes into a bf16 parameter and 16 bits, and comes back."""

import math

import pytest
import torch

from zero.core.master import Master, SplitMaster, WholeMaster, join, low, rounded
from zero.core.precision import Precision
from zero.errors import ConfigError

HALF = torch.arange(-(2**15), 2**15, dtype=torch.int32)
EDGES = torch.tensor([0, 1, 0x3F, 0x7E, 0x7F], dtype=torch.int32)


def test_every_pattern_comes_back_and_parameters_are_rounded_half_up():
    """Against integers: every upper half with lower halves near ties and ends; of every sign and exponent those upper
    halves that a carry changes, or that it leaves alone, with every lower half.
    """
    near = torch.cat([HALF[:32], HALF[-32:], HALF[2**15 - 32 : 2**15 + 32]]) & 0xFFFF
    grids = [(part[:, None] << 16) + near for part in HALF.split(2048)]
    grids += [(((exponent << 7) + EDGES)[:, None] << 16) + (HALF & 0xFFFF) for exponent in range(-256, 256)]
    for grid in grids:
        bits = grid.flatten()
        values, start = bits.view(torch.float32), int(bits[0])
        param = rounded(values, torch.bfloat16)
        back, upper = join(param, low(values)).view(torch.int32), param.view(torch.int16)
        nan = values.isnan()
        assert torch.equal(param.isnan(), nan)
        assert torch.equal(back.view(torch.float32).isnan(), nan)
        if nan.any():
            bits, back, upper = bits[~nan], back[~nan], upper[~nan]
        assert torch.equal(back, bits), hex(start)
        assert torch.equal(upper, (bits.add_(0x8000) >> 16).to(torch.int16)), hex(start)


def test_only_ties_differ_from_torch():
    """To the nearest even number, torch's way, two masters would have one pair; there alone the two ways part."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (2**20,), generator=generator).to(torch.int32)
    bits[::5] = (bits[::5] & ~0xFFFF) | 0x8000
    values = bits.view(torch.float32)
    ours, theirs = rounded(values, torch.bfloat16).view(torch.int16), values.bfloat16().view(torch.int16)
    differs = (ours != theirs) & ~values.isnan()
    ties = low(values) == -0x8000
    assert differs.any()
    assert not (differs & ~ties).any()
    assert torch.equal(ours[differs], theirs[differs] + 1), "up in magnitude"


@pytest.mark.parametrize("value", [0.0, -0.0, math.inf, -math.inf, 3.4028234663852886e38, 2.0**-149, -(2.0**-126)])
def test_the_edges_of_fp32(value):
    tensor = torch.tensor([value])
    assert join(rounded(tensor, torch.bfloat16), low(tensor)).view(torch.int32) == tensor.view(torch.int32)


def test_what_is_not_a_number_never_becomes_one():
    """A GPU's NaN is 0x7fffffff: to add to it, as to other patterns, would make it -0."""
    bits = torch.tensor([0x7FFFFFFF, 0x7F800001, 0x7FC00000, -1, -0x7FFFFF], dtype=torch.int32)
    values = bits.view(torch.float32)
    assert values.isnan().all()
    assert rounded(values, torch.bfloat16).isnan().all()
    assert join(rounded(values, torch.bfloat16), low(values)).isnan().all()


def test_other_types_are_rounded_as_torch_does():
    values = torch.randn(4096, generator=torch.Generator().manual_seed(1))
    assert torch.equal(rounded(values, torch.float16), values.half())
    assert rounded(values, torch.float32) is values
    assert torch.equal(rounded(values.half(), torch.bfloat16), values.half().bfloat16())


@pytest.mark.parametrize("kind", [WholeMaster, SplitMaster])
def test_what_was_opened_and_closed_is_what_it_was(kind):
    master, values = kind(), torch.randn(512, generator=torch.Generator().manual_seed(2))
    values[:100].view(torch.int32).bitwise_and_(~0xFFFF).bitwise_or_(0x8000)
    param, kept = rounded(values, torch.bfloat16), master.page_of(values).clone()
    assert torch.equal(master.of(param, kept), values)
    cuts = (100, 412)  # several at once, of several sizes
    for moved in (0.0, 1.0):
        with master.opened(param.split(cuts), kept.split(cuts)) as masters:
            assert torch.equal(torch.cat(list(masters)), values)
            torch._foreach_add_(list(masters), moved)
        values = values + moved
        assert torch.equal(master.of(param, kept), values)
        assert torch.equal(param, rounded(values, torch.bfloat16))


@pytest.mark.parametrize(
    ("compute", "how", "kind"),
    [
        *(("fp32", how, Master) for how in ("auto", "whole")),
        *(("fp16", how, WholeMaster) for how in ("auto", "whole")),
        *(("bf16", how, SplitMaster) for how in ("auto", "split")),
        ("bf16", "whole", WholeMaster),
    ],
)
def test_how_a_master_is_kept(compute, how, kind):
    assert type(Precision(compute, master=how).master) is kind


@pytest.mark.parametrize(
    ("compute", "form", "message"),
    [
        ("fp32", "split", "precision.master=split with precision.compute=fp32"),
        ("fp16", "split", "precision.master=split with precision.compute=fp16"),
        ("bf16", "halves", "precision.master=halves: must be one of auto, split, whole"),
    ],
)
def test_a_master_that_cannot_be(compute, form, message):
    with pytest.raises(ConfigError, match=message):
        Precision(compute, master=form)

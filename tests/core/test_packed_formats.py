"""Codes expand to the published formula and to the bits of bitsandbytes, and no cut changes a bit."""

import hashlib
import struct
from statistics import NormalDist

import pytest
import torch
from torch import Tensor

from zero.core.formats import PACKED_FORMATS, PackedFormat
from zero.core.formats.nf4 import NORMAL_FLOAT, _dynamic, _pairs
from zero.core.formats.packed import LEAST_DIVISOR

NF4, INT8 = PACKED_FORMATS["nf4"], PACKED_FORMATS["int8"]
SIZES = [1, 2, 63, 64, 65, 255, 256, 257, 16383, 16384, 16385, 3 * 16384 + 100]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def sample(numel: int, seed: int = 0) -> Tensor:
    """Normal numbers of several sizes, with a block of zeros."""
    make = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.randint(-9, 9, (numel // 64 + 1,), generator=make)).repeat_interleave(64)[:numel]
    values = torch.randn(numel, generator=make) * sizes
    values[128:192] = 0
    return values


def expanded(codec: PackedFormat, codes: Tensor, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.full((numel,), torch.nan, dtype=dtype)
    codec.expand(codes, values)
    return values


def in_fp32(number: float) -> float:
    return struct.unpack("f", struct.pack("f", number))[0]


def scalar_nf4(row: bytes) -> list[float]:
    """The values of one row, from the published format with Python's numbers; each result is rounded to fp32."""
    offset, spread = struct.unpack("2f", row[:8])
    dynamic = [0.0, 1.0]
    for power in range(7):
        width = 0.9 / 2**power
        part = [10.0 ** (power - 6) * (0.1 + width * (n + 0.5)) for n in range(2**power)]
        dynamic += [*part, *(-number for number in part)]
    dynamic.sort()
    count = (len(row) - 8) // 33
    values = []
    for vector, code in enumerate(row[8 : 8 + count]):
        scale = dynamic[code] * spread + offset
        for byte in row[8 + count + 32 * vector : 8 + count + 32 * (vector + 1)]:
            values += [NORMAL_FLOAT[byte >> 4] * scale, NORMAL_FLOAT[byte & 15] * scale]
    return values


@pytest.mark.parametrize("numel", SIZES)
def test_expanding_is_the_published_formula(numel):
    codes = torch.randint(256, (NF4.nbytes(numel),), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    for row in codes.split(NF4.row_bytes):  # finite scales
        row[:8].copy_(torch.tensor([0.75, 0.5]).view(torch.uint8))
    expected = [value for row in codes.split(NF4.row_bytes) for value in scalar_nf4(bytes(row.tolist()))]
    torch.testing.assert_close(
        expanded(NF4, codes, numel), torch.tensor(expected[:numel], dtype=torch.float64).float(), rtol=1e-6, atol=1e-7
    )


def test_codes_are_quantiles_of_a_normal_distribution():
    def quantiles(count: int) -> list[float]:
        probabilities = torch.linspace(0.9677083, 0.5, count, dtype=torch.float64).tolist()[:-1]
        return [NormalDist().inv_cdf(probability) for probability in probabilities]

    upper, lower = quantiles(9), quantiles(8)
    numbers = sorted([*upper, 0.0, *(-number for number in lower)])
    assert [number / max(numbers) for number in numbers] == pytest.approx(NORMAL_FLOAT, abs=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(128, 128), (256, 192), (300, 301), (3, 170), (1, 64), (7, 9), (5, 13)])
def test_expanding_has_the_bits_of_bitsandbytes(shape, dtype):
    functional = pytest.importorskip("bitsandbytes.functional")
    values = sample(shape[0] * shape[1]).view(shape).to(dtype)
    packed, state = functional.quantize_4bit(values, compress_statistics=True, quant_type="nf4")
    count = -(-values.numel() // 64)
    nibbles = torch.zeros(32 * count, dtype=torch.uint8)
    nibbles[: packed.numel()] = packed.view(-1)
    rows = []
    for number, scales in enumerate(state.absmax.split(256)):
        head = torch.stack([state.offset, state.state2.absmax[number]]).view(torch.uint8)
        rows += [head, scales, nibbles[256 * 32 * number :][: 32 * len(scales)]]
    expansion = expanded(NF4, torch.cat(rows), values.numel(), dtype).view(shape)
    assert torch.equal(expansion, functional.dequantize_4bit(packed, state))


BITS = {
    ("nf4", torch.float32): "6699b19c4fe50698ec544b4df8b1f7fd6ce79d66ca26a8aec10441443779e8da",
    ("nf4", torch.bfloat16): "58a172f63867bf23d1bbae580d9d324fa6f1328c304f6fc5ccfafd00cf7305a9",
    ("nf4", torch.float16): "06bf807f187d637d3a42f7318f02cdd911a54dbd8531e236f4c8a8ce183ce63a",
    ("int8", torch.float32): "6c7bc72369fb8da4b1be42e9674491d5d81e96f3224094f79a07efc9834a57df",
}
"""SHA-256 of the values to which bitsandbytes 0.50.2 expands `stored` codes on a CPU."""


def stored(name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Scales of scales (none for int8), scales and codes of two rows; the second of nf4 has 7 vectors."""
    numbers = torch.arange(263 * 32)
    codes = ((numbers * 167 + numbers // 256 * 89 + 43) % 256).to(torch.uint8)
    if name == "int8":
        return torch.empty(0), torch.tensor([0.7, 3.1]), codes[: 2 * 256].view(torch.int8)
    return torch.tensor([0.3, 0.11]), ((numbers[:263] * 59 + 7) % 256).to(torch.uint8), codes


def digest(values: Tensor) -> str:
    return hashlib.sha256(bytes(values.contiguous().view(-1).view(torch.uint8).tolist())).hexdigest()


@pytest.mark.parametrize(("name", "dtype"), BITS)
def test_expanding_has_the_stored_bits_of_bitsandbytes(name, dtype):
    spreads, scales, codes = stored(name)
    if name == "nf4":
        heads = [torch.stack([torch.tensor(0.4), spread]).view(torch.uint8) for spread in spreads]
        parts = [heads[0], scales[:256], codes[: 256 * 32], heads[1], scales[256:], codes[256 * 32 :]]
        numel = 263 * 64
    else:
        parts = [scales[:1].view(torch.uint8), codes[:256].view(torch.uint8)]
        parts += [scales[1:].view(torch.uint8), codes[256:].view(torch.uint8)]
        numel = 2 * 256
    assert digest(expanded(PACKED_FORMATS[name], torch.cat(parts), numel, dtype)) == BITS[name, dtype]


@pytest.mark.parametrize(("name", "dtype"), BITS)
def test_the_stored_bits_are_those_of_bitsandbytes(name, dtype):
    functional = pytest.importorskip("bitsandbytes.functional")
    spreads, scales, codes = stored(name)
    if name == "int8":
        expansion = torch.ops.bitsandbytes.int8_vectorwise_dequant(codes.view(2, 256), scales)
    else:
        _, state = functional.quantize_4bit(
            torch.ones(263, 64, dtype=dtype), compress_statistics=True, quant_type="nf4"
        )
        state.absmax, state.state2.absmax, state.offset = scales, spreads, torch.tensor(0.4)
        expansion = functional.dequantize_4bit(codes.view(-1, 1), state)
    assert digest(expansion) == BITS[name, dtype]


def test_a_row_of_nf4_has_the_codes_of_bitsandbytes():
    functional = pytest.importorskip("bitsandbytes.functional")
    packed, state = functional.quantize_4bit(sample(16384), compress_statistics=True, quant_type="nf4")
    row = NF4.encode(sample(16384))
    assert torch.equal(row[8 + 256 :], packed.view(-1))
    torch.testing.assert_close(row[:4].view(torch.float32)[0], state.offset)


def test_int8_has_the_bits_of_bitsandbytes():
    pytest.importorskip("bitsandbytes")
    values = sample(256 * 30).view(30, 256)
    codes, scales, _ = torch.ops.bitsandbytes.int8_vectorwise_quant(values.clone())
    rows = INT8.encode(values.view(-1)).view(30, 260)
    live = values.any(1)  # for zeros bitsandbytes has a NaN
    assert torch.equal(rows[live, 4:].view(torch.int8), codes[live])
    expansion = expanded(INT8, rows.view(-1), values.numel()).view(30, 256)
    assert torch.equal(expansion[live], torch.ops.bitsandbytes.int8_vectorwise_dequant(codes, scales)[live])


@pytest.mark.parametrize("codec", PACKED_FORMATS.values(), ids=PACKED_FORMATS)
@pytest.mark.parametrize("numel", SIZES)
def test_no_cut_changes_a_bit(codec, numel):
    values = sample(numel)
    codes = codec.encode(values)
    assert codes.shape == (codec.nbytes(numel),)
    cuts = sorted({0, *torch.randint(codes.numel(), (5,), generator=torch.Generator().manual_seed(2)).tolist()})
    read = codec.bytes_of("w", numel, lambda start, stop: values[start:stop])
    parts = [read(start, stop) for start, stop in zip(cuts, [*cuts[1:], codes.numel()], strict=True)]
    assert torch.equal(torch.cat(parts), codes)
    whole = expanded(codec, codes, numel)
    cuts = sorted({0, *torch.randint(numel, (5,), generator=torch.Generator().manual_seed(3)).tolist()})
    back = codec.values_of(lambda start, stop: codes[start:stop], numel)
    parts = [back(start, stop) for start, stop in zip(cuts, [*cuts[1:], numel], strict=True)]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize(("name", "error"), [("nf4", 0.16), ("int8", 0.004)])
def test_values_are_near_the_parameter(name, error):
    """Half of the widest gap between two codes is 0.152 of a block's largest value; scales add one per cent."""
    codec, values = PACKED_FORMATS[name], sample(5 * 16384 + 7)
    expansion = expanded(codec, codec.encode(values), values.numel())
    width = 64 if name == "nf4" else 256
    for part, near in zip(values.split(width), expansion.split(width), strict=True):
        assert (part - near).abs().max() <= error * part.abs().max() + 0.01 * values.abs().max()


@pytest.mark.parametrize("codec", PACKED_FORMATS.values(), ids=PACKED_FORMATS)
@pytest.mark.parametrize("number", [0.0, 1.5, -1e-38, 1e-30, 1e30])
def test_equal_values_stay_equal(codec, number):
    values = torch.full((16384 + 64,), number)
    torch.testing.assert_close(expanded(codec, codec.encode(values), values.numel()), values, rtol=1e-6, atol=1e-38)


@pytest.mark.parametrize("number", [1e-36, 3e-37, 1e-37, 1e-38, 0.0])
def test_tiny_values_have_the_error_of_the_least_scale(number):
    values = torch.full((256,), number)
    assert (expanded(INT8, INT8.encode(values), 256) - values).abs().max() <= 0.51 * LEAST_DIVISOR


@pytest.mark.parametrize("codec", PACKED_FORMATS.values(), ids=PACKED_FORMATS)
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_a_value_that_is_not_finite_makes_a_scale_that_is_not_finite(codec, numel, number):
    values = sample(numel)
    assert codec.is_finite(codec.encode(values))
    values[-1] = number
    assert not codec.is_finite(codec.encode(values))


def test_large_values_whose_scales_have_no_sum_are_not_finite():
    assert not NF4.is_finite(NF4.encode(torch.full((16384,), 3e38)))
    assert NF4.is_finite(NF4.encode(torch.full((16384,), 1e36)))


@pytest.mark.parametrize("codec", PACKED_FORMATS.values(), ids=PACKED_FORMATS)
def test_no_default_dtype_changes_a_bit(codec):
    values = sample(20_000)
    codes = codec.encode(values)
    torch.set_default_dtype(torch.bfloat16)
    for table in (_pairs, _dynamic):
        table.cache_clear()
    try:
        assert torch.equal(codec.encode(values), codes)
        expansion = codec.values_of(lambda start, stop: codes[start:stop], 20_000)(0, 20_000)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(expansion, expanded(codec, codes, 20_000))


def test_bytes_of_a_parameter():
    assert NF4.nbytes(4096 * 4096) / 4096**2 < 0.5162
    assert INT8.nbytes(4096 * 4096) / 4096**2 < 1.0157
    assert NF4.nbytes(0) == INT8.nbytes(0) == 0
    assert torch.equal(expanded(NF4, NF4.encode(torch.zeros(0)), 0), torch.zeros(0))

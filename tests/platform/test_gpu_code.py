"""The kernels as compiled for GPUs: widths of loads and stores, registers, and no operation that rounds otherwise.

Nothing runs. `benchmarks/kernels.py` prints the table of which these budgets keep a part.
"""

import re

import pytest

tools = pytest.importorskip("triton").knobs.nvidia
if None in (tools.cuobjdump, tools.ptxas, tools.ptxas_blackwell):
    pytest.skip("Triton's package lacks the assembler", allow_module_level=True)

from tests.common.gpu_code import ARCHITECTURES, EXPANSIONS, SUMS, UPDATES, Code, code_of  # noqa: E402

OFTEN = (*list(UPDATES)[:2], "nf4 to bf16", "int8 to bf16", "sum of 8 ranks in bf16")


def cases(kernels):
    return [(name, at) for name in kernels for at in ARCHITECTURES if at == 90 or name in OFTEN]


def check(code: Code, registers: int) -> None:
    """Check the number of registers, of bytes that are spilled, and that each operation on numbers rounds once."""
    assert code.local_bytes <= 8, "Triton 3.9's assembler spills one pair for sm_100 although registers are left"
    assert code.registers <= registers
    operations = set(re.findall(r"\b(\w+\.[\w.]*f32(?:x2)?)\b", code.ptx))
    assert any(re.fullmatch(r"(mul|add)(\.rn)?\.f32(x2)?", operation) for operation in operations)
    assert not [operation for operation in operations if re.search("fma|mad|ftz|approx", operation)]


@pytest.mark.parametrize(("name", "architecture"), cases(UPDATES))
def test_an_update_is_compiled_to_wide_accesses(name, architecture):
    code = code_of(UPDATES[name], architecture)
    check(code, 112)
    assert code.bits("st")[128] >= 2, "16 bytes of parameters and of the master"
    coded = 0 if "8bit" not in name or "sgd" in name else 2 if "adam" in name else 1
    narrow = {bits: count for bits, count in code.bits("st").items() if bits < 128}
    assert narrow == ({8: coded, 64: coded} if coded else {}), "an exponent and eight codes of a moment"


@pytest.mark.parametrize(("name", "architecture"), cases(EXPANSIONS))
def test_an_expansion_is_compiled_to_stores_of_16_bytes(name, architecture):
    """The number of values, 1,000,003, is no multiple of 16: the values of the gap are written too."""
    code = code_of(EXPANSIONS[name], architecture)
    check(code, 48)
    assert set(code.bits("st")) == {128}
    assert code.instructions <= 16 * 16, "a thread has 16 values"


@pytest.mark.parametrize(("name", "architecture"), cases(SUMS))
def test_a_sum_is_compiled_to_accesses_of_16_bytes(name, architecture):
    code = code_of(SUMS[name], architecture)
    check(code, 64)
    assert set(code.bits("ld")) == set(code.bits("st")) == {128}

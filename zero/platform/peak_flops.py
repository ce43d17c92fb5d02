"""Peak FLOP/s of GPUs by name, for utilisation (MFU).

Dense peaks of the makers' data sheets, without sparsity, in 10^12 operations a second: of tensor cores for half types
(with fp32 sums where a sheet has both), of ordinary cores for fp32, because torch does not round fp32 to tf32
unasked.
"""

import re
from typing import NamedTuple


class Peak(NamedTuple):
    """The peaks of a GPU whose name has all of these words."""

    words: str
    bf16: float
    fp16: float
    fp32: float


# The first match counts, so special models come first.
PEAKS = (
    Peak("B200", 2250, 2250, 75),
    Peak("H200 NVL", 835.5, 835.5, 60.3),
    Peak("H200", 989.4, 989.4, 66.9),
    Peak("GH200", 989.4, 989.4, 66.9),
    Peak("H100 PCIe", 756.5, 756.5, 51.2),
    Peak("H100 NVL", 835.5, 835.5, 60.3),
    Peak("H100", 989.4, 989.4, 66.9),
    Peak("H800 PCIe", 756.5, 756.5, 51.2),
    Peak("H800", 989.4, 989.4, 66.9),
    Peak("H20", 148, 148, 44),
    Peak("A100", 312, 312, 19.5),
    Peak("A800", 312, 312, 19.5),
    Peak("A40", 149.7, 149.7, 37.4),
    Peak("A30", 165, 165, 10.3),
    Peak("A10G", 70, 70, 35),
    Peak("A10", 125, 125, 31.2),
    Peak("A6000", 154.8, 154.8, 38.7),
    Peak("6000 Ada", 364.2, 364.2, 91.1),
    Peak("L40S", 362, 362, 91.6),
    Peak("L40", 181, 181, 90.5),
    Peak("L4", 121, 121, 30.3),
    Peak("RTX 5090", 209.5, 209.5, 104.8),
    Peak("RTX 4090", 165.2, 165.2, 82.6),
    Peak("RTX 3090 Ti", 80, 80, 40),
    Peak("RTX 3090", 71, 71, 35.6),
    Peak("MI325X", 1307.4, 1307.4, 163.4),
    Peak("MI300X", 1307.4, 1307.4, 163.4),
    Peak("V100 PCIE", 0, 112, 14),
    Peak("V100", 0, 125, 15.7),
    Peak("T4", 0, 65, 8.1),
)

OTHERS = frozenset(("MIG", "Laptop", "Max-Q", "D"))
"""Words of devices that share the name and not the peaks."""


def peak_flops(name: str, dtype: str) -> float | None:
    """Return the peak floating point operations per second of a GPU; None if unknown.

    Args:
        name: as `Device.product` returns it.
        dtype: "bf16", "fp16", "fp32", or "tf32": products of fp32 matrices, where `torch.set_float32_matmul_precision`
            lets tensor cores round their factors. GPUs with bf16 do tf32 at half its rate; others compute in fp32.
    """
    words = set(name.split()) | set(re.split(r"[\s-]+", name))
    if words & OTHERS:
        return None
    match = next((peak for peak in PEAKS if words.issuperset(peak.words.split())), None)
    if match is None:
        return None
    rates = {"bf16": match.bf16, "fp16": match.fp16, "fp32": match.fp32, "tf32": max(match.bf16 / 2, match.fp32)}
    return rates[dtype] * 1e12 or None

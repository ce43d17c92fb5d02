"""Peak FLOP/s, memory and PCIe generation of GPUs by name, to compute model FLOPs utilisation (MFU) and to plan.

The table has the makers' data sheet values without sparsity, in 10^12 operations per second. bf16 and fp16 are the
values of tensor cores, with fp32 accumulation if a sheet has both. fp32 is the value without tensor cores, because
torch does not use tf32 by default.
"""

import re
from typing import NamedTuple


class Peak(NamedTuple):
    """The peaks, in 10^12 operations per second, of a GPU whose name has all of `words`; 0: not supported.

    Attributes:
        share: share of `bf16` and the other peaks that the products of training are assumed to reach.
        gib: memory in GiB, of the largest variant that is common.
        memory: bandwidth of the memory in 10^12 bytes per second.
        pcie: generation of its PCIe, with 16 lanes.
    """

    words: str
    bf16: float
    fp16: float
    fp32: float
    gib: float
    memory: float
    pcie: int
    share: float = 0.6

    def flops(self, dtype: str) -> float:
        """Return the peak operations per second, see `peak_flops`; 0: not supported."""
        tf32 = max(self.bf16 / 2, self.fp32)
        return {"bf16": self.bf16, "fp16": self.fp16, "fp32": self.fp32, "tf32": tf32}[dtype] * 1e12


# The first entry that matches is used, so a variant precedes its base model.
PEAKS = (
    Peak("B200", 2250, 2250, 75, 180, 8.0, 5),
    Peak("H200 NVL", 835.5, 835.5, 60.3, 141, 4.8, 5, share=0.55),
    Peak("H200", 989.4, 989.4, 66.9, 141, 4.8, 5, share=0.55),
    Peak("GH200", 989.4, 989.4, 66.9, 96, 4.0, 5, share=0.55),
    Peak("H100 PCIe", 756.5, 756.5, 51.2, 80, 2.0, 5, share=0.55),
    Peak("H100 NVL", 835.5, 835.5, 60.3, 94, 3.9, 5, share=0.55),
    Peak("H100", 989.4, 989.4, 66.9, 80, 3.35, 5, share=0.55),
    Peak("H800 PCIe", 756.5, 756.5, 51.2, 80, 2.0, 5, share=0.55),
    Peak("H800", 989.4, 989.4, 66.9, 80, 3.35, 5, share=0.55),
    Peak("H20", 148, 148, 44, 96, 4.0, 5),
    Peak("A100", 312, 312, 19.5, 80, 2.04, 4),
    Peak("A800", 312, 312, 19.5, 80, 2.04, 4),
    Peak("A40", 149.7, 149.7, 37.4, 48, 0.696, 4),
    Peak("A30", 165, 165, 10.3, 24, 0.933, 4),
    Peak("A10G", 70, 70, 35, 24, 0.6, 4),
    Peak("A10", 125, 125, 31.2, 24, 0.6, 4),
    Peak("A6000", 154.8, 154.8, 38.7, 48, 0.768, 4),
    Peak("6000 Ada", 364.2, 364.2, 91.1, 48, 0.96, 4),
    Peak("L40S", 362, 362, 91.6, 48, 0.864, 4),
    Peak("L40", 181, 181, 90.5, 48, 0.864, 4),
    Peak("L4", 121, 121, 30.3, 24, 0.3, 4),
    Peak("RTX 5090", 209.5, 209.5, 104.8, 32, 1.792, 5),
    Peak("RTX 4090", 165.2, 165.2, 82.6, 24, 1.008, 4),
    Peak("RTX 3090 Ti", 80, 80, 40, 24, 1.008, 4),
    Peak("RTX 3090", 71, 71, 35.6, 24, 0.936, 4),
    Peak("MI325X", 1307.4, 1307.4, 163.4, 256, 6.0, 5, share=0.4),
    Peak("MI300X", 1307.4, 1307.4, 163.4, 192, 5.3, 5, share=0.4),
    Peak("V100 PCIE", 0, 112, 14, 32, 0.9, 3),
    Peak("V100", 0, 125, 15.7, 32, 0.9, 3),
    Peak("T4", 0, 65, 8.1, 16, 0.32, 3),
)

OTHERS = frozenset(("MIG", "Laptop", "Max-Q", "D"))
"""Words in the names of GPUs that match an entry but have other peaks."""


def peak_flops(name: str, dtype: str) -> float | None:
    """Return the peak floating point operations per second of a GPU; None if unknown.

    Args:
        name: the GPU's model, from `Device.product`.
        dtype: "bf16", "fp16", "fp32" or "tf32". The last is for fp32 matrix products that
            `torch.set_float32_matmul_precision` allows to round. GPUs with bf16 have half its rate for tf32; on other
            GPUs the rate of fp32 is returned.
    """
    match = peak_of(name)
    return None if match is None else match.flops(dtype) or None


def peak_of(name: str) -> Peak | None:
    """Return the peaks of a GPU by its model, from `Device.product`; None if unknown."""
    words = set(name.split()) | set(re.split(r"[\s-]+", name))
    if words & OTHERS:
        return None
    return next((peak for peak in PEAKS if words.issuperset(peak.words.split())), None)

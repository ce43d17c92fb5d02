"""Bytes of model states per rank by formula.

For Adam in mixed precision, P parameters on W ranks. The paper counts 2 bytes of parameters, 2 of gradients, and 12 of
optimizer (fp32 master and two moments). We add gradients up in fp32, so 4 bytes of gradients; one rank with one
microbatch keeps 2, because then nothing is added. Of a bf16 parameter's master we keep the half that it lacks: 2 bytes.

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 3.1 and
figure 1.
"""

from typing import NamedTuple


class States(NamedTuple):
    """Bytes per parameter: whole on every rank, and divided by the ranks."""

    whole: int
    shared: int

    def of(self, numel: int, ranks: int) -> float:
        """Bytes on one rank."""
        return numel * (self.whole + self.shared / ranks)

    def __str__(self) -> str:
        parts = [f"{self.whole}P" * bool(self.whole), f"{self.shared}P/W" * bool(self.shared)]
        return "+".join(filter(None, parts))


OURS = (States(16, 0), States(6, 10), States(2, 14), States(0, 16))
"""By stage, in bf16, with gradients added up in fp32."""

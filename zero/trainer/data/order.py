"""The order of the data: one pure function from (seed, step, row, what) to a number.

A counter-based hash instead of a generator with state: any rank computes any row at once, a resume needs no position,
and the numbers are the same on every machine and version of torch.
"""

import hashlib


def draw(seed: int, step: int, row: int, below: int, *, what: str = "start") -> int:
    """Return a number in [0, below), uniform to one part in 2^64 / below."""
    digest = hashlib.blake2b(f"{what} {seed} {step} {row}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % below

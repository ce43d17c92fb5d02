"""The random order of the data: a pure function from (seed, row, what) to a number.

The number is a hash, not the output of a generator with state. So each rank computes any row directly, a resumed run
needs no saved position, and the numbers are the same on every machine and version of torch.
"""

import hashlib


def draw(seed: int, row: int, below: int, *, what: str = "start") -> int:
    """Return a pseudo-random integer in [0, below), uniform up to a relative error of below / 2^64.

    Args:
        what: the purpose of the number, so that several numbers of one row are independent.
    """
    digest = hashlib.blake2b(f"{what} {seed} {row}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % below

"""Byte sizes: units, rounding to whole blocks, and sizes in messages."""

KiB, MiB, GiB = 1024, 1024**2, 1024**3

BLOCK_BYTES = 4096
"""Alignment of pages and buffers, which direct file access and memory locked for a device require."""


def round_up(count: int, multiple: int = BLOCK_BYTES) -> int:
    """Return the smallest multiple of `multiple` that is at least `count`."""
    return -(-count // multiple) * multiple


def size_text(count: int) -> str:
    """Return a number of bytes as text with the largest unit that fits, such as "1.5 GiB"."""
    for unit, name in ((1024 * GiB, "TiB"), (GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} B"

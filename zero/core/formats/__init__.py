"""Packed formats of frozen parameters, each in a file of its own; a new one needs a line in the table."""

from zero.core.formats.int8 import INT8
from zero.core.formats.nf4 import NF4
from zero.core.formats.packed import EXPANDED_AT_ONCE, PackedFormat

PACKED_FORMATS: dict[str, PackedFormat] = {form.name: form for form in (NF4, INT8)}
"""The formats by their names in settings and checkpoints."""

__all__ = ["EXPANDED_AT_ONCE", "PACKED_FORMATS", "PackedFormat"]

"""Whole values: read, edit, stream and write full parameters, whatever their sharding and tier."""

from zero.engine.whole.edit import gathered, set_full
from zero.engine.whole.first_values import (
    Check,
    Values,
    Weights,
    add_empty_buffers,
    compare,
    empty_shards,
    empty_unit,
    fill,
    values_in,
    values_of,
)
from zero.engine.whole.flat_writer import FlatWriter
from zero.engine.whole.measured import measured
from zero.engine.whole.names import Source
from zero.engine.whole.read import full_state_dict, full_values, get_full
from zero.engine.whole.streaming import stream_weights

__all__ = [
    "Check",
    "FlatWriter",
    "Source",
    "Values",
    "Weights",
    "add_empty_buffers",
    "compare",
    "empty_shards",
    "empty_unit",
    "fill",
    "full_state_dict",
    "full_values",
    "gathered",
    "get_full",
    "measured",
    "set_full",
    "stream_weights",
    "values_in",
    "values_of",
]

"""The model: taken apart into units, taken over in place, its first values recorded."""

from zero.engine.model.coded import CodedWeights, codes_in, frozen_matrices, packed_names
from zero.engine.model.compile import Backend, Compiler, check_backend, described
from zero.engine.model.module_tree import ModuleTree
from zero.engine.model.placeholder import ParameterPlaceholder, in_backward
from zero.engine.model.recorded_values import RecordedValues, reached
from zero.engine.model.split import embedding_ids, split
from zero.engine.model.takeover import (
    NOT_PLACED,
    Body,
    SiteRun,
    Takeover,
    attach,
    buffers_of,
    call_through,
    call_with,
    move_buffers,
    refuse_taken,
    same_bits,
)
from zero.engine.model.unit import Binding, Flat, Site, Splitting, UnitSpec, first_to_last
from zero.engine.model.unsupported import note_dtypes

__all__ = [
    "NOT_PLACED",
    "Backend",
    "Binding",
    "Body",
    "CodedWeights",
    "Compiler",
    "Flat",
    "ModuleTree",
    "ParameterPlaceholder",
    "RecordedValues",
    "Site",
    "SiteRun",
    "Splitting",
    "Takeover",
    "UnitSpec",
    "attach",
    "buffers_of",
    "call_through",
    "call_with",
    "check_backend",
    "codes_in",
    "described",
    "embedding_ids",
    "first_to_last",
    "frozen_matrices",
    "in_backward",
    "move_buffers",
    "note_dtypes",
    "packed_names",
    "reached",
    "refuse_taken",
    "same_bits",
    "split",
]

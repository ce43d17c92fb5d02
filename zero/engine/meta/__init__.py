"""Models on meta: parameters without values, whose operations are recorded until `zero.init` runs them."""

from zero.engine.meta.function_names import requested, writes
from zero.engine.meta.on_meta import absent, dispatch_trunc_normal, empty
from zero.engine.meta.operations import Recipe, RecordedOperation, RecordedRoot
from zero.engine.meta.unmade import Unmade, explaining_meta, is_meta, lacks_values

__all__ = [
    "Recipe",
    "RecordedOperation",
    "RecordedRoot",
    "Unmade",
    "absent",
    "dispatch_trunc_normal",
    "empty",
    "explaining_meta",
    "is_meta",
    "lacks_values",
    "requested",
    "writes",
]

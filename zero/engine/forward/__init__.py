"""Forward: run the sites of a model on parameters that are gathered just before, and released after."""

from zero.engine.forward.fetch import Fetch, gathering, lending, reading
from zero.engine.forward.gather import Gatherer, bind_placeholders, refuse_compiler
from zero.engine.forward.recompute import recomputed_call
from zero.engine.forward.residency import Residency

__all__ = [
    "Fetch",
    "Gatherer",
    "Residency",
    "bind_placeholders",
    "gathering",
    "lending",
    "reading",
    "recomputed_call",
    "refuse_compiler",
]

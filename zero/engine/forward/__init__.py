"""Forward: run the sites of a model on parameters that are gathered just before, and released after."""

from zero.engine.forward.recompute import recomputed_call
from zero.engine.forward.rows import KNOWN, Chunks
from zero.engine.forward.run_sites import SiteRunner, refuse_compiler

__all__ = ["KNOWN", "Chunks", "SiteRunner", "recomputed_call", "refuse_compiler"]

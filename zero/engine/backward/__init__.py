"""Backward: gradients arrive unit by unit, and are added over calls, microbatches and ranks."""

from zero.engine.backward.backward_pass import BackwardPass
from zero.engine.backward.reduce import Reducer

__all__ = ["BackwardPass", "Reducer"]

"""Backward: gradients arrive call by call, are reduced unit by unit in rounds, and leave their sum in `grad`."""

from zero.engine.backward.arrivals import Reducer
from zero.engine.backward.backward_pass import BackwardPass

__all__ = ["BackwardPass", "Reducer"]

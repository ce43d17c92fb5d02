"""Backward: gradients arrive call by call, are reduced unit by unit in rounds, and leave their sum in `grad`."""

from zero.engine.backward.arrivals import Reducer

__all__ = ["Reducer"]

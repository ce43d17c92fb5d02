"""Gathers: all-gather units into buffers just before their use, the next ones ahead of time."""

from zero.engine.gather.expand import expansion_numel
from zero.engine.gather.fetch import Fetch, gathering, lending, reading
from zero.engine.gather.gathers import Gathers
from zero.engine.gather.residency import Residency
from zero.engine.gather.visit_order import CollectiveLog

__all__ = ["CollectiveLog", "Fetch", "Gathers", "Residency", "expansion_numel", "gathering", "lending", "reading"]

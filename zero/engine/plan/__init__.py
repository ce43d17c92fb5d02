"""The plan: what each rank will hold, on which tier and in which pages, before anything is allocated."""

from zero.engine.plan.beside import refuse_equal_parts
from zero.engine.plan.handshake import settings_of, settings_of_groups
from zero.engine.plan.held import KINDS, between_steps
from zero.engine.plan.parts import Part, parts_of
from zero.engine.plan.placing import THREADS, thread_count
from zero.engine.plan.plan import Plan
from zero.engine.plan.settings import Arrangement, activations_of, check_settings, policies_of, split_for
from zero.engine.plan.traffic import Load, traffic

__all__ = [
    "KINDS",
    "THREADS",
    "Arrangement",
    "Load",
    "Part",
    "Plan",
    "activations_of",
    "between_steps",
    "check_settings",
    "parts_of",
    "policies_of",
    "refuse_equal_parts",
    "settings_of",
    "settings_of_groups",
    "split_for",
    "thread_count",
    "traffic",
]

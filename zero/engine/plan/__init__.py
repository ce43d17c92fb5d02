"""The plan: what each rank will hold, on which tier and in which pages, before anything is allocated."""

from zero.engine.plan.arguments import (
    NOTHING_TRAINS,
    check_folder,
    check_function,
    check_loss,
    check_loss_fn,
    check_microbatches,
    check_type,
    loss_and_aux,
    numbers_by_name,
    type_text,
)
from zero.engine.plan.beside import refuse_equal_parts
from zero.engine.plan.handshake import settings_of, settings_of_groups
from zero.engine.plan.parts import Part, parts_of
from zero.engine.plan.placing import THREADS, thread_count
from zero.engine.plan.plan import KINDS, Plan, activations_of
from zero.engine.plan.traffic import Load, traffic

__all__ = [
    "KINDS",
    "NOTHING_TRAINS",
    "THREADS",
    "Load",
    "Part",
    "Plan",
    "activations_of",
    "check_folder",
    "check_function",
    "check_loss",
    "check_loss_fn",
    "check_microbatches",
    "check_type",
    "loss_and_aux",
    "numbers_by_name",
    "parts_of",
    "refuse_equal_parts",
    "settings_of",
    "settings_of_groups",
    "thread_count",
    "traffic",
    "type_text",
]

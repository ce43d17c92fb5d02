"""What a run will take and how long it will last, from shapes alone; and numbers for every setting that is auto."""

from zero.engine.measured import measured
from zero.trainer.planning.activations import Activations
from zero.trainer.planning.choices import Choice, best, choices
from zero.trainer.planning.cost import Rates, step_seconds, traffic
from zero.trainer.planning.machine import Machine, PaperWorld
from zero.trainer.planning.out_of_memory import out_of_memory
from zero.trainer.planning.resolve_auto import resolve_auto
from zero.trainer.planning.table import against_measured, plan_text
from zero.trainer.planning.tracing import trace

__all__ = [
    "Activations", "Choice", "Machine", "PaperWorld", "Rates", "against_measured", "best", "choices", "measured",
    "out_of_memory", "plan_text", "resolve_auto", "step_seconds", "trace", "traffic",
]  # fmt: skip

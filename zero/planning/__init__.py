"""What a run will take and how long it will last, from shapes alone; and numbers for what was left to us."""

from torch import nn

from zero.config import Config
from zero.planning.activations import Activations, trace
from zero.planning.choices import Choice, best, choices
from zero.planning.cost import Rates, step_seconds, traffic
from zero.planning.machine import Machine, PaperWorld
from zero.planning.measured import measured
from zero.planning.settle import settle
from zero.planning.table import against_measured, plan_text

__all__ = [
    "Activations",
    "Choice",
    "Machine",
    "PaperWorld",
    "Rates",
    "activation_bytes",
    "against_measured",
    "best",
    "choices",
    "measured",
    "plan_text",
    "settle",
    "step_seconds",
    "trace",
    "traffic",
]


def activation_bytes(config: Config, model: nn.Module) -> int:
    """Most bytes that forward and backward of a microbatch hold beside parameters and gradients, of a solved batch."""
    return Activations(config, model).of(config.batch.numbers()[1]).peak_bytes

"""What a run will take and how long it will last, from shapes alone; and numbers for what was left to us."""

from torch import nn

from zero.config import Config
from zero.planning.activations import Activations, trace
from zero.planning.choices import Choice, best, choices
from zero.planning.cost import Rates, step_seconds, traffic
from zero.planning.exhausted import out_of_memory
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
    "out_of_memory",
    "plan_text",
    "settle",
    "step_seconds",
    "trace",
    "traffic",
]


def activation_bytes(config: Config, model: nn.Module, device: str) -> int:
    """What a plan should count for forward and backward of a microbatch, beside parameters and gradients.

    Args:
        config: its batch as numbers.
        device: "cuda" or "cpu", `world.compute.kind`.
    """
    return Activations(config, model).bytes(config.batch.numbers()[1], device)

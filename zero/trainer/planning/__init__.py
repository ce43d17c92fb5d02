"""What a run will take and how long it will last, from shapes alone; and numbers for what was left to us."""

from torch import nn

from zero.trainer.config import Config
from zero.trainer.planning.activations import Activations, trace
from zero.trainer.planning.choices import Choice, best, choices
from zero.trainer.planning.cost import Rates, step_seconds, traffic
from zero.trainer.planning.exhausted import out_of_memory
from zero.trainer.planning.machine import Machine, PaperWorld
from zero.trainer.planning.measured import measured
from zero.trainer.planning.resolve_auto import resolve_auto
from zero.trainer.planning.table import against_measured, plan_text

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
    "resolve_auto",
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

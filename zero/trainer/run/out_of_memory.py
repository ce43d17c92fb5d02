"""The error of a GPU that ran out of memory although the plan fitted: bytes, and settings that need less."""

import contextlib
from collections.abc import Iterator

import torch

from zero.core.activations import REMAT
from zero.core.sizes import size_text
from zero.engine.plan import Plan
from zero.errors import MachineError
from zero.trainer.config import Config


@contextlib.contextmanager
def out_of_memory_explained(config: Config, plan: Plan) -> Iterator[None]:
    """Turn torch's out-of-memory error into one with the bytes planned and held, and settings that need less.

    Raises:
        MachineError: in place of torch's error.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        device = plan.world.compute
        raise MachineError(out_of_memory(config, plan, device.peak_bytes(), device.total_bytes())) from error


def out_of_memory(config: Config, plan: Plan, held_bytes: int, device_bytes: int) -> str:
    """Return the error message for a GPU that ran out of memory although the plan fitted.

    Args:
        config: settings of the run, with every auto resolved.
        held_bytes: the most bytes that tensors took on the device.
        device_bytes: total memory of the device.
    """
    ways = {
        "a smaller batch.micro": config.batch.numbers()[1] > 1,
        "zero.stage=3": plan.world.size > 1 and not plan.facts.stage.parameters,
        f"zero.activations={REMAT.name}": config.zero.activations != REMAT.name,
        "offload=cpu": config.offload.optimizer in ("none", "auto"),
        "more ranks": True,
    }
    planned_bytes = sum(plan.bytes["device"].values())
    return (
        f"the GPU ran out of memory: planned {size_text(planned_bytes)}, taken {size_text(held_bytes)} of "
        f"{size_text(device_bytes)}. Use {', or '.join(way for way, helps in ways.items() if helps)}."
    )

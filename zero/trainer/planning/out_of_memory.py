"""The message for a GPU that ran out of memory although the plan fitted: what was taken, and what would fit.

Reality took more than the plan, by what kernels and the allocator hold beside tensors. The same share is expected of
every other setting.
"""

from collections.abc import Iterator

from torch import nn

from zero.core.placement import NO_LIMIT, size_text
from zero.core.stage import Stage
from zero.engine.plan import Plan
from zero.errors import ConfigError
from zero.trainer.config import Config
from zero.trainer.planning.choices import planned, with_activations, with_setting

PROPOSED = 3
"""Settings in one message, at most."""


def out_of_memory(config: Config, plan: Plan, model: nn.Module, *, taken_bytes: int, device_bytes: int) -> str:
    """One line.

    Args:
        config: of the run, with every auto resolved.
        taken_bytes: the most that tensors took on the device.
        device_bytes: all that it has.
    """
    planned_bytes = device_bytes_of(plan)
    message = f"the GPU ran out of memory: planned {size_text(planned_bytes)}, taken {size_text(taken_bytes)}"
    message += f" of {size_text(device_bytes)}"
    beyond = max(1.0, taken_bytes / planned_bytes)
    fitting = []
    for keys, other in alternatives(config):
        try:
            needs_bytes = int(device_bytes_of(planned(other, model, plan.world, NO_LIMIT)) * beyond)
        except ConfigError:  # a budget that the user gave
            continue
        if needs_bytes < min(device_bytes, taken_bytes):
            fitting.append(f"{keys} ({size_text(needs_bytes)})")
    if not fitting:
        return f"{message}; nothing smaller fits on {plan.world.size} ranks: use more, or a smaller model.seq"
    return f"{message}; these would fit: {', or '.join(fitting[:PROPOSED])}"


def device_bytes_of(plan: Plan) -> int:
    """Planned for the device of one rank, activations included."""
    return sum(plan.bytes["device"].values())


def alternatives(config: Config) -> Iterator[tuple[str, Config]]:
    """What to type, and the settings with it: what costs least speed first."""
    _, micro, accumulate = config.batch.numbers()
    fewer = next((less for less in range(micro // 2, 0, -1) if micro % less == 0), None)
    if fewer is not None:
        more = accumulate * micro // fewer
        batch = config.batch.model_copy(update={"micro": fewer, "accumulate": more})
        yield f"batch.micro={fewer} batch.accumulate={more}", config.model_copy(update={"batch": batch})
    sharded = with_setting(config, Stage(3), "config")
    if sharded is not None and sharded != config:
        yield "zero.stage=3", sharded
    recomputing = [("", config)]
    if config.zero.activations != "remat":
        remat = with_activations(config, "remat")
        yield "zero.activations=remat", remat
        recomputing.append(("zero.activations=remat ", remat))
    for preset in ("cpu", "nvme"):
        for keys, base in recomputing:
            offloaded = with_setting(base, Stage(3), preset)
            if offloaded is not None:
                yield f"{keys}zero.stage=3 offload={preset}", offloaded

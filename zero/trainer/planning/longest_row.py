"""The longest row that fits in a microbatch, beside the state that a plan places."""

from torch import nn

from zero.trainer.config import Config
from zero.trainer.planning.choices import Choice, bytes_by_tier
from zero.trainer.planning.machine import Machine
from zero.trainer.planning.traces.activations import ActivationTraces

ROUND_TOKENS = 64
"""Rows are rounded down to this many tokens for each rank that shares them."""

ATTEMPTS = 5
"""Limit on the lengths that are traced. A trace of a long row with a large vocabulary takes seconds."""

CLOSE = 0.03
"""Relative difference between two lengths at which the search ends."""


def longest_row(choice: Choice, config: Config, machine: Machine, activations: ActivationTraces) -> tuple[int, bool]:
    """Return the tokens of the longest row that fits alone in a microbatch, and whether the model allows no longer row.

    Bytes are almost linear in tokens, so the next length to trace is taken from a line through the last two.

    Args:
        choice: a choice that fits. Its state stays where it is.
        config: the settings that rows are traced with.
        activations: the traces of the model with the rows of `config`.
    """
    model, traces = activations.model, activations.resolved(config)
    room_bytes = _room_bytes(choice, config, machine) + _buffer_bytes(model)
    step, most = ROUND_TOKENS * config.zero.sequence, _longest_of(model)
    before, tokens, longest = (0, 0), config.model.seq, 0
    nbytes = traces.bytes(1, machine.device) + _buffer_bytes(model)
    for _ in range(ATTEMPTS):
        if nbytes <= room_bytes:
            longest = max(longest, tokens)
        slope = (nbytes - before[1]) / (tokens - before[0])
        following = int(tokens + (room_bytes - nbytes) / slope)
        following = min(following, most or following) // step * step
        if abs(following - tokens) <= CLOSE * tokens:
            if nbytes <= room_bytes:
                break
            following = int((1 - CLOSE) * following) // step * step
        if following < step:
            break
        before, tokens = (tokens, nbytes), following
        longer = traces.at(tokens, machine.world)
        nbytes = longer.bytes(1, machine.device) + _buffer_bytes(longer.model)  # with tables of positions
    return longest, most is not None and longest == most // step * step


def _room_bytes(choice: Choice, config: Config, machine: Machine) -> int:
    """Return the bytes that activations may take on the device of a rank, or in host memory if the CPU computes."""
    held_bytes = bytes_by_tier(choice.plan)["device" if machine.device == "cuda" else "host"]
    return machine.limit_bytes(config.offload) - held_bytes + choice.plan.activation_bytes


def _buffer_bytes(model: nn.Module) -> int:
    return sum(buffer.nbytes for buffer in model.buffers())


def _longest_of(model: nn.Module) -> int | None:
    """Return the number of positions of a model of transformers; None: as many as are set."""
    settings = getattr(model, "config", None)
    text = getattr(settings, "get_text_config", lambda: None)()
    return getattr(text, "max_position_embeddings", None)

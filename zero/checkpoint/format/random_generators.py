"""Read and set the random generators of a rank: Python's, and torch's on the CPU and on the GPU. The state is JSON."""

import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zero.platform.files import memory_of


def random_state() -> dict[str, Any]:
    """Return the state of this rank's random generators."""
    version, internal, following = random.getstate()
    return {
        "python": [version, list(internal), following],
        "torch": bytes(memory_of(torch.get_rng_state())).hex(),
        "cuda": bytes(memory_of(torch.cuda.get_rng_state())).hex() if torch.cuda.is_initialized() else None,
    }


def set_random(state: Mapping[str, Any]) -> None:
    """Restore the generators from a result of `random_state`."""
    version, internal, following = state["python"]
    random.setstate((version, tuple(internal), following))
    torch.set_rng_state(_octets(state["torch"]))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_octets(state["cuda"]))


def _octets(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)

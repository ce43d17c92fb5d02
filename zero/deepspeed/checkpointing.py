"""DeepSpeed's functions for activation checkpointing, which call torch's."""

from collections.abc import Callable
from typing import Any

from torch.utils import checkpoint as torch_checkpoint


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return `function(*args, **kwargs)`, and compute it again in backward instead of keeping its activations.

    Args:
        function: the function.
        *args: its arguments.
        **kwargs: its arguments by name, and torch's options.
    """
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)


def configure(*args: Any, **kwargs: Any) -> None:
    """Do nothing, because `checkpoint` has no settings.

    Args:
        *args: ignored.
        **kwargs: ignored.
    """


def is_configured() -> bool:
    """Return True, because `checkpoint` needs no `configure`."""
    return True


def reset() -> None:
    """Do nothing, because `checkpoint` keeps nothing between two calls."""

"""DeepSpeed's activation checkpointing, which is torch's here."""

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
    """Do nothing: `checkpoint` has no settings.

    Args:
        *args: ignored.
        **kwargs: ignored.
    """


def is_configured() -> bool:
    """Return True: `checkpoint` needs no `configure`."""
    return True


def reset() -> None:
    """Do nothing: nothing is kept between two calls."""

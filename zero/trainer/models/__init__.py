"""Models to train. Their settings are available without torch; the models themselves are imported on first use.

A check of settings must end within two seconds, and importing torch takes most of that.
"""

from typing import TYPE_CHECKING, Any

from zero.trainer.models.gpt_config import GPTConfig

if TYPE_CHECKING:
    from zero.trainer.models.gpt import GPT, generate, loss

__all__ = ["GPT", "GPTConfig", "generate", "loss"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from zero.trainer.models import gpt

        return getattr(gpt, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

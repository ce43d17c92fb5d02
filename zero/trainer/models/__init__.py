"""Models to train: sizes here and in `gpt_config`, without torch; the modules load on first use.

A settings check must answer within two seconds, and importing torch takes most of that.
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

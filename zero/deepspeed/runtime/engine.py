"""The class `Engine` under DeepSpeed's name."""

from zero.user_loop.engine import Engine as DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]

"""The class `Engine` under DeepSpeed's name."""

from zero.deepspeed.engine import Engine as DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]

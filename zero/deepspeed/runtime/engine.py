"""The engine by DeepSpeed's name."""

from zero.deepspeed.engine import Engine as DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]

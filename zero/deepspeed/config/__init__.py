"""A DeepSpeed configuration, and its translation to settings of this library."""

from zero.deepspeed.config.translation import (
    Translation as Translation,
    overrides as overrides,
    translate as translate,
)

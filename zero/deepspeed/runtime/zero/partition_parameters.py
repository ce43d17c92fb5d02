"""Names that scripts import from DeepSpeed's module of this name."""

from zero.deepspeed.zero import (
    GatheredParameters as GatheredParameters,
    Init as Init,
    ZeroParamStatus as ZeroParamStatus,
)

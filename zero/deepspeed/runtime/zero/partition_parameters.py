"""Names that scripts import from `deepspeed.runtime.zero.partition_parameters`."""

from zero.deepspeed.zero import (
    GatheredParameters as GatheredParameters,
    Init as Init,
    ZeroParamStatus as ZeroParamStatus,
)

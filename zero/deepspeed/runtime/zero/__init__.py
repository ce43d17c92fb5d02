"""`deepspeed.runtime.zero`, the longer name of `deepspeed.zero`."""

from zero.deepspeed.zero import GatheredParameters as GatheredParameters, Init as Init

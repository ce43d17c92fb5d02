"""`torch.distributed` by DeepSpeed's name: `import zero.deepspeed.comm as dist`."""

import os

from torch.distributed import *  # noqa: F403

from zero.deepspeed.initialization import init_distributed as init_distributed


def get_local_rank() -> int:
    """Return the number of this process on its machine, from 0."""
    return int(os.environ.get("LOCAL_RANK", "0"))

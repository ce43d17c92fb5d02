"""Checkpoints that load anywhere: one folder per step, published whole or not at all.

`hashes` and `manifest` say what a checkpoint is, `disk`, `shard` and `publish` write and read it, and `contents`,
`save` and `load` know what of a state it holds.
"""

from zero.checkpoint.load import (
    Checkpoint,
    Tensors,
    load,
    newest,
    open_at,
    open_checkpoint,
    open_first,
    open_latest,
    weights_of,
)
from zero.checkpoint.publish import Root
from zero.checkpoint.save import Saving, begin, save, snapshot_bytes

__all__ = [
    "Checkpoint",
    "Root",
    "Saving",
    "Tensors",
    "begin",
    "load",
    "newest",
    "open_at",
    "open_checkpoint",
    "open_first",
    "open_latest",
    "save",
    "snapshot_bytes",
    "weights_of",
]

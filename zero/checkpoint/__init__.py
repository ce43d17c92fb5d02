"""Save and load checkpoints: one folder per step, published atomically, loadable at any stage, tier and world size.

`hashes` and `manifest` define the format; `disk`, `shard` and `publish` write and read files; `open` finds a checkpoint
and verifies every byte; `contents`, `save` and `load` convert between a checkpoint and a state.
"""

from zero.checkpoint.load import load as load
from zero.checkpoint.open import (
    Checkpoint as Checkpoint,
    Tensors as Tensors,
    newest as newest,
    open_at as open_at,
    open_checkpoint as open_checkpoint,
    open_first as open_first,
    open_latest as open_latest,
    shape_of as shape_of,
    weights_of as weights_of,
)
from zero.checkpoint.publish import Root as Root
from zero.checkpoint.save import Saving as Saving, save as save, snapshot_bytes as snapshot_bytes

"""Save and load checkpoints: one folder per step, published whole or not at all, loadable in any setting.

`hashes` and `manifest` define the format; `disk`, `shard` and `publish` write and read files; `open` finds a checkpoint
and compares every byte; `contents`, `save` and `load` connect it with a state.
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
    weights_of as weights_of,
)
from zero.checkpoint.publish import Root as Root
from zero.checkpoint.save import Saving as Saving, save as save, snapshot_bytes as snapshot_bytes

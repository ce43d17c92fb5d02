"""Save and load checkpoints: one folder per step, published atomically, loadable at any stage, tier and world size.

`format` defines the texts, and `files` writes, publishes and reads them. `find` chooses a checkpoint, `open` verifies
every byte, and `tensors` reads values. `contents`, `save` and `load` convert between a checkpoint and a state.
"""

from zero.checkpoint.files.listing import Listing as Listing
from zero.checkpoint.files.publish import Root as Root
from zero.checkpoint.find import (
    newest as newest,
    open_at as open_at,
    open_first as open_first,
    open_latest as open_latest,
)
from zero.checkpoint.load import load as load
from zero.checkpoint.open import open_checkpoint as open_checkpoint
from zero.checkpoint.save import Saving as Saving, save as save, snapshot_bytes as snapshot_bytes
from zero.checkpoint.tensors import (
    Checkpoint as Checkpoint,
    Tensors as Tensors,
    shape_of as shape_of,
    weights_of as weights_of,
)

"""Checkpoints to and from what other libraries read and write.

`stream` is what every format is turned into and made of. `hf`, `pickled`, `dcp` and `deepspeed` know one format each;
`export` and `adopt` know checkpoints, `converted` exports by DeepSpeed's names. Nothing that saves, loads or resumes
imports this package: here alone is pickle met, and never without a list of what it may build.
"""

from zero.formats.export_checkpoint import Exported, export, open_newest
from zero.formats.import_checkpoint import Adopted, Choice, adopt, read_source
from zero.formats.progress_bar import shown

__all__ = ["Adopted", "Choice", "Exported", "adopt", "export", "open_newest", "read_source", "shown"]

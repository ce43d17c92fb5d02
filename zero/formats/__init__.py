"""Convert checkpoints to and from the files of other libraries.

Every format is read into and written from `stream`. `safetensors_folder`, `torch_file`, `dcp` and `universal` each
implement one format; `exports` and `imports` read and write checkpoints. No module that saves, loads or resumes imports
this package: pickles are read only here, and only with a list of the classes that they may build.
"""

from zero.formats.exports import Exported, export_checkpoint, open_newest
from zero.formats.imports import Choice, Imported, import_checkpoint, read_source
from zero.formats.progress_bar import progress_bar

__all__ = [
    "Choice",
    "Exported",
    "Imported",
    "export_checkpoint",
    "import_checkpoint",
    "open_newest",
    "progress_bar",
    "read_source",
]

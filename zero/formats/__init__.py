"""Convert checkpoints to and from the files of other libraries.

Every format is read into a `Stream` and written from one. `safetensors_folder`, `adapter`, `torch_file`, `dcp` and
`universal` each implement one format; `exports` reads checkpoints and `imports` writes them; `four_bit` takes over a
model. Pickles are read only in this package, and may only create objects of an allowed list of classes. So no module
that saves, loads or resumes imports it.
"""

from zero.formats.exports import Exported, export_checkpoint, open_newest
from zero.formats.four_bit import from_bitsandbytes
from zero.formats.imports import ImportChoice, Imported, import_checkpoint, open_source
from zero.formats.progress_bar import progress_bar

__all__ = [
    "Exported",
    "ImportChoice",
    "Imported",
    "export_checkpoint",
    "from_bitsandbytes",
    "import_checkpoint",
    "open_newest",
    "open_source",
    "progress_bar",
]

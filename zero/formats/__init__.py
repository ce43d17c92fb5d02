"""Checkpoints to and from what other libraries read and write.

`stream` is what every format is turned into, and made from. `hf`, `torch_file`, `dcp` and `universal` know one format
each; `export_checkpoint` and `import_checkpoint` know checkpoints. Nothing that saves, loads or resumes imports this
package: only here are pickles read, and never without a list of what they may build.
"""

import warnings
from typing import Any

from zero.formats.export_checkpoint import Exported, export_checkpoint, open_newest
from zero.formats.import_checkpoint import Choice, Imported, import_checkpoint, read_source
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

_RENAMED = {
    "adopt": "import_checkpoint",
    "Adopted": "Imported",
    "export": "export_checkpoint",
    "shown": "progress_bar",
}
"""Names of 0.1, which are available for one more version."""


def __getattr__(name: str) -> Any:
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"zero.formats.{name} is zero.formats.{_RENAMED[name]} now", DeprecationWarning, stacklevel=2)
    return globals()[_RENAMED[name]]

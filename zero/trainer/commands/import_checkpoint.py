"""Import a checkpoint of another library; train.py continues from it with resume=ROOT.

    scripts/import --from hf model-folder --out ROOT                 # or a .safetensors file
    scripts/import --from torch model.pt --out ROOT --prefix model.
    scripts/import --from dcp folder --out ROOT --tied head.weight=embed.weight
    scripts/import --from deepspeed universal-folder --out ROOT      # from ds_to_universal: also moments and step

torch, dcp and deepspeed files are pickles, which can contain programs: import only files that you trust. A file that
needs anything but tensors, numbers and containers is rejected, and none of its code runs. hf files are not pickles.

Parts that the source lacks start anew: moments at zero, loss scale and random generators at their initial values. The
load compares names and shapes with the model. The import takes a few MiB of memory for hf, torch and deepspeed, whose
files are mapped, and twice the largest tensor for dcp.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from zero.errors import ZeroError
from zero.formats import ImportChoice, import_checkpoint, open_source, progress_bar
from zero.formats.imports import IMPORT_FORMATS
from zero.platform.installed import as_called
from zero.trainer.text_output import command_line


def tie(text: str) -> tuple[str, str]:
    name, equals, owner = text.partition("=")
    if not (name and equals and owner):
        raise argparse.ArgumentTypeError(f"{text!r}: write FURTHER_NAME=NAME, such as head.weight=embed.weight")
    return name, owner


def moments(text: str) -> tuple[str, ...]:
    return () if text == "none" else tuple(text.split(","))


def step(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of steps")
    return int(text)


def arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = command_line("import", __doc__)
    parser.add_argument("source", type=Path, help="file or folder to import")
    parser.add_argument("--from", dest="from_", required=True, choices=IMPORT_FORMATS, help="its format")
    parser.add_argument("--out", required=True, type=Path, metavar="ROOT", help="folder of checkpoints; need not exist")
    parser.add_argument("--prefix", default="", help="import only names with this prefix, and remove it")
    parser.add_argument(
        "--tied", action="append", type=tie, default=[], help="FURTHER_NAME=NAME; their values must be equal"
    )
    parser.add_argument(
        "--frozen", action="append", default=[], help="name or pattern of parameters that are not trained"
    )
    parser.add_argument("--buffers", action="append", default=[], help="name or pattern of buffers")
    parser.add_argument(
        "--moments", type=moments, default=("mu", "nu"), help="optimizer moments: mu,nu (Adam), mu (Lion, SGD) or none"
    )
    parser.add_argument("--step", type=step, help="number of updates so far; default: from the source, or 0")
    return parser.parse_args(words)


def main(words: Sequence[str]) -> int:
    options = arguments(words)
    choice = ImportChoice(
        prefix=options.prefix,
        moments=options.moments,
        frozen=tuple(options.frozen),
        buffers=tuple(options.buffers),
        ties=dict(options.tied),
        step=options.step,
    )
    try:
        with progress_bar() as progress:
            done = import_checkpoint(open_source(options.from_, options.source), options.out, choice, progress)
    except ZeroError as error:
        print(as_called(str(error)), file=sys.stderr)
        return error.exit_code
    for line in done.notes:
        print(line)
    print(f"{options.source} -> {done.folder}")
    return 0

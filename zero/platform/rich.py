"""The names of `rich` that this library uses, imported without a change to the state of Python's `random`.

`rich.style` draws a random number when it is imported, which would change the user's random sequence.
"""
# ruff: noqa: E402

import random

_state = random.getstate()

from rich import progress as progress
from rich.console import Console as Console, Group as Group, RenderableType as RenderableType
from rich.control import Control as Control
from rich.live import Live as Live
from rich.progress_bar import ProgressBar as ProgressBar
from rich.segment import ControlType as ControlType
from rich.table import Table as Table
from rich.text import Text as Text

random.setstate(_state)

"""A progress bar with the time left, for scripts on a terminal."""

import contextlib
from collections.abc import Iterator

from zero.platform.rich import Console, progress as rich_progress
from zero.progress import Progress, silent


@contextlib.contextmanager
def progress_bar(console: Console | None = None) -> Iterator[Progress]:
    """Show a progress bar on `console`, by default stderr, until the block ends. Yield the function that updates it.

    Without a terminal nothing is shown.
    """
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield silent
        return
    columns = (
        rich_progress.TextColumn("{task.description}", markup=False),
        rich_progress.BarColumn(),
        rich_progress.TaskProgressColumn(),
        rich_progress.TimeRemainingColumn(),
    )
    with rich_progress.Progress(*columns, console=console, transient=True) as bars:
        tasks: dict[str, rich_progress.TaskID] = {}

        def update(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what)
            bars.update(tasks[what], completed=done, total=total)

        yield update

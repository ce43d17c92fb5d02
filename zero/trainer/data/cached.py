"""A cached folder that rank 0 finds or makes while the other ranks wait, so that every rank reads the same bytes."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from zero.errors import ConfigError
from zero.platform.files import appearing
from zero.progress import Progress

if TYPE_CHECKING:
    from zero.distributed.world import World

ABOUT_FILE = "about.json"
"""The file in a folder with what was made, for people and for messages."""

STILL = "still at it"


def agreed_folder(
    world: "World", what: str, file: str, find_or_make: Callable[[Progress], Path], progress: Progress
) -> Path:
    """Return the folder, on every rank. Collective.

    While rank 0 makes the folder it sends messages to the other ranks, so that their wait does not time out.

    Args:
        what: describes the folder in messages about a rank that hangs.
        file: the name of a file in it.
        find_or_make: returns the folder; called on rank 0.

    Raises:
        ConfigError: a rank does not see the folder.
    """
    world.at(what)
    if world.rank == 0:
        spoke_s = time.monotonic()

        def report(what: str, done: int, total: int) -> None:
            nonlocal spoke_s
            progress(what, done, total)
            if time.monotonic() - spoke_s > world.timeout_s / 4:
                world.share(STILL)
                spoke_s = time.monotonic()

        return Path(world.share(str(find_or_make(report))))
    while (folder := world.share("")) == STILL:
        pass
    if not Path(folder, file).is_file():
        raise ConfigError(
            f"rank {world.rank} does not see {folder}, but rank 0 does. Set data.cache to a folder on a shared disk."
        )
    return Path(folder)


def published(folder: Path, file: str, make: Callable[[Path], None]) -> None:
    """Call `make` with a temporary folder, and rename that to `folder`.

    If another run has made `folder` meanwhile, that folder is used, because its bytes are the same.

    Args:
        file: the name of a file in the folder.

    Raises:
        ConfigError: this user may not write there.
    """
    try:
        with appearing(folder) as unfinished:
            try:
                unfinished.mkdir(parents=True)
            except OSError as error:
                raise ConfigError(
                    f"data.cache={folder.parent}: {error.strerror}. Give a folder where this user may write."
                ) from error
            make(unfinished)
    except OSError:  # for example, another run has made the folder
        if not (folder / file).is_file():
            raise

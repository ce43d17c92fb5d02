"""DeepSpeed's logger, which is this library's."""

import logging
import os
from collections.abc import Iterable

logger = logging.getLogger("zero")


def log_dist(message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """Log a message on some ranks.

    Args:
        message: the message.
        ranks: the ranks, -1 for all; None: rank 0.
        level: a level of `logging`.
    """
    rank, selected = int(os.environ.get("RANK", "0")), (0,) if ranks is None else tuple(ranks)
    if rank in selected or -1 in selected:
        logger.log(level, "[Rank %d] %s", rank, message)

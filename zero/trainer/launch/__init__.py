"""Ranks as processes: started, stopped, started again, and their failures reported."""

from zero.trainer.launch.begun import Begun, notes_on_torchrun, own_begun
from zero.trainer.launch.ending import Interrupted, describe
from zero.trainer.launch.process import MALLOC_VARIABLES, THRESHOLDS, Malloc, environment
from zero.trainer.launch.ranks import (
    FINAL,
    GRACE_S,
    count_ranks,
    inside,
    joined,
    launch,
    restart_count,
    tell_torchrun,
    under_torchrun,
)
from zero.trainer.launch.request import preempted

__all__ = [
    "FINAL", "GRACE_S", "MALLOC_VARIABLES", "THRESHOLDS", "Begun", "Interrupted", "Malloc", "count_ranks", "describe",
    "environment", "inside", "joined", "launch", "notes_on_torchrun", "own_begun", "preempted", "restart_count",
    "tell_torchrun", "under_torchrun",
]  # fmt: skip

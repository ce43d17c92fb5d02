"""The processes of ranks: start, stop, restart, and reports of failures."""

from zero.trainer.launch.begun import Begun, notes_on_torchrun, own_begun
from zero.trainer.launch.ending import Interrupted, describe
from zero.trainer.launch.in_process import inside, joined
from zero.trainer.launch.process import MALLOC_VARIABLES, THRESHOLDS, ProcessSettings, cores, environment, set_up
from zero.trainer.launch.ranks import launch
from zero.trainer.launch.request import import_torch, preempted, save_on_sigint, signals_waiting
from zero.trainer.launch.world_size import (
    check_device,
    count_ranks,
    notes_on_start,
    restart_count,
    tell_torchrun,
    under_torchrun,
)

__all__ = [
    "MALLOC_VARIABLES", "THRESHOLDS", "Begun", "Interrupted", "ProcessSettings", "check_device", "cores", "count_ranks",
    "describe", "environment", "import_torch", "inside", "joined", "launch", "notes_on_start", "notes_on_torchrun",
    "own_begun", "preempted", "restart_count", "save_on_sigint", "set_up", "signals_waiting", "tell_torchrun",
    "under_torchrun",
]  # fmt: skip

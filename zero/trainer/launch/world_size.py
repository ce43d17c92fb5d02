"""The number of ranks of a run, and who starts them: this program, or torchrun."""

import json
import os
import time
from pathlib import Path
from typing import Literal

from zero.errors import ConfigError
from zero.trainer.launch.request import signals_waiting

VARIABLES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
"""Environment variables of a rank, which torchrun sets."""


def restart_count() -> int:
    """Return how often the ranks of this run were started again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def count_ranks(ranks: int | Literal["auto"], device: str = "auto") -> int:
    """Return the number of ranks; "auto" means torchrun's number, or one per GPU, or 1 on a CPU.

    Imports torch only on a machine that has a GPU driver.

    Raises:
        ConfigError: torchrun has started another number of ranks; or the environment says that there are other
            processes, but not how to reach them.
    """
    if under_torchrun():
        started = int(os.environ["WORLD_SIZE"])
        if ranks not in ("auto", started):
            raise ConfigError(
                f"launch.ranks={ranks} contradicts torchrun, which has started {started} ranks. Leave it out."
            )
        return started
    _check_alone(ranks)
    if ranks != "auto":
        return ranks
    return 1 if device == "cpu" else max(1, _count_gpus())


def check_device(device: str) -> None:
    """Raise MachineError if a GPU is asked for and torch finds none; imports torch only if one is asked for."""
    if device == "cuda":
        with signals_waiting():
            from zero.platform.cuda import count_gpus
        count_gpus()


def notes_on_start(device: str) -> list[str]:
    """Return warnings about an environment in which a run is another one than was probably meant."""
    notes = []
    if "RANK" in os.environ and "WORLD_SIZE" not in os.environ:
        notes.append(
            f"RANK={os.environ['RANK']} without WORLD_SIZE is ignored: this is a run of its own. torchrun starts ranks."
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = visible in ("", "-1")  # on purpose
    if device == "auto" and _has_driver() and not hidden and not _count_gpus():
        why = "" if visible is None else f" with CUDA_VISIBLE_DEVICES={visible}"
        notes.append(
            f"there is a GPU driver, but torch finds no GPU{why}, so a CPU trains. Set launch.device=cuda or cpu."
        )
    return notes


def _has_driver() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/kfd").exists()


def _count_gpus() -> int:
    """Return the number of GPUs that torch finds; imports torch only where there is a driver."""
    if not _has_driver():
        return 0
    with signals_waiting():
        import torch

    return torch.cuda.device_count()


def under_torchrun() -> bool:
    """Return whether torchrun started this process, or a command that sets its variables for each of several ranks.

    RANK alone does not show this, because some clusters set it to the number of the node.
    """
    if "LOCAL_RANK" not in os.environ:
        return False
    by_another = os.environ.keys() >= VARIABLES and os.environ["WORLD_SIZE"] != "1"
    return "TORCHELASTIC_RUN_ID" in os.environ or by_another


def _check_alone(ranks: int | Literal["auto"]) -> None:
    """Raise ConfigError if this process is one of several that would each make a run, or join one by half."""
    size, tasks = os.environ.get("WORLD_SIZE", "1"), os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if size != "1" and ranks in ("auto", 1):
        missing = ", ".join(sorted(VARIABLES - os.environ.keys()))
        raise ConfigError(f"WORLD_SIZE={size}: set without {missing}. Start the ranks with torchrun, or unset it.")
    if tasks != "1" and ranks == "auto":
        raise ConfigError(
            f"launch.ranks=auto: srun has started {tasks} tasks, and each would be a run of its own. Start torchrun in "
            "one task per node, or type launch.ranks=1."
        )


def tell_torchrun(text: str) -> bool:
    """Write `text` to the error file that torchrun has set for this rank; returns whether it has set one."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        error = {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(path).write_text(json.dumps({"message": error}))
    return bool(path)

"""Readings of the machine that is checked, and the result of a check."""

import importlib.metadata
import shutil
import subprocess
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil

from zero.trainer.launch.process import cores

Verdict = Literal["ok", "warn", "bad"]


class Diagnosis(NamedTuple):
    """The result of one check."""

    name: str
    state: Verdict
    finding: str
    advice: str = ""
    """Empty if the state is "ok"."""


class Host:
    """Readings of the machine that is checked.

    Args:
        root: the folder with /proc, /sys and the mounts; a test passes another one than `/`.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root

    def text(self, path: str) -> str:
        """Return a file's text; "" if it cannot be read."""
        try:
            return (self.root / path.lstrip("/")).read_text(errors="replace")
        except OSError:
            return ""

    def memory(self) -> tuple[int, int]:
        """Return (total, available) bytes of host memory."""
        memory = psutil.virtual_memory()
        return memory.total, memory.available

    def space(self, folder: str) -> tuple[int, int]:
        """Return (total, free) bytes of the file system at `folder`; zeros if there is no such folder."""
        try:
            return shutil.disk_usage(folder)[::2]
        except OSError:
            return 0, 0

    def output(self, *command: str) -> str:
        """Return the output of a command; "" if there is no such command or it fails."""
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            return ""

    def cores(self) -> int:
        return cores()

    def version(self, package: str) -> str:
        """Return the version of an installed package; "" if it is not installed."""
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return ""

    def torch_gpus(self) -> int:
        import torch

        return torch.cuda.device_count() if torch.cuda.is_available() else 0


def judge(name: str, finding: str, *problems: tuple[Any, Verdict, str]) -> Diagnosis:
    """Return the check with the verdict and advice of the first true condition; "ok" if none is true.

    Args:
        problems: (condition, verdict, advice) each; the first with a true condition counts.
    """
    wrong = (Diagnosis(name, state, finding, advice) for exists, state, advice in problems if exists)
    return next(wrong, Diagnosis(name, "ok", finding))

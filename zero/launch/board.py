"""What the parent and its ranks tell each other, as small files: each is written whole or not at all."""

import json
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero.errors import DeadlineError, RankFailedError
from zero.launch.ending import describe


@dataclass(frozen=True)
class Board:
    """The folder through which the parent and its ranks tell each other that they live, and why they died."""

    path: Path

    def ask(self) -> None:
        """Ask every rank to stop, those too that have not started yet."""
        (self.path / "asked").touch()
        self._send(signal.SIGUSR1)  # of which any number is one request

    def is_asked(self) -> bool:
        return (self.path / "asked").exists()

    def announce(self, rank: int) -> None:
        self._write(f"{rank}.pid", str(os.getpid()))

    def withdraw(self, rank: int) -> None:
        (self.path / f"{rank}.pid").unlink()

    def ask_for_stacks(self) -> None:
        """A rank that somebody has stopped is woken: it could neither answer nor end, other than by SIGKILL."""
        self._send(signal.SIGUSR2)
        self._send(signal.SIGCONT)

    def leave_note(self, rank: int, error: BaseException) -> int:
        """Say why this rank ends; returns its exit code."""
        exit_code = getattr(error, "exit_code", 1)
        note = {
            "time_ns": time.monotonic_ns(),
            "rank": rank,
            "cause": describe(error),
            "why": getattr(error, "why", ""),
            "stacks": isinstance(error, DeadlineError),
            "follows": isinstance(error, RankFailedError),
            "exit_code": exit_code,
        }
        self._write(f"{rank}.note", json.dumps(note))
        return int(exit_code)

    def notes(self) -> list[Mapping[str, Any]]:
        """Causes before what followed from them, the earliest first."""
        notes = [json.loads(path.read_text()) for path in self.path.glob("*.note")]
        return sorted(notes, key=lambda note: (note["follows"], note["time_ns"]))

    def has_trouble(self) -> bool:
        """Whether a rank has said that it ends, or is gone without a word."""
        return any(self.path.glob("*.note")) or not self._send(0)

    def clear(self) -> None:
        """For another attempt. A request to stop stays."""
        for name in ("*.note", "*.pid", "*.place"):
            for path in self.path.glob(name):
                path.unlink()

    def _send(self, signum: int) -> bool:
        """To every rank that has announced itself; returns whether all of them live."""
        all_live = True
        for path in self.path.glob("*.pid"):
            with suppress(FileNotFoundError):  # it has just withdrawn
                pid = int(path.read_text())
                try:
                    os.kill(pid, signum)
                except ProcessLookupError:
                    all_live = False
        return all_live

    def _write(self, name: str, text: str) -> None:
        unfinished = self.path / f"{name}.unfinished"
        unfinished.write_text(text)
        unfinished.rename(self.path / name)

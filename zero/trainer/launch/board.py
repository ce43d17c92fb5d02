"""Shared memory of the parent process and its ranks: what each rank is doing, and why it ended.

The memory has no file name, so no cleaner of temporary files can delete it during a long run. The ranks of a world also
write notes into the world's store (`zero/distributed/failure.py`). Those notes reach other machines, but need a world.
The notes in this memory reach the parent also before a world exists and after the store's host has died.
"""

import ctypes
import json
import time
from collections.abc import Mapping
from multiprocessing.sharedctypes import RawArray
from typing import Any

from zero.errors import DeadlineError, RankFailedError
from zero.trainer.launch.ending import describe

_PLACE_BYTES = 64
_CAUSE_CHARACTERS = 5000  # limit, because an error may quote a tensor; the rank's log has all of it
_NOTE_BYTES = 12 * _CAUSE_CHARACTERS + 1024  # JSON escapes a character with at most 12 bytes


class _Slot(ctypes.Structure):
    """The shared state of one rank; all bytes are zero until they are set."""

    place: bytes
    note: bytes
    has_note: bool  # set last, so that no reader sees a part of a note

    _fields_ = (
        ("place", ctypes.c_char * _PLACE_BYTES),
        ("note", ctypes.c_char * _NOTE_BYTES),
        ("has_note", ctypes.c_bool),
    )


class Board:
    """The shared state of a run with `ranks` ranks."""

    def __init__(self, ranks: int) -> None:
        self._slots = RawArray(_Slot, ranks)

    def set_place(self, rank: int, place: str) -> None:
        self._slots[rank].place = place.encode()[:_PLACE_BYTES]

    def place_of(self, rank: int) -> str:
        return self._slots[rank].place.decode(errors="ignore")

    def leave_note(self, rank: int, error: BaseException) -> int:
        """Write a note that says why this rank ends; returns the exit code that the rank ends with."""
        exit_code = getattr(error, "exit_code", 1)
        note = {
            "time_ns": time.monotonic_ns(),
            "rank": rank,
            "cause": describe(error)[:_CAUSE_CHARACTERS],
            "why": getattr(error, "why", ""),
            "stacks": isinstance(error, DeadlineError),
            "follows": isinstance(error, RankFailedError),
            "exit_code": exit_code,
        }
        self._slots[rank].note = json.dumps(note).encode()
        self._slots[rank].has_note = True
        return int(exit_code)

    def notes(self) -> list[Mapping[str, Any]]:
        """Return the notes of all ranks, by time, but notes about the failure of another rank last."""
        notes = [json.loads(slot.note) for slot in self._slots if slot.has_note]
        return sorted(notes, key=lambda note: (note["follows"], note["time_ns"]))

    def clear(self) -> None:
        """Reset all ranks for another attempt."""
        for slot in self._slots:
            ctypes.memset(ctypes.byref(slot), 0, ctypes.sizeof(slot))

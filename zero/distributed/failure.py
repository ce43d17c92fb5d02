"""Search for the rank that failed first, by notes that failing ranks leave for each other, and the error that names it.

A broken connection does not tell its cause. So a rank whose operation fails writes a note to the rendezvous store (why
it stopped, the operations that it started last), waits a moment for the other ranks' notes, and then knows the cause: a
rank raised an error, ranks ran different operations, a rank never arrived, or a rank was killed.

Ranks communicate here only through that store, and only after a failure. One exception: a rank that hangs writes no
note, so each rank always records its current phase ("step 3, backward") in memory that the other ranks can read.
"""

import contextlib
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.util import Finalize
from typing import Any, ClassVar, Literal, Protocol

from zero.errors import DeadlineError, RankFailedError, WorldError

GRACE_S = 1.0
"""Seconds that a failing rank waits for the other ranks' notes."""

NAMING_S = 5 * GRACE_S
"""Seconds until a rank whose operation failed has found the cause.

1 to write a note and 3 to read the others' notes, both limited even if the store cannot be reached, and 1 for a busy
machine.
"""

_PAUSE_S = 0.01
_NETWORK_PREFIX = re.compile(r"^\[[^]]*\] *")


@dataclass(frozen=True)
class Note:
    """The record of a rank about why it stopped.

    Attributes:
        kind: "waited": its wait timed out. "lost": its connection broke. "vain": its wait could never end. "raised":
            its own code raised an error. "left": it closed its world.
        op: the operation that failed; "" if none was running.
        text: the message of the cause; "" if the rank closed its world.
        started: number -> signature of its latest operations, to find the first one that differs between ranks; each
            part of the world has numbers of its own.
        peer: the rank at the other end of a broken connection, if known.
    """

    kind: Literal["waited", "lost", "vain", "raised", "left"]
    op: str
    text: str
    started: Mapping[int, str]
    peer: int | None = None

    @classmethod
    def of_wait(cls, error: BaseException, op: str, started: Mapping[int, str], peer: int | None) -> "Note":
        text = first_line(error)
        return cls("waited" if "timed out" in text.lower() else "lost", op, text, started, peer)

    @classmethod
    def of_raise(cls, error: BaseException) -> "Note":
        return cls("raised", "", f"{type(error).__name__}: {first_line(error)}", {})

    @classmethod
    def of_leaving(cls, why: str = "") -> "Note":
        return cls("left", "", why, {})

    @classmethod
    def of_ending(cls) -> "Note":
        """Make the note of a process that ends, because of an uncaught error or without one."""
        # exc_info has the error in a child process, last_value in a script
        error = sys.exc_info()[1] or getattr(sys, "last_value", None)
        if isinstance(error, SystemExit):
            error = error.__context__ if error.code else None
        return cls.of_leaving("its process ended") if error is None else cls.of_raise(error)


class PlaceBoard(Protocol):
    """Shared memory in which the ranks of a machine record the phase of the program that they are in."""

    def set_place(self, rank: int, place: str, /) -> None: ...
    def place_of(self, rank: int, /) -> str: ...


class Notes:
    """The notes of all ranks, in the rendezvous store.

    The store may be gone, or its host stopped. So each access runs in a thread of its own, which is abandoned when it
    takes too long.

    Args:
        store: the store, of c10d.
        is_there: returns whether the store's host accepts connections. torch logs pages of errors for a write to a host
            that is gone.
    """

    board: ClassVar[PlaceBoard | None] = None
    """The shared memory with the phases of ranks; None unless `launch` started the ranks."""

    def __init__(self, store: Any, rank: int, size: int, is_there: Callable[[], bool] = lambda: True) -> None:
        self.store = store
        self.is_there = is_there
        self.rank = rank
        self._size = size
        self._posted = False

    def post(self, note: Note) -> None:
        """Write this rank's note within `GRACE_S`. Only the first note counts: later failures are its consequences."""
        _within(GRACE_S, lambda: self.write(note))

    def write(self, note: Note) -> None:
        """Write this rank's note without a time limit."""
        if self._posted:
            return
        self._posted = True
        if not self.is_there():
            return
        order = self.store.add("notes", 1)
        self.store.set(f"note/{self.rank}", json.dumps({"order": order, **asdict(note)}))

    def read(self) -> dict[int, Note]:
        """Return the notes so far by rank, oldest first, after waiting up to `GRACE_S` for missing notes."""
        entries: list[tuple[int, int, Note]] = []

        def fetch() -> None:
            self._await([f"note/{r}" for r in range(self._size)])
            for r in range(self._size):
                if self.store.check([f"note/{r}"]):
                    fields = json.loads(self.store.get(f"note/{r}"))
                    started = {int(number): signature for number, signature in fields.pop("started").items()}
                    entries.append((fields.pop("order"), r, Note(**fields, started=started)))
            # Rank 0 may host the store, so it stays until the ranks that wait for notes have read them.
            self.store.set(f"read/{self.rank}", "")
            if self.rank == 0:
                self._await([f"read/{r}" for _, r, note in entries if note.kind in ("waited", "lost", "vain")])

        _within(3 * GRACE_S, fetch)
        return {r: note for _, r, note in sorted(entries, key=lambda entry: entry[0])}

    def _await(self, keys: list[str]) -> None:
        """Wait up to `GRACE_S` for keys. The store's own `wait` would log every timeout from C++."""
        end_s = time.monotonic() + GRACE_S
        pause = threading.Event()
        while not self.store.check(keys) and time.monotonic() < end_s:
            pause.wait(_PAUSE_S)


class LastWord:
    """The note of a rank whose process ends before its world was closed.

    A process that is ending cannot start a thread (Python 3.12), and the store may not respond, so a thread waits from
    the beginning to write the note.
    """

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._note: Note | None = None
        self._due, self._written = threading.Event(), threading.Event()
        self._at_end = Finalize(None, self._speak, exitpriority=0)  # unlike atexit, it is called in a child process too
        threading.Thread(target=self._write, name="last word", daemon=True).start()

    def cancel(self) -> None:
        self._at_end.cancel()
        self._due.set()

    def _speak(self) -> None:
        self._note = Note.of_ending()
        self._due.set()
        self._written.wait(GRACE_S)

    def _write(self) -> None:
        self._due.wait()
        if self._note is not None:
            with contextlib.suppress(RuntimeError):
                self._notes.write(self._note)
        self._written.set()


def explain_failure(
    rank: int,
    size: int,
    mine: Note,
    notes: Mapping[int, Note],
    timeout_s: float,
    board: PlaceBoard | None = None,
    hosts: Sequence[str] = (),
) -> WorldError:
    """Return the error that ended an operation on `rank`, derived from the notes of all ranks.

    Args:
        mine: the note of `rank`.
        notes: the notes by rank, oldest first.
        timeout_s: the seconds in which an operation, and the search for the cause of its failure, must end.
        board: the last recorded phase of each rank.
        hosts: the machine of each rank; the error names machines if there are several.
    """

    several = len(set(hosts)) > 1

    def at_home(ranks: Sequence[int]) -> str:
        return some_ranks(ranks) + (f" on {', '.join(dict.fromkeys(hosts[r] for r in ranks))}" if several else "")

    others = {r: note for r, note in notes.items() if r != rank}
    for r, note in others.items():
        if note.kind == "raised":
            return RankFailedError(f"{at_home([r])} failed first: {note.text} (rank {rank} was in {mine.op})")
    different = first_difference({rank: mine.started} | {r: note.started for r, note in others.items()})
    different = different or next((note.text for note in notes.values() if note.kind == "vain"), "")
    if different:
        return WorldError(f"the ranks run different operations: {different}")
    missed = {note.peer for note in (mine, *others.values()) if note.kind == "lost"}
    left = sorted(r for r, note in others.items() if note.kind == "left" and r in missed)
    if left:
        why = "".join(sorted({f" ({others[r].text})" for r in left if others[r].text}))
        return WorldError(f"{at_home(left)} left the world{why} while rank {rank} was in {mine.op}")
    silent = [r for r in range(size) if r != rank and r not in others]
    if mine.kind == "lost" and silent:
        machine = ", or its machine is gone" if several else ""
        lost = [r for r in silent if r in missed] or silent  # the rest may wait for a rank that is reading notes
        return RankFailedError(
            f"rank {rank} lost {at_home(lost)} in {mine.op} ({mine.text}). A rank that ends without an error was "
            f"usually killed by signal 9, most often for lack of memory{machine}."
        )
    waited = f"waited {timeout_s:g} s in {mine.op}"
    waited = waited if mine.kind == "waited" else f"was in {mine.op} when others had waited {timeout_s:g} s"
    message = " and ".join([f"rank {rank} {waited}", *(f"rank {r} in {note.op}" for r, note in others.items())])
    if silent:
        phases = [f", last phase of rank {r}: {place}" for r in silent if board and (place := board.place_of(r))]
        message += f". No message from {at_home(silent)} (busy, stopped or dead){''.join(phases)}"
    return DeadlineError(message)


def first_difference(started: Mapping[int, Mapping[int, str]]) -> str:
    """Return each rank's signature of the first operation, by number, that differs; "" if none differs.

    Args:
        started: rank -> number -> signature of the operations that the rank started.
    """
    for number in sorted(set().union(*started.values())):
        signatures = {r: ops[number] for r, ops in started.items() if number in ops}
        if len(set(signatures.values())) > 1:
            return by_rank(signatures)
    return ""


def by_rank(values: Mapping[int, str]) -> str:
    """Return each value with the ranks that have it: "3 on rank 0; 4 on ranks 1, 2"."""
    ranks: dict[str, list[int]] = {}
    for rank in sorted(values):
        ranks.setdefault(values[rank], []).append(rank)
    return "; ".join(f"{value} on {some_ranks(where)}" for value, where in ranks.items())


def some_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def field_difference(fields: Sequence[Mapping[str, str]]) -> str:
    """Return the first field that differs between ranks, with values and ranks, on one line; "" if there is none."""
    for name in sorted(set().union(*fields)):
        values = [rank.get(name, "(absent)") for rank in fields]
        if len(set(values)) > 1:
            return f"{name} is {by_rank(dict(enumerate(_clip(values))))}"
    return ""


def first_line(error: BaseException) -> str:
    """Return the first line of an error, without the source position and the advice that network libraries add."""
    line = (str(error).splitlines() or [""])[0]
    return _NETWORK_PREFIX.sub("", line).split(". This is typically")[0]


def _clip(values: Sequence[str]) -> list[str]:
    """Return values cut to 160 characters, from 40 characters before their first difference on."""
    columns = enumerate(zip(*values, strict=False))
    start = max(0, next((i for i, column in columns if len(set(column)) > 1), min(map(len, values))) - 40)
    return [
        ("…" if start else "") + value[start : start + 160] + ("…" if start + 160 < len(value) else "")
        for value in values
    ]


def _within(limit_s: float, visit: Callable[[], None]) -> None:
    def run() -> None:
        with contextlib.suppress(RuntimeError):
            visit()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)

"""Whatever the others left in the store, a rank that fails says one line that names the cause."""

import sys
import threading
import time

import pytest

from zero.distributed import failure
from zero.distributed.failure import Note, Notes, explain_failure, first_line
from zero.errors import DeadlineError, RankFailedError, WorldError

STARTED = {3: "gather of h.0", 4: "gather of h.1"}
WAITED = Note("waited", "gather of h.1", "Timed out waiting 1000ms", STARTED)


def lost(peer: int | None) -> Note:
    return Note("lost", "gather of h.1", "Connection closed by peer", STARTED, peer)


RAISED = Note.of_raise(ValueError("bad batch"))
LEFT = Note.of_leaving()
ENDED = Note.of_leaving("its process ended")
ELSEWHERE = Note("waited", "barrier", "Timed out", {4: "barrier"})

TABLE = {
    "nobody spoke": (WAITED, {}, DeadlineError, "No message from ranks 1, 2 (busy, stopped or dead)"),
    "one waits too": (WAITED, {1: WAITED}, DeadlineError, "and rank 1 in gather of h.1. No message from rank 2"),
    "gone without a word": (lost(2), {}, RankFailedError, "rank 0 lost rank 2 in gather of h.1"),
    "all gone": (lost(None), {}, RankFailedError, "rank 0 lost ranks 1, 2 in gather of h.1"),
    "heard of through another": (lost(1), {1: lost(2)}, RankFailedError, "rank 0 lost rank 2 in gather of h.1"),
    "one raised": (lost(1), {1: lost(2), 2: RAISED}, RankFailedError, "rank 2 failed first: ValueError: bad batch"),
    "one left": (lost(1), {1: LEFT}, WorldError, "rank 1 left the world while rank 0 was in gather of h.1"),
    "one ended": (
        lost(1),
        {1: ENDED},
        WorldError,
        "rank 1 left the world (its process ended) while rank 0 was in",
    ),
    "another had left before": (lost(2), {1: LEFT}, RankFailedError, "rank 0 lost rank 2"),
    "one is elsewhere": (WAITED, {1: ELSEWHERE}, WorldError, "gather of h.1 on rank 0; barrier on rank 1"),
    "cut off by one that waited": (lost(1), {1: WAITED, 2: WAITED}, DeadlineError, "others had waited 1 s"),
}


class Shelf(dict):
    """A c10d store, as far as notes need one."""

    def add(self, key: str, amount: int) -> int:
        self[key] = self.get(key, 0) + amount
        return self[key]

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


@pytest.mark.parametrize("case", TABLE)
def test_the_cause_is_named(case):
    mine, others, kind, words = TABLE[case]
    story = explain_failure(0, 3, mine, {0: mine, **others}, timeout_s=1.0)
    assert type(story) is kind
    assert words in str(story)
    assert "\n" not in str(story)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("nobody spoke", "No message from ranks 1, 2 on a, b (busy"),
        ("gone without a word", "rank 0 lost rank 2 on b in gather of h.1"),
        ("all gone", "rank 0 lost ranks 1, 2 on a, b in gather of h.1"),
        ("heard of through another", "rank 0 lost rank 2 on b in gather of h.1"),
        ("one raised", "rank 2 on b failed first"),
        ("one left", "rank 1 on a left the world"),
    ],
)
def test_of_several_machines_the_one_that_failed_is_named(case, words):
    mine, others, _, _ = TABLE[case]
    assert words in str(explain_failure(0, 3, mine, {0: mine, **others}, timeout_s=1.0, hosts=("a", "a", "b")))


def test_notes_come_back_as_written_oldest_first():
    shelf = Shelf()
    ranks = [Notes(shelf, rank, 3) for rank in range(3)]
    ranks[2].post(lost(1))
    ranks[0].post(RAISED)
    ranks[1].post(WAITED)
    ranks[1].post(RAISED)
    assert list(ranks[1].read().items()) == [(2, lost(1)), (0, RAISED), (1, WAITED)]


class Ruin:
    """A store whose host is gone."""

    def add(self, *_: object) -> int:
        raise RuntimeError("Broken pipe")

    set = get = check = add


def test_a_store_that_is_gone_costs_the_story_not_the_error():
    notes = Notes(Ruin(), 0, 2)
    notes.post(WAITED)
    assert notes.read() == {}


class Beyond:
    """A store behind a wire that was cut: nothing comes back."""

    def __init__(self) -> None:
        self.mended = threading.Event()

    def add(self, *_: object) -> int:
        self.mended.wait()
        raise RuntimeError("Connection reset by peer")

    set = get = check = add


def test_who_is_missing_is_said_before_the_deadline_wherever_the_store_is(monkeypatch: pytest.MonkeyPatch):
    assert failure.NAMING_S == 5 * failure.GRACE_S
    monkeypatch.setattr(failure, "GRACE_S", 0.2)
    store = Beyond()
    notes, began_s = Notes(store, 0, 2), time.monotonic()
    notes.post(WAITED)
    assert notes.read() == {}
    assert time.monotonic() - began_s < 5 * 0.2
    store.mended.set()


def test_the_note_of_a_process_that_ends_has_its_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(sys, "last_value", raising=False)
    assert Note.of_ending() == ENDED
    monkeypatch.setattr(sys, "last_value", ValueError("bad batch"), raising=False)
    assert Note.of_ending() == RAISED
    try:
        try:
            raise ValueError("bad batch")
        except ValueError:
            sys.exit(3)
    except SystemExit:
        assert Note.of_ending() == RAISED
    try:
        sys.exit(0)
    except SystemExit:
        assert Note.of_ending() == ENDED


def test_a_network_librarys_decoration_is_left_out():
    noise = "[/src/pair.cc:553] Connection closed by peer [127.0.0.1]:1. This is typically caused by a crash. GLHF!"
    assert first_line(RuntimeError(noise)) == "Connection closed by peer [127.0.0.1]:1"

"""A wrapper that runs a view (an output of the tracker) in its own thread, so that it cannot stop or delay training."""

from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from zero.platform.threads import BackgroundThread
from zero.tracker.views.view import Row, View

MOST_WAITING = 1000
"""Largest number of calls that may be queued for a view; beyond it the next call raises TimeoutError."""

HURRIED_S = 10.0
"""Seconds that `close` waits for the view after a failed run, because the process may be killed soon. The exit of a
script that never closed the view waits as long, because W&B may not respond then."""


class ThreadedView(View):
    """A view whose calls are queued and run in order by a thread. Methods return at once, except `close`, which waits.

    After a call has failed in the thread, every later method call raises its error.

    Args:
        opened: function that opens the view; it runs in the thread.
        title: the view's name in messages.
        abandon: function that `close` calls when it stops waiting for a call that does not return. Afterwards nothing
            may wait for the view.
        patience_s: seconds that `close` waits for all queued calls.
    """

    def __init__(
        self,
        opened: Callable[[], View],
        abandon: Callable[[], None] = lambda: None,
        *,
        title: str = "W&B",
        patience_s: float = 60.0,
    ) -> None:
        self._opened, self._abandon, self.title, self._patience_s = opened, abandon, title, patience_s
        self._calls: SimpleQueue[Callable[[View], None] | None] = SimpleQueue()
        self._error: Exception | None = None
        self._thread = BackgroundThread(self._work, name="view", stop=lambda: self._calls.put(None), limit_s=HURRIED_S)
        self._thread.start()

    def log(self, row: Row) -> None:
        row = dict(row)
        self._call(lambda view: view.log(row))

    def saved(self, path: Path, step: int) -> None:
        self._call(lambda view: view.saved(path, step))

    def report(self, path: Path) -> None:
        self._call(lambda view: view.report(path))

    def close(self, summary: Mapping[str, Any], exit_code: int) -> None:
        self._calls.put(lambda view: view.close(summary, exit_code))
        self._calls.put(None)
        patience_s = HURRIED_S if exit_code else self._patience_s
        self._thread.join(patience_s)
        if self._thread.is_alive():
            self._thread.limit_s = 0.0
            self._abandon()
            raise TimeoutError(f"its last rows were not written within {patience_s:.0f} s after the run")
        self._raise()

    def _call(self, call: Callable[[View], None]) -> None:
        self._raise()
        if self._calls.qsize() > MOST_WAITING:
            raise TimeoutError(f"more than {MOST_WAITING} of its rows are waiting")
        self._calls.put(call)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        try:
            view = self._opened()
        except BaseException as error:
            self._error = _harmless(error)
            return
        while (call := self._calls.get()) is not None:
            try:
                call(view)
            except BaseException as error:
                self._error = self._error or _harmless(error)


def _harmless(error: BaseException) -> Exception:
    """Return `error`, or a RuntimeError in place of a SystemExit, which would end the training thread silently."""
    return error if isinstance(error, Exception) else RuntimeError(str(error) or type(error).__name__)

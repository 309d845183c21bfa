"""Looking up a daemon's name: the system does it without a time limit, so a thread does.

Whoever needs it waits as long as its own deadline allows. One look-up runs at a time, and
all who come meanwhile wait for that one: a resolver that hangs costs one thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from blobstore.clients import forks


class Lookup:
    """The look-ups of one client."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: Future[Any] | None = None
        forks.watch(self)

    def begin(self, function: Callable[[], Any]) -> Future[Any]:
        """What becomes of `function`, or of the one that runs already. Cannot be cancelled."""
        with self._lock:
            if self._running is None:
                self._running = Future()
                self._running.set_running_or_notify_cancel()
                threading.Thread(
                    target=self._perform, args=(function, self._running), daemon=True
                ).start()
            return self._running

    def leave_parent(self) -> None:
        """In a forked child: the thread is the parent's."""
        self._lock = threading.Lock()
        self._running = None

    def _perform(self, function: Callable[[], Any], future: Future[Any]) -> None:
        try:
            outcome = function()
        except Exception as error:
            self._end()
            future.set_exception(error)
        else:
            self._end()
            future.set_result(outcome)

    def _end(self) -> None:
        with self._lock:
            self._running = None

"""Fitting a model beside the work: on one thread that yields to all others, and seldom.

A fit of s seconds of processor time starts no sooner than 20 s after the one before
began, so that training takes at most 5 % of a core on average.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

SHARE_OF_CORE_MAX = 0.05

_NICE = 5
"""No more: while a thread waits for a core with the interpreter's lock held, all others wait
for the lock, and at 19 that takes tens of milliseconds on a busy machine."""

_RETRY_S = 60.0
"""After a fit that failed."""

R = TypeVar("R")
R2 = TypeVar("R2")

_log = logging.getLogger(__name__)


class Training(Generic[R]):
    """One fit at a time; `inline` runs it where it is started, at any time.

    One thread uses it.
    """

    def __init__(self, *, inline: bool = False) -> None:
        self._inline = inline
        self._pool: ThreadPoolExecutor | None = None
        self._running: Future[_Outcome[R]] | None = None
        self._started_s = 0.0
        self._next_s = float("-inf")
        self.n_fits = 0
        self.n_failed = 0
        self.last_cpu_s = 0.0
        """Processor time of the last fit."""
        self.cpu_s = 0.0
        """Of all fits, those that failed too."""

    def may_start(self, now_s: float) -> bool:
        """Nothing runs, and the last fit's cost has been spread."""
        if now_s < self._started_s:  # the clock jumped back
            self._next_s = min(self._next_s, now_s + self._next_s - self._started_s)
            self._started_s = now_s
        return self._running is None and now_s >= self._next_s

    def start(self, fit: Callable[[], R], now_s: float) -> None:
        """Begin `fit`, which must touch nothing that others change; `collect` gives its result."""
        assert self._running is None
        self._started_s = now_s
        self._running = self.run(lambda: _timed(fit))

    def collect(self) -> R | None:
        """The result of a fit that has ended; None if there is none. A failure is logged."""
        running = self._running
        if running is None or not running.done():
            return None
        self._running = None
        outcome = running.result()
        self.cpu_s += outcome.cpu_s
        pause_s = 0.0 if self._inline else outcome.cpu_s / SHARE_OF_CORE_MAX
        if outcome.error is not None:
            _log.error(
                "a fit of the tiering model failed; the last one stays in force",
                exc_info=outcome.error,
            )
            self.n_failed += 1
            self._next_s = self._started_s + max(pause_s, _RETRY_S)
            return None
        self.n_fits += 1
        self.last_cpu_s = outcome.cpu_s
        self._next_s = self._started_s + pause_s
        return outcome.result

    def run(self, work: Callable[[], R2]) -> Future[R2]:
        """Do something on the same thread, after what runs there."""
        if self._inline:
            return _done(work)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "blobstore-fit", initializer=_yield_to_all)
        return self._pool.submit(work)

    def close(self) -> None:
        """Wait for what runs, and end the thread; again is harmless."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None


@dataclass(frozen=True, slots=True)
class _Outcome(Generic[R]):
    """What came of a fit, and its processor time; `result` is None where there is an `error`."""

    result: R | None
    error: Exception | None
    cpu_s: float


def _timed(fit: Callable[[], R]) -> _Outcome[R]:
    start_s = time.thread_time()
    result, error = None, None
    try:
        result = fit()
    except Exception as fault:
        error = fault
    return _Outcome(result, error, time.thread_time() - start_s)


def _done(work: Callable[[], R2]) -> Future[R2]:
    done: Future[R2] = Future()
    try:
        done.set_result(work())
    except Exception as error:
        done.set_exception(error)
    return done


def _yield_to_all() -> None:
    """Lower the priority of this thread alone, as Linux does with a thread's id."""
    thread = threading.get_native_id()
    with suppress(OSError):
        nice = max(_NICE, os.getpriority(os.PRIO_PROCESS, thread))
        os.setpriority(os.PRIO_PROCESS, thread, nice)

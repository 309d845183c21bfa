"""Leaving a daemon alone that has just failed: for a moment, longer each time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

PAUSE_S = 0.25
"""The first pause: longer than a hiccup of the daemon, and shorter than most prompts compute."""
PAUSE_MAX_S = 4.0
"""The longest one: so late is a daemon found that is back, and so often one that is not asked."""


class Breaker:
    """Whether it makes sense to ask. For all threads; never blocks."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._pause_s = 0.0
        self._until_s = float("-inf")

    @property
    def open(self) -> bool:
        """Do not ask: the pause after the last fault is not over."""
        return self._clock() < self._until_s

    def failed(self) -> None:
        """A call got no answer. Calls that were under way together lengthen the pause once."""
        with self._lock:
            if self.open:
                return
            self._pause_s = min(max(PAUSE_S, 2 * self._pause_s), PAUSE_MAX_S)
            self._until_s = self._clock() + self._pause_s

    def worked(self) -> None:
        """A call was answered."""
        if self._pause_s:
            with self._lock:
                self._pause_s, self._until_s = 0.0, float("-inf")

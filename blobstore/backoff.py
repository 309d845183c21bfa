"""Leaving a full or failing disk alone for a moment, longer each time."""

from __future__ import annotations

from collections.abc import Callable

BACKOFF_S = 0.25
BACKOFF_MAX_S = 4.0


class Backoff:
    """How long since the last fault nothing optional is tried."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until_s = 0.0
        self.pause_s = 0.0
        """Length of the current pause; 0 after a success."""

    @property
    def active(self) -> bool:
        """The pause is not over."""
        return self._clock() < self._until_s

    def fault(self) -> None:
        """It failed: pause, twice as long as last time."""
        self.pause_s = min(max(BACKOFF_S, 2 * self.pause_s), BACKOFF_MAX_S)
        self._until_s = self._clock() + self.pause_s

    def success(self) -> None:
        """It works again."""
        self.pause_s = self._until_s = 0.0

    def ask_again(self) -> None:
        """Somebody waits for it: end the pause."""
        self._until_s = 0.0

"""A bound on the bytes that are held for something."""

from __future__ import annotations

import threading


class Room:
    """Counts bytes that are held, `most` at a time. One thread holds, any gives back."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = 0
        self._lock = threading.RLock()  # a finalizer may give back while its thread holds

    def fits(self, nbytes: int) -> bool:
        """Whether `nbytes` more can be held now."""
        return self.held + nbytes <= self.most

    def hold(self, nbytes: int) -> None:
        """Hold `nbytes`, whether they fit or not."""
        with self._lock:
            self.held += nbytes

    def give_back(self, nbytes: int) -> None:
        """They are held no longer."""
        with self._lock:
            self.held -= nbytes

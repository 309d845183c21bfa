"""One save under way, handed from the thread that reserves its memory to the engine's."""

from __future__ import annotations

import threading
from collections import deque

from blobstore.clients.sync import Writer
from blobstore.clients.vllm.copies import Finish
from blobstore.clients.vllm.metadata import Save


class Saving:
    """A save, its writer once there is one, and what is still to be copied."""

    def __init__(self, save: Save) -> None:
        self.save = save
        self.computed_s = 0.0
        """When its forward had run."""
        self.reason = ""
        self.given_up = False
        """Nobody will take a writer any more."""
        self.writer: Writer | None = None
        self.layers = 0
        """How many leading layers were copied one by one; -1: none is any more."""
        self.finishes: deque[Finish] = deque()
        """What is still to be brought to the arena."""
        self._ready = threading.Event()
        self._lock = threading.Lock()

    def put(self, writer: Writer | None, reason: str) -> None:
        """The reservation has an outcome."""
        with self._lock:
            self.reason = reason
            if not self.given_up:
                self.writer = writer
                writer = None
        self._ready.set()
        if writer is not None:
            writer.abort()

    def wait(self, wait_s: float) -> bool:
        """Whether the reservation has an outcome, within `wait_s`."""
        return self._ready.wait(wait_s)

    def take(self) -> Writer | None:
        """The writer, if there is one; none is taken later."""
        with self._lock:
            self.given_up = True
            writer, self.writer = self.writer, None
        return writer

    def bring(self) -> None:
        """Bring what was gathered to the arena; on a thread."""
        while self.finishes:
            self.finishes.popleft()()

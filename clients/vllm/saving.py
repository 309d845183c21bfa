"""One save under way, handed from the thread that reserves its memory to the engine's."""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

from blobstore.clients.sync import Writer
from blobstore.clients.vllm.copies import Finish
from blobstore.clients.vllm.metadata import Save


class Refusal(NamedTuple):
    """Why `blobs` blobs of a save are not stored; number `first` of it is the first of them."""

    reason: str
    first: int
    blobs: int


class Saving:
    """A save, its writer once there is one, and what is still to be copied."""

    def __init__(self, save: Save) -> None:
        self.save = save
        self.blobs = len(save.keys) // save.key_bytes
        self.computed_s = 0.0
        """When its forward had run."""
        self.refusal: Refusal | None = None
        """Why there is no writer."""
        self.given_up = False
        """Nobody will take a writer any more."""
        self.writer: Writer | None = None
        self.layers = 0
        """How many leading layers were copied one by one; -1: none is any more."""
        self.cut: int | None = None
        """The number of the blob from which on there was no room for copies."""
        self._finishes: deque[Finish] = deque()
        """What is still to be brought to the arena."""
        self._fault = ""
        """Why some of it will never be there."""
        self._ready = threading.Event()
        self._lock = threading.Lock()

    def whole(self, reason: str) -> Refusal:
        """Nothing of it is stored."""
        return Refusal(reason, 0, self.blobs)

    def put(self, writer: Writer | None, refusal: Refusal | None) -> None:
        """The reservation has an outcome."""
        with self._lock:
            self.refusal = refusal
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
        """The writer, if there is one; one that comes later is aborted."""
        with self._lock:
            self.given_up = True
            return self.writer

    def add(self, finish: Finish) -> None:
        """A copy was begun; `bring` ends it."""
        self._finishes.append(finish)

    def bring(self) -> None:
        """Bring what was gathered to the arena; on a thread.

        Raises what a copy raises, and from then on always: some bytes were never written.
        """
        if self._fault:
            raise RuntimeError(self._fault)
        try:
            while self._finishes:
                self._finishes.popleft()()
        except BaseException as error:
            self._fault = f"a copy failed before: {type(error).__name__}: {error}"
            raise

    def give_up(self) -> None:
        """Store nothing of it. What was gathered is let go."""
        self._fault = self._fault or "it was given up"
        writer = self.take()
        if writer is not None:
            writer.abort()  # before the copies go: no thread may seal what it does not find
        self._finishes.clear()

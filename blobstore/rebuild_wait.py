"""Waiting for blobs that are being rebuilt."""

from __future__ import annotations

import asyncio

from blobstore.rebuild_jobs import Waiter
from blobstore.rebuild_queue import RebuildQueue


class Wait:
    """One caller's wait for blobs that are being rebuilt. Leave it, whatever comes."""

    def __init__(self, queue: RebuildQueue) -> None:
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """"" once all that is wanted is made, else why it will not be. Never raises."""
        self._queue = queue
        self._waiter: Waiter | None = None

    def follow(self, waiter: Waiter) -> None:
        """Wait for what `waiter` waits for."""
        self._waiter = waiter
        self.look()

    @property
    def n_sealed(self) -> int:
        """How many of the leading blobs are made."""
        return self._waiter.n_sealed if self._waiter is not None else 0

    def stop_at(self, n: int) -> None:
        """Blobs from number `n` on are not wanted any more."""
        if self._waiter is not None:
            self._queue.stop_at(self._waiter, n)

    def leave(self, cancelled: bool = False) -> None:
        """Wait no longer: `cancelled`, or because time is up. What runs then runs to its end."""
        if self._waiter is not None:
            self._queue.leave(self._waiter, cancelled=cancelled)

    def look(self) -> None:
        """Something has changed."""
        waiter = self._waiter
        if waiter is not None and waiter.reason is not None and not self.ended.done():
            self.ended.set_result(waiter.reason)

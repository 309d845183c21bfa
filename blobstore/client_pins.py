"""Blobs that clients asked to keep for a time, and until when."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from blobstore.index import Record
from blobstore.residency import Residency


class ClientPins:
    """Keeps blobs from eviction until their time is up. Used on the event loop only."""

    def __init__(self, residency: Residency, clock: Callable[[], float]) -> None:
        self._residency = residency
        self._clock = clock
        self._until_s: dict[Record, float] = {}
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._until_s)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._until_s)

    def pin(self, record: Record, ttl_s: float) -> None:
        """Keep `record` for `ttl_s` seconds from now."""
        if record not in self._until_s:
            self._residency.pin(record)
            self.nbytes += record.nbytes
        self._until_s[record] = self._clock() + ttl_s

    def unpin(self, record: Record) -> None:
        """Keep it no longer, if it was kept."""
        if self._until_s.pop(record, None) is not None:
            self.nbytes -= record.nbytes
            self._residency.unpin(record, used=False)

    def left_s(self, record: Record) -> float | None:
        """For how long `record` is kept yet; None if no client asked for that."""
        until_s = self._until_s.get(record)
        return None if until_s is None else max(0.0, until_s - self._clock())

    def expire(self) -> None:
        """Keep no longer those whose time is up."""
        now_s = self._clock()
        for record in [r for r, until_s in self._until_s.items() if until_s <= now_s]:
            self.unpin(record)

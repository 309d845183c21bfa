"""Blobs that one caller wants of a chain, held while the rest of it is brought back.

What is held when it begins, and what becomes readable meanwhile, is pinned: nothing of it
may leave before the caller has its lease. Used on the event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from itertools import takewhile

from blobstore.index import NamespaceState, Record
from blobstore.residency import Residency


class Wanted:
    """Pins on blobs of one namespace, until `release`; none if nobody waits for them yet."""

    def __init__(self, residency: Residency, ns: NamespaceState, *, pins: bool = True) -> None:
        self.ns = ns
        self.rebuilt: set[bytes] = set()
        """Keys of blobs that a runner made meanwhile."""
        self.found_cold: set[bytes] = set()
        """Keys of blobs that were on SSD alone."""
        self._residency = residency
        self._pins = pins
        self._pinned: dict[bytes, Record] = {}
        self._changed = asyncio.Event()

    def hold(self, keys: Sequence[bytes], *, follow: bool) -> int:
        """Pin what is held of a chain; where the end begins that is not in DRAM, nor on its way.

        With `follow` what is being written is on its way.
        """
        end = 0
        for n, key in enumerate(keys, 1):
            record = self.ns.blobs.get(key)
            if record is None or record.hole:
                if not (follow and self.ns.drafts.get(key)):
                    break
                end = n
            else:
                self._pin(record)
                if record.cold:
                    self.found_cold.add(key)
                else:
                    end = n
        return end

    def cold(self, keys: Sequence[bytes]) -> list[Record]:
        """The leading ones of `keys` that are on SSD alone."""
        return list(takewhile(lambda record: record.cold, self._held(keys)))

    def holds(self, key: bytes) -> bool:
        """Its bytes are in some tier."""
        record = self.ns.blobs.get(key)
        return record is not None and record.held

    def leading(self, keys: Sequence[bytes], known: int = 0) -> int:
        """How many leading ones are readable; of the first `known` it was seen before."""
        n, get = known, self.ns.blobs.get
        while n < len(keys) and (record := get(keys[n])) is not None and record.readable:
            n += 1
        return n

    def origin(self, key: bytes) -> str:
        """Where a blob came from meanwhile, if it was not there before."""
        if key in self.rebuilt:
            return "rebuild"
        return "ssd" if key in self.found_cold else ""

    def shown(self, record: Record, *, rebuilt: bool) -> None:
        """One of them has become readable."""
        self._pin(record)
        if rebuilt:
            self.rebuilt.add(record.key)
        self._changed.set()

    def wake(self, reason: object = None) -> None:
        """Something else has happened that those who wait for a change should look at."""
        self._changed.set()

    async def change(self) -> None:
        """Wait for the next change; those before it were seen. Cancelling it is safe."""
        await self._changed.wait()
        self._changed.clear()

    def release(self) -> None:
        """Pin nothing any more; harmless when repeated."""
        pinned, self._pinned = self._pinned, {}
        for record in pinned.values():
            self._residency.unpin(record, used=False)

    def _held(self, keys: Sequence[bytes]) -> Iterator[Record]:
        for key in keys:
            record = self.ns.blobs.get(key)
            if record is None:
                return
            yield record

    def _pin(self, record: Record) -> None:
        before = self._pinned.get(record.key)
        if before is record or not self._pins:
            return
        self._residency.pin(record)
        self._pinned[record.key] = record
        if before is not None:
            self._residency.unpin(before, used=False)

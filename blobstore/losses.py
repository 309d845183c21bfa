"""Copies that are given up: dropped by a client, or put aside since they fail their digest."""

from __future__ import annotations

from blobstore.client_pins import ClientPins
from blobstore.counters import Counters
from blobstore.index import Index, Record
from blobstore.residency import Residency
from blobstore.writeback import Writeback


class Losses:
    """Keeps the index right about what has gone. Used on the event loop only."""

    def __init__(
        self, index: Index, residency: Residency, counters: Counters, pins: ClientPins
    ) -> None:
        self._index = index
        self._residency = residency
        self._counters = counters
        self._pins = pins
        self.writeback: Writeback | None = None
        """Of the SSD tier, if there is one."""

    def drop(self, top: Record) -> int:
        """Free a blob and all that continue it, those under a lease when it ends; how many."""
        subtree = self._index.subtree(top)
        above = None
        for record in reversed(subtree):
            self._pins.unpin(record)
            if self.writeback is not None:
                self.writeback.remove(record)
            if not record.gone:  # a hole left bare goes with its last child
                above = self._index.discard(record)
            self._residency.settle(record)
        if above is not None:
            self._residency.settle(above)
        return len(subtree)

    def quarantine(self, record: Record) -> None:
        """The copy on SSD fails its digest: it is removed, and the blob if it was the last copy."""
        if self.writeback is None or record.gone:
            return
        self._counters.corrupt += 1
        if record.packed or record.has_children:
            self.writeback.hollow(record)
        else:
            self.writeback.remove(record, "corrupt")
        if record.packed:
            self.writeback.save(record)
            self._residency.settle(record)
        else:
            self._lose(record)

    def quarantine_dram(self, record: Record) -> None:
        """The copy in DRAM fails its digest: nobody gets it any more."""
        self._counters.corrupt += 1
        self._residency.hide(record)
        if record.ssd is False and not record.gone:
            self._lose(record)
        else:
            self._residency.settle(record)

    def _lose(self, record: Record) -> None:
        """No copy is left."""
        above = self._index.lose(record)
        self._residency.settle(record)
        if above is not None:
            self._residency.settle(above)

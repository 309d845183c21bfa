"""Which texts stay: rows come and go with their sums, and the oldest leave for new ones.

They go whole, and not before all that continue them: what is left of a chain begins at its
root. Everything here happens inside a transaction of whoever calls.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace

from blobstore.text_rows import ROW_BYTES, Row, parse
from blobstore.text_tables import Reading, Totals, Writing

_MOVES_MAX = 4096
"""Rows that one transaction moves behind what continues them."""
_EXPIRED_MAX = 4096
_FRESH_SHARE = 1 / 8
"""Of the retention: what was noted this lately is not noted again for the time alone."""


@dataclass(frozen=True, slots=True)
class Added:
    """What became of rows that were to be added."""

    evicted: int
    """Others that went for them."""
    no_room: int
    gone: list[int]
    """Slots of keys to be wiped once the transaction is durable."""
    totals: Totals


@dataclass(slots=True)
class TextRoom:
    """Room for texts of `quota_bytes`, each for `retention_s` after it was noted last."""

    quota_bytes: int
    retention_s: float
    wall_clock: Callable[[], float]

    def is_fresh(self, row: Row) -> bool:
        """It was noted so lately that its time need not be noted anew."""
        return self.wall_clock() - row.noted_wall_s < _FRESH_SHARE * self.retention_s

    def is_overdue(self, row: Row) -> bool:
        """It was not noted again for too long."""
        return self.wall_clock() - row.noted_wall_s > self.retention_s

    def is_wanted(self, txn: Reading) -> bool:
        """Whether `expire` would find anything to do: nearly never."""
        oldest = txn.oldest()
        if oldest is None:
            return False
        return txn.totals().nbytes > self.quota_bytes or self.is_overdue(parse(oldest[1]))

    def add(self, txn: Writing, rows: Sequence[Row]) -> Added:
        """Add rows in place of those of the same blobs; what is older leaves for them."""
        totals, gone = txn.totals(), list[int]()
        for row in rows:
            totals, replaced = without(txn, totals, row.name)
            gone += replaced
        wanted_bytes = sum(row.size for row in rows)
        evicted, totals = self._evict(txn, totals, wanted_bytes, {row.parent for row in rows})
        gone += evicted
        no_room = 0
        for row in rows:
            if totals.nbytes + row.size > self.quota_bytes:
                no_room += 1
                gone.append(row.slot)
                continue
            totals = _put(txn, totals, row)
        txn.set_totals(totals)
        return Added(len(evicted), no_room, gone, totals)

    def expire(self, txn: Writing) -> tuple[list[int], Totals]:
        """Remove some of what is older or more than may be kept; slots to wipe."""
        gone, totals = self._evict(txn, txn.totals(), 0)
        txn.set_totals(totals)
        return gone, totals

    def _evict(
        self, txn: Writing, totals: Totals, wanted_bytes: int, parents: Container[bytes] = ()
    ) -> tuple[list[int], Totals]:
        """Make room for more, and remove what is overdue; slots to wipe.

        What is to be added continues `parents`.
        """
        gone: list[int] = []
        moves = 0
        while len(gone) < _EXPIRED_MAX + wanted_bytes // ROW_BYTES:
            oldest = txn.oldest()
            if oldest is None:
                break
            seq, stored = oldest
            row = parse(stored)
            full = totals.nbytes + wanted_bytes > self.quota_bytes
            if not full and (moves == _MOVES_MAX or not self.is_overdue(row)):
                break
            if row.name and moves == _MOVES_MAX:
                cut, totals = self._cut(txn, totals, row.name, wanted_bytes)
                gone += cut
                continue
            txn.remove(seq, row.name, row.parent)
            totals = _less(totals, row)
            above = row.name in parents or next(iter(txn.children(row.name)), None) is not None
            if row.name and above:
                totals = _put(txn, totals, row)  # behind what continues it
                moves += 1
            else:
                gone.append(row.slot)
        return gone, totals

    def _cut(
        self, txn: Writing, totals: Totals, name: bytes, wanted_bytes: int
    ) -> tuple[list[int], Totals]:
        """Make room with a chain that begins at `name`, from its end up; slots to wipe."""
        gone: list[int] = []
        path = {name: None}
        while name:
            name = next((child for child in txn.children(name) if child not in path), b"")
            path |= {name: None} if name else {}
        for name in reversed(path):
            full = totals.nbytes + wanted_bytes > self.quota_bytes
            if gone and (not full or next(iter(txn.children(name)), None) is not None):
                break
            totals, slots = without(txn, totals, name)
            gone += slots
        return gone, totals


def counted(txn: Reading) -> tuple[Totals, list[int]]:
    """Totals over all rows that are there, and the slots of their keys."""
    n = nbytes = kv_nbytes = 0
    slots = []
    for row in map(parse, txn.rows()):
        n, nbytes, kv_nbytes = n + 1, nbytes + row.size, kv_nbytes + row.nbytes
        slots += [row.slot] if row.slot >= 0 else []
    return Totals(txn.totals().next_seq, n, nbytes, kv_nbytes), slots


def without(txn: Writing, totals: Totals, name: bytes) -> tuple[Totals, list[int]]:
    """Remove the row of a blob, if there is one; the totals then, and the slot to wipe."""
    seq = txn.seq_of(name)
    stored = txn.row(seq) if seq is not None else None
    if seq is None or stored is None:
        return totals, []
    row = parse(stored)
    txn.remove(seq, name, row.parent)
    return _less(totals, row), [row.slot]


def _put(txn: Writing, totals: Totals, row: Row) -> Totals:
    txn.put(totals.next_seq, row.name, row.parent, row.stored)
    return Totals(
        totals.next_seq + 1,
        totals.rows + 1,
        totals.nbytes + row.size,
        totals.kv_nbytes + row.nbytes,
    )


def _less(totals: Totals, row: Row) -> Totals:
    return replace(
        totals,
        rows=totals.rows - 1,
        nbytes=totals.nbytes - row.size,
        kv_nbytes=max(0, totals.kv_nbytes - row.nbytes),
    )

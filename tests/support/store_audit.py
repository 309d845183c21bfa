"""Whether a store's books balance: every sum, count and link, told from the records alone.

`audit` may be called between any two steps of the loop. With `quiet` the caller
says that nothing is in flight, and what is only bounded otherwise must be exact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Set
from itertools import pairwise
from typing import Any

from blobstore.holder import Holder
from blobstore.index import Record, Retention
from blobstore.store import Store
from blobstore.tiering.placement import blocks_of
from blobstore.tiering.tier import Extent


def audit(store: Store, *, quiet: bool = False) -> None:
    """AssertionError at the first thing in `store` that does not add up."""
    known = set(_known(store))
    _audit_tree(store)
    _audit_dram(store, known, quiet=quiet)
    _audit_policies(store)
    _audit_pins(store, known, quiet=quiet)
    _audit_drafts(store)
    if store._ssd is not None:
        _audit_ssd(store, quiet=quiet)
        _audit_mover(store, quiet=quiet)
    _audit_counts(store)


def is_idle(store: Store) -> bool:
    """Whether the store itself has nothing in flight; calls of clients are theirs to know."""
    writeback, loader = store._writeback, store._loader
    return not (
        (writeback is not None and writeback._pending())
        or (loader is not None and loader._tasks)
        or store._sealing._tasks
        or store.residency.wiping_bytes
        or store.residency.waiting
    )


def _known(store: Store) -> Iterator[Record]:
    """Every record that anything in the store still refers to."""
    queue = [*store.index.records(), *_of_holders(store._holders.values()), *store.pins]
    for state in store.index.namespaces.values():
        for drafts in state.drafts.values():
            queue.extend(drafts)
    if store._writeback is not None:
        queue.extend(record for record, _ in store._writeback._queue)
        queue.extend(item.record for item in store._writeback._committer._written)
    seen: set[Record] = set()
    while queue:
        record = queue.pop()
        if record not in seen:
            seen.add(record)
            yield record
            if record.parent is not None:
                queue.append(record.parent)


def _of_holders(holders: Iterable[Holder]) -> Iterator[Record]:
    for holder in holders:
        for lease in holder.leases.values():
            yield from (*lease.pins, *lease.items)
        for records in holder.kept.values():
            yield from records
        for reservation in holder.reservations.values():
            yield from reservation.kept
            yield from (slot.draft.record for slot in reservation.slots if slot.draft is not None)


def _audit_tree(store: Store) -> None:
    holes = 0
    assert list(store.index.order.after(b"")) == sorted(store.index.namespaces)
    for state in store.index.namespaces.values():
        blobs = state.blobs.values()
        assert list(state.order.after(b"")) == sorted(state.blobs)
        assert state.dram_bytes == sum(r.nbytes for r in blobs if r.packed)
        assert state.ssd_bytes == sum(r.nbytes for r in blobs if r.ssd is not False)
        for key, record in state.blobs.items():
            assert record.key == key
            assert record.ns is state
            assert not record.gone
            assert record.held != record.hole, f"{_name(record)} is held and a hole, or neither"
            holes += record.hole
            children = list(record.children())
            assert record.has_children == bool(children)
            for child in children:
                assert child.parent is record
                assert state.blobs.get(child.key) is child, f"{_name(child)} is not indexed"
            assert children or not record.hole, f"{_name(record)} is a hole that nothing continues"
            parent = record.parent
            if parent is None:
                assert record.depth == 1
            else:
                assert state.blobs.get(parent.key) is parent, f"{_name(record)} is an orphan"
                assert record in set(parent.children())
                assert record.depth == parent.depth + 1
    assert store.index.n_holes == holes


def _audit_dram(store: Store, known: set[Record], *, quiet: bool) -> None:
    dram = store._dram
    children = Counter(record.parent for record in known if record.counted)
    ends: list[tuple[int, int]] = []
    for record in known:
        # What was dropped while it is written to SSD is known to that lane alone.
        assert record.dram_children >= children[record], f"{_name(record)}: DRAM children"
        assert not quiet or record.dram_children == children[record]
        assert record.counted or not record.packed
        if record.dram is None:
            assert not record.packed
            assert not record.counted
        else:
            ends.append((record.dram.offset, record.dram.offset + dram.padded(record.nbytes)))
            assert record.dram.nbytes == record.nbytes
            if record.packed:
                assert record.packed == record.dram.offset.to_bytes(
                    8, "little"
                ) + record.nbytes.to_bytes(8, "little")
    ends = sorted(end for end in ends if end[0] < end[1])
    for (_, end), (start, _) in pairwise(ends):
        assert end <= start, "two records share bytes in DRAM"
    assert dram.used_bytes + dram.free_bytes == dram.capacity_bytes
    used = sum(end - start for start, end in ends) + store.residency.wiping_bytes
    if quiet:
        assert used == dram.used_bytes, f"records have {used}, the tier says {dram.used_bytes}"
        assert store.residency.wiping_bytes == 0
        assert dram.n_extents == len(ends)
    else:  # copies under way, and rooms taken for waiting reservations, are nowhere listed
        assert used <= dram.used_bytes


def _audit_policies(store: Store) -> None:
    records = list(store.index.records())
    mover = store._writeback.mover if store._writeback is not None else None
    evictable = {
        record
        for record in records
        if record.packed
        and not (record.pins or record.dram_children or record.dirty or record.fill)
        and (
            record.ssd is not False
            or not (record.has_children or record.heirs or record.retention is Retention.DURABLE)
            or (mover is not None and mover.waits(record))
        )
    }
    _same(set(store.residency._policy.victims()), evictable, "DRAM policy")
    assert len(store.residency._policy) == len(evictable)
    if store._writeback is None:
        return
    leaves = {
        record
        for record in records
        if record.ssd is not False
        and not record.has_children
        and record.retention is not Retention.DURABLE
    }
    _same(set(store._writeback._room._policy.victims()), leaves, "SSD policy")
    assert len(store._writeback._room._policy) == len(leaves)


def _audit_pins(store: Store, known: set[Record], *, quiet: bool) -> None:
    pins: Counter[Record] = Counter(list(store.pins))
    heirs: Counter[Record] = Counter()
    for holder in store._holders.values():
        lent = 0
        for lease in holder.leases.values():
            pins.update(lease.pins)
        for records in holder.kept.values():
            pins.update(records)
            lent += sum(record.nbytes for record in records)
        for reservation in holder.reservations.values():
            heirs.update(reservation.kept)
            for slot in reservation.slots:
                if slot.draft is not None:
                    pins[slot.draft.record] += 1
                    lent += slot.draft.record.nbytes
        assert lent <= holder.lent_bytes <= store.settings.lent_quota_bytes
        assert not quiet or lent == holder.lent_bytes
    for record in known:
        assert record.pins >= pins[record], f"{_name(record)}: {record.pins} pins"
        assert record.heirs >= heirs[record]
        if quiet:
            assert record.pins == pins[record], (
                f"{_name(record)}: {record.pins} pins, {pins[record]} holders of one"
            )
            assert record.heirs == heirs[record]
    pinned = sum(record.nbytes for record in known if record.pins)
    assert pinned <= store.residency.pinned_bytes
    assert not quiet or pinned == store.residency.pinned_bytes


def _audit_drafts(store: Store) -> None:
    for state in store.index.namespaces.values():
        for key, drafts in state.drafts.items():
            assert drafts
            for record in drafts:
                assert record.key == key
                assert record.fill is not None
                assert record.dram is not None
                assert not record.gone
                assert not record.fill.ended


def _audit_ssd(store: Store, *, quiet: bool) -> None:
    ssd, writeback = store._ssd, store._writeback
    assert ssd is not None
    assert writeback is not None
    on_ssd = {
        (record.ns.id, record.key): record
        for record in store.index.records()
        if record.ssd is not False
    }
    due = sum(r.nbytes for r in on_ssd.values() if store.superseded.goes_first(r))
    assert store.superseded.ssd_bytes == due, "what is superseded on ssd"
    live = sum(blocks_of(r.ssd.nbytes) for r in on_ssd.values() if isinstance(r.ssd, Extent))
    assert live <= ssd.stats()["live_bytes"]
    assert ssd.used_bytes <= ssd.capacity_bytes
    queued = sum(record.nbytes for record in store.index.records() if record.dirty)
    assert queued <= writeback.dirty_bytes
    if not quiet:
        return
    assert writeback.dirty_bytes == queued == 0
    assert writeback._committer.leaving_bytes == 0
    assert live == ssd.stats()["live_bytes"], "extents that belong to no blob"
    rows = {(row.namespace, row.key): row for row in ssd.rows() if not row.is_hole}
    stubs = {(record.ns.id, record.key) for record in store.index.records() if record.stub}
    holes = {(row.namespace, row.key) for row in ssd.rows() if row.is_hole}
    _same(holes, stubs, "rows without payload")
    _same(set(rows), set(on_ssd), "rows")
    for name, row in rows.items():
        record = on_ssd[name]
        assert row.extent == (record.ssd if isinstance(record.ssd, Extent) else None)
        assert (row.digest, row.pieces, row.nbytes) == (
            record.digest,
            record.pieces,
            record.nbytes,
        )
        assert row.tokens == record.tokens
        assert row.parent == (record.parent.key if record.parent is not None else b"")
        assert row.retention == record.retention.name.lower()


def _audit_mover(store: Store, *, quiet: bool) -> None:
    assert store._writeback is not None
    mover = store._writeback.mover
    for record in (*mover._waiting, *mover._refused):
        assert record.packed, f"{_name(record)} is not in DRAM"
        assert record.ssd is False, f"{_name(record)} is on SSD"
        assert not record.dirty
        assert not record.unsaved
    assert not mover._waiting.keys() & mover._refused.keys()
    assert mover._waiting_bytes == sum(record.nbytes for record in mover._waiting)
    assert mover.coming_bytes == sum(record.nbytes for record in mover._coming)
    assert all(record.dirty for record in mover._coming)
    if quiet:
        assert not mover._coming
    for record in store.index.records():
        alone = record.packed and record.ssd is False and not record.dirty and not record.unsaved
        if alone and record.retention is not Retention.VOLATILE:
            decided = record in mover._refused or record in mover._waiting
            assert decided, f"{_name(record)} was never decided about"


def _audit_counts(store: Store) -> None:
    assert store.readers.count == sum(len(holder.leases) for holder in store._holders.values())
    for name, value in store.counters.as_dict().items():
        for count in _numbers(value):
            assert count >= 0, name


def _numbers(value: Any) -> Iterator[float]:
    """All that a counter counts, split as it may be."""
    if isinstance(value, dict):
        for part in value.values():
            yield from _numbers(part)
    else:
        yield value


def _same(found: Set[object], wanted: Set[object], what: str) -> None:
    more = [_name(item) for item in found - wanted]
    less = [_name(item) for item in wanted - found]
    assert found == wanted, f"{what}: has {more} too many, lacks {less}"


def _name(item: object) -> str:
    return f"{item.key.hex()[:8]}({item.place()})" if isinstance(item, Record) else repr(item)

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from blobstore.counters import Counters
from blobstore.index import Index, NamespaceState, Record, Retention
from blobstore.residency import Residency
from blobstore.stories import Stories
from blobstore.tiering.arena import Arena
from blobstore.tiering.dram import DramTier
from blobstore.tiering.lru import LeafLru
from blobstore.units import KIB, MIB
from tests.support.sim_store import SimStore
from tests.support.simulation import Simulation
from tests.support.store_client import Loan, chain, content, opaque

PAGE = 4096


class Room:
    """Residency over 16 pages, of which two are kept for loads."""

    def __init__(self, pages: int = 16, staging_pages: int = 2) -> None:
        self.sim = Simulation(seed=0)
        self.arena = Arena.create(pages * PAGE)
        self.dram = DramTier(self.arena, staging_bytes=staging_pages * PAGE)
        self.index = Index()
        self.counters = Counters()
        self.policy: LeafLru[Record] = LeafLru()
        self.residency = Residency(
            self.dram,
            self.policy,
            self.index,
            self.counters,
            self.sim.jobs.pool(1, "wipe"),
            self.sim.clock,
            Stories(self.sim.clock),
        )
        self.state: NamespaceState = self.index.declare(opaque(PAGE))
        self.n = 0

    def close(self) -> None:
        self.sim.rest()
        self.sim.close()
        self.arena.close()

    def make(self, pages: int = 1, parent: Record | None = None) -> Record:
        """A record that is in no tier yet."""
        self.n += 1
        return Record(self.state, self.n.to_bytes(8, "big"), parent, pages * PAGE, 16)

    def put(self, pages: int = 1, parent: Record | None = None, *, ssd: bool = False) -> Record:
        """A sealed blob, used now; with `ssd` it is there as well."""
        record = self.make(pages, parent)
        assert self.take(record)
        record.ssd = ssd
        self.residency.show(record)
        self.index.add(record)
        self.sim.clock.advance(1.0)
        record.last_used = self.sim.clock()
        self.residency.settle(record)
        if parent is not None:
            self.residency.settle(parent)
        return record

    def take(self, *records: Record, loading: bool = False) -> bool:
        return self.residency.take(records, loading=loading)

    def drop(self, record: Record) -> None:
        async def drop() -> None:
            self.index.discard(record)
            self.residency.settle(record)

        self.sim.start(drop()).result()

    def in_dram(self, *records: Record) -> list[bool]:
        return [record.dram is not None for record in records]


@pytest.fixture
def room() -> Iterator[Room]:
    made = Room()
    yield made
    made.close()


def test_the_coldest_leaf_leaves_first(room: Room) -> None:
    cold, warm = room.put(7), room.put(7)
    assert room.take(room.make(7))
    assert room.in_dram(cold, warm) == [False, True]
    assert cold.gone
    assert room.counters.dropped == 1


def test_a_use_keeps_a_blob_longer_than_what_came_later(room: Room) -> None:
    first, second = room.put(7), room.put(7)
    room.residency.pin(first)
    room.sim.clock.advance(1.0)
    room.residency.unpin(first)
    assert room.take(room.make(7))
    assert room.in_dram(first, second) == [True, False]


def test_the_stores_own_pins_are_no_use(room: Room) -> None:
    first, second = room.put(7), room.put(7)
    room.residency.pin(first)
    room.sim.clock.advance(1.0)
    room.residency.unpin(first, used=False)
    assert room.take(room.make(7))
    assert room.in_dram(first, second) == [False, True]


def test_leaves_go_before_what_they_continue_however_cold_that_is(room: Room) -> None:
    root = room.put(5)
    middle = room.put(4, root)
    leaf = room.put(4, middle)
    assert room.take(room.make(5))
    assert room.in_dram(root, middle, leaf) == [True, True, False]
    assert not middle.has_children


def test_a_pinned_leaf_keeps_all_its_ancestors(room: Room) -> None:
    root = room.put(5)
    leaf = room.put(5, root)
    room.residency.pin(leaf)
    assert not room.take(room.make(5))
    assert room.in_dram(root, leaf) == [True, True]
    room.residency.unpin(leaf)
    assert room.take(room.make(5))


def test_a_blob_that_is_on_ssd_leaves_dram_and_stays_known(room: Room) -> None:
    root = room.put(7, ssd=True)
    leaf = room.put(7, root, ssd=True)
    assert room.take(room.make(10))
    assert room.in_dram(root, leaf) == [False, False]
    assert not root.gone
    assert (root.place(), leaf.place()) == ("ssd", "ssd")
    assert (room.counters.demoted, room.counters.dropped) == (2, 0)


def test_dirty_blobs_wait_for_their_copy(room: Room) -> None:
    dirty = room.put(7)
    dirty.dirty = True
    room.residency.settle(dirty)
    clean = room.put(7)
    assert not room.take(room.make(10))
    assert room.in_dram(dirty, clean) == [True, True]


def test_what_a_writer_continues_does_not_vanish(room: Room) -> None:
    parent = room.put(7)
    room.residency.keep(parent)
    assert not room.take(room.make(8))
    room.residency.unkeep(parent)
    assert room.take(room.make(8))
    assert parent.gone


def test_too_little_to_evict_evicts_nothing(room: Room) -> None:
    blobs = [room.put(2) for _ in range(7)]
    for blob in blobs[1:]:
        room.residency.pin(blob)
    order = list(room.policy.victims())
    assert not room.take(room.make(3))
    assert not room.take(room.make(1), room.make(2))
    assert all(room.in_dram(*blobs))
    assert list(room.policy.victims()) == order
    assert room.counters.dropped == 0
    assert room.take(room.make(2))


def test_a_failed_eviction_of_a_chain_leaves_the_tree_as_it_was(room: Room) -> None:
    root = room.put(3)
    leaf = room.put(3, root)
    pinned = room.put(8)
    room.residency.pin(pinned)
    assert not room.take(room.make(7))
    assert list(root.children()) == [leaf]
    assert root.dram_children == 1
    assert list(room.policy.victims()) == [leaf]


def test_a_fault_of_the_policy_in_a_search_strands_nobody(room: Room) -> None:
    first, second = room.put(7), room.put(7)
    victims = room.policy.victims

    def once() -> Iterator[Record]:
        room.policy.victims = broken  # type: ignore[method-assign]
        return victims()

    def broken() -> Iterator[Record]:
        raise ValueError("no")

    room.policy.victims = once  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="no"):
        room.take(room.make(14))
    room.policy.victims = victims  # type: ignore[method-assign]
    assert room.in_dram(first, second) == [True, True]
    assert room.take(room.make(14))
    assert first.gone
    assert second.gone


def test_a_search_that_finds_too_little_tells_the_policy_of_no_departure(room: Room) -> None:
    told: list[str] = []
    for name in ("enter", "leave"):
        real = getattr(room.policy, name)

        def note(*args: object, name: str = name, real: Callable[..., None] = real) -> None:
            told.append(name)
            real(*args)

        setattr(room.policy, name, note)
    room.put(7)
    pinned = room.put(7)
    room.residency.pin(pinned)
    told.clear()
    assert not room.take(room.make(14))
    assert told == []
    room.residency.unpin(pinned)


def test_puts_leave_the_reserve_to_loads(room: Room) -> None:
    assert not room.take(room.make(15))
    assert room.take(room.make(14))
    assert not room.take(room.make(1))
    assert room.take(room.make(2), loading=True)


def test_what_loads_took_of_the_reserve_comes_back_before_the_next_put(room: Room) -> None:
    loaded = [room.put(1, ssd=True) for _ in range(14)]
    extra = room.make(2)
    assert room.take(extra, loading=True)
    assert room.take(room.make(1))
    assert sum(room.in_dram(*loaded)) == 11


def test_blobs_of_no_bytes_push_nobody_out(room: Room) -> None:
    blobs = [room.put(2) for _ in range(7)]
    assert room.take(room.make(2), loading=True)
    assert room.take(room.make(0))
    assert all(room.in_dram(*blobs))


def test_free_in_pieces_is_joined_by_evicting_what_lies_between(room: Room) -> None:
    blobs = [room.put(2) for _ in range(7)]
    for blob in blobs[0], blobs[4], blobs[6]:
        room.drop(blob)
    assert room.dram.largest_free_bytes < 6 * PAGE <= room.dram.free_bytes
    for blob in blobs[2], blobs[3]:
        room.residency.pin(blob)
        room.sim.clock.advance(1.0)
        room.residency.unpin(blob)
    # The second is the coldest, and joins too little; the sixth joins enough.
    assert room.take(room.make(6))
    assert room.in_dram(*blobs) == [False, True, True, True, False, False, False]


def test_joining_pieces_drops_nothing_where_no_run_can_result(room: Room) -> None:
    blobs = [room.put(2) for _ in range(7)]
    for blob in blobs[1], blobs[3], blobs[5], blobs[6]:
        room.residency.pin(blob)
    for blob in blobs[0], blobs[2]:
        room.drop(blob)
    assert room.dram.free_bytes == 6 * PAGE
    assert not room.take(room.make(4))
    assert room.in_dram(blobs[4]) == [True]
    assert room.counters.dropped == 0


def test_joining_pieces_takes_what_continues_a_victim_along(room: Room) -> None:
    root = room.put(4)
    gap = room.put(4)
    room.residency.pin(room.put(2))
    leaf = room.put(2, root)
    room.drop(gap)
    assert room.take(room.make(8), loading=True)
    assert room.in_dram(root, leaf) == [False, False]
    assert root.gone
    assert leaf.gone


def test_bytes_put_aside_still_hold_their_ancestors_under_a_lease(room: Room) -> None:
    root = room.put(4)
    middle = room.put(4, root)
    leaf = room.put(4, middle)
    room.residency.pin(leaf)
    room.residency.hide(middle)
    room.index.lose(middle)
    room.residency.settle(middle)
    assert not room.take(room.make(8))
    assert all(room.in_dram(root, middle, leaf))
    room.residency.unpin(leaf)
    assert room.take(room.make(8))


def test_a_hole_gives_up_its_old_bytes_once_no_lease_covers_them(room: Room) -> None:
    hole = room.put(4)
    leaf = room.put(4, hole)
    room.residency.pin(leaf)
    room.residency.hide(hole)
    room.index.lose(hole)
    room.residency.settle(hole)
    assert not room.residency.reclaim(hole)
    room.residency.unpin(leaf)
    assert room.residency.reclaim(hole)
    assert hole.dram is None
    assert leaf.packed


def test_a_dropped_blob_under_a_lease_keeps_the_bytes_of_a_hole_above(room: Room) -> None:
    hole = room.put(4)
    leased = room.put(4, hole)
    room.put(1, hole)
    room.residency.pin(leased)
    room.residency.hide(hole)
    room.index.lose(hole)
    room.drop(leased)
    assert not room.residency.reclaim(hole)
    room.residency.unpin(leased)
    assert room.residency.reclaim(hole)


def test_a_long_dropped_chain_is_freed_when_its_lease_ends() -> None:
    """However long: freeing goes from blob to blob, not from call to call."""
    room = Room(pages=3002)
    blobs = [room.put()]
    for _ in range(2999):
        blobs.append(room.put(1, blobs[-1]))
    room.residency.pin(blobs[-1])
    for blob in reversed(blobs):
        room.drop(blob)
    assert room.dram.n_extents == 3000
    room.residency.unpin(blobs[-1])
    assert room.dram.used_bytes == 0
    room.close()


def test_who_waits_for_room_is_woken_by_a_drop(room: Room) -> None:
    blob = room.put(14)
    room.residency.pin(blob)
    waiting = room.sim.start(room.residency.take_or_wait([room.make(10)], room.sim.clock() + 10.0))
    assert not waiting.done()
    assert room.residency.waiting == 1
    room.index.discard(blob)
    room.residency.unpin(blob)
    room.sim.loop.run_ready()
    assert waiting.result() == ""


def test_what_can_never_fit_does_not_wait(room: Room) -> None:
    asked = room.residency.take_or_wait([room.make(15)], room.sim.clock() + 10.0)
    assert room.sim.start(asked).result() == "too_large"


def test_waiting_ends_with_the_deadline(room: Room) -> None:
    room.residency.pin(room.put(14))
    waiting = room.sim.start(room.residency.take_or_wait([room.make(1)], room.sim.clock() + 2.0))
    room.sim.advance(1.9)
    assert not waiting.done()
    room.sim.advance(0.1)
    assert waiting.result() == "full"
    assert room.residency.waiting == 0


def big_volatile(room: Room) -> Record:
    record = room.put(70)
    record.retention = Retention.VOLATILE
    assert record.dram is not None
    room.arena.view[record.dram.offset : record.dram.offset + record.nbytes] = (
        b"\x77" * record.nbytes
    )
    return record


def test_volatile_bytes_are_zero_before_their_room_is_free() -> None:
    room = Room(pages=100, staging_pages=2)
    secret = big_volatile(room)
    room.drop(secret)
    assert room.residency.wiping_bytes == 70 * PAGE
    assert room.dram.used_bytes == 70 * PAGE
    assert not room.take(room.make(80))
    room.sim.rest()
    assert room.residency.wiping_bytes == room.dram.used_bytes == 0
    assert not any(room.arena.view)
    assert room.take(room.make(80))
    room.close()


def test_a_put_waits_for_wipes_even_without_time_and_evicts_no_more_than_it_needs() -> None:
    room = Room(pages=100, staging_pages=2)
    big_volatile(room)
    other = room.put(20)
    waiting = room.sim.start(room.residency.take_or_wait([room.make(60)], room.sim.clock()))
    assert not waiting.done()
    room.sim.rest()
    assert waiting.result() == ""
    assert room.in_dram(other) == [True]
    room.close()


def test_small_volatile_blobs_are_wiped_on_the_spot(room: Room) -> None:
    secret = room.put(2)
    secret.retention = Retention.VOLATILE
    room.arena.view[:] = b"\x77" * len(room.arena.view)
    extent = secret.dram
    assert extent is not None
    room.drop(secret)
    assert not any(room.arena.view[extent.offset : extent.offset + extent.nbytes])
    assert room.arena.view[extent.offset + extent.nbytes] == 0x77
    assert room.dram.used_bytes == 0


def test_extents_taken_and_not_used_are_not_wiped() -> None:
    """Two pieces that cannot both be had, of volatile blobs: giving back is instant."""
    room = Room(pages=200, staging_pages=2)
    blobs = [room.put(66) for _ in range(3)]
    room.residency.pin(blobs[1])
    fresh = [room.make(66), room.make(67)]
    for record in fresh:
        record.retention = Retention.VOLATILE
    for blob in blobs[0], blobs[2]:
        room.drop(blob)
    assert not room.take(*fresh)
    assert room.residency.wiping_bytes == 0
    assert room.in_dram(*fresh) == [False, False]
    assert room.dram.used_bytes == 66 * PAGE
    room.close()


def test_mixed_sizes_do_not_wedge_a_full_cache(tmp_path: Path) -> None:
    """B31: small blobs between large ones, every second dropped, then larger ones still."""
    with SimStore(tmp_path, dram_bytes=4 * MIB, staging_bytes=64 * KIB, ssd_bytes=0) as world:
        small, large, huge = (world.declare(opaque(kib * KIB, f"{kib}")) for kib in (32, 96, 512))
        client = world.client()
        for number in range(60):
            ns = (small, large)[number % 2]
            payload = content(number, ns.layout.nbytes(16))
            answers = world.run(client.put(ns, chain(1, str(number)), [payload]))
            assert answers == [("stored", "")]
        for number in range(0, 60, 2):
            world.call(client.drop, small, chain(1, str(number)))
        assert 0 < world.store.stats()["tiers"]["dram"]["fragmentation"] < 1
        for number in range(7):
            payload = content(100 + number, 512 * KIB)
            answers = world.run(client.put(huge, chain(1, f"huge {number}"), [payload]))
            assert answers == [("stored", "")]
            world.audit()
        for number in range(7):
            key = chain(1, f"huge {number}")
            assert world.run(client.read(huge, key)) == [content(100 + number, 512 * KIB)]
            world.call(client.drop, huge, key)
        for number in range(60):
            world.call(client.drop, large, chain(1, str(number)))
        gauges = world.store.stats()["tiers"]["dram"]
        assert gauges["free_bytes"] == gauges["largest_free_bytes"] == gauges["capacity_bytes"]


def test_eviction_of_lent_extents_is_impossible(tmp_path: Path) -> None:
    with SimStore(tmp_path, dram_bytes=MIB, ssd_bytes=0, lent_bytes_max=MIB) as world:
        ns = world.declare(opaque(256 * KIB))
        writer, other = world.client("writer"), world.client("other")
        writing = world.run(writer.reserve(ns, chain(3, "lent")))
        assert all(isinstance(loan, Loan) for loan in writing.loans)
        answers = world.run(other.put(ns, chain(1), [content(0, 256 * KIB)]))
        assert answers == [("refused", "full")]
        writing.abort()
        answers = world.run(other.put(ns, chain(1), [content(0, 256 * KIB)]))
        assert answers == [("stored", "")]

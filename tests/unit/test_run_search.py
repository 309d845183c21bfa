"""Free room in pieces, where what lies between them is far down the order."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from blobstore import eviction, run_search
from blobstore.index import Index, Record
from blobstore.run_search import RunSearch
from blobstore.settings import TieringSettings
from blobstore.tiering.tier import Extent
from blobstore.units import KIB
from tests.support.sim_store import SimStore
from tests.support.store_client import chain, content, opaque

NBYTES = 64 * KIB
N_FIT = 32
SMALL, LARGE = opaque(NBYTES, "small"), opaque(4 * NBYTES, "large")
EVENS, ODDS = range(0, N_FIT, 2), range(1, N_FIT, 2)


class Pieces(SimStore):
    """DRAM full of small blobs; every second one in order of place is colder than all others."""

    def __init__(self, directory: Path) -> None:
        super().__init__(
            directory,
            dram_bytes=(N_FIT + 1) * NBYTES,
            staging_bytes=NBYTES,
            ssd_bytes=0,
            lent_bytes_max=64 * NBYTES,
            tiering=TieringSettings("lru"),
        )
        for ns in (SMALL, LARGE):
            self.declare(ns)
        self.c = self.client()
        for at in range(N_FIT):
            self.put(at)
        for at in (*EVENS, *ODDS):
            self.sim.advance(1.0)
            assert self.run(self.c.read(SMALL, [key(at)])) == [payload(at)]

    def __enter__(self) -> Pieces:
        return self

    def put(self, at: int) -> None:
        self.sim.advance(1.0)
        assert self.run(self.c.put(SMALL, [key(at)], [payload(at)])) == [("stored", "")]

    def put_large(self, timeout_s: float) -> tuple[str, str]:
        ((result, reason),) = self.run(
            self.c.put(LARGE, chain(1), [content(1, 4 * NBYTES)], timeout_s=timeout_s)
        )
        return result, reason

    def left(self) -> list[int]:
        """Those that are held."""
        return [at for at in range(N_FIT) if self.c.exists(SMALL, [key(at)])[0]]


def key(at: int) -> bytes:
    return chain(1, str(at))[0]


def payload(at: int) -> bytes:
    return content(at, NBYTES)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pieces]:
    monkeypatch.setattr(eviction, "JOINED_MAX", 8)
    monkeypatch.setattr(run_search, "SLICE", 2)
    with Pieces(tmp_path) as made:
        yield made
        made.audit(quiet=True)


def test_a_run_that_is_far_down_the_order_is_found_by_who_waits(world: Pieces) -> None:
    assert world.put_large(timeout_s=5.0) == ("stored", "")
    # Four went for the room in sum, all of them even; what made the run was next to them.
    assert len(world.left()) >= N_FIT - 8
    assert world.run(world.c.read(LARGE, chain(1))) == [content(1, 4 * NBYTES)]


def test_who_does_not_wait_holds_nobody_up(world: Pieces) -> None:
    assert world.put_large(timeout_s=0.0) == ("refused", "full")
    assert len(world.left()) >= N_FIT - 8
    assert not world.store.residency._search.active
    assert world.put_large(timeout_s=0.0) == ("stored", "")  # it was found meanwhile


def test_where_there_is_none_it_is_not_looked_for_all_the_time(
    world: Pieces, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches = []
    search = run_search.RunSearch._search

    async def counted(self: run_search.RunSearch, nbytes: int) -> object:
        searches.append(nbytes)
        return await search(self, nbytes)

    monkeypatch.setattr(run_search.RunSearch, "_search", counted)
    leases = [world.run(world.c.get(SMALL, [key(at)])) for at in ODDS[::2]]
    started_s = world.sim.clock()
    assert world.put_large(timeout_s=3.0) == ("refused", "full")
    assert world.sim.clock() - started_s == pytest.approx(3.0, abs=0.5)
    assert 1 <= len(searches) <= 3.0 / run_search.PAUSE_S + 1
    assert set(ODDS) <= set(world.left())
    for lease in leases:
        world.call(lease.release)
    assert world.put_large(timeout_s=3.0) == ("stored", "")


def test_what_somebody_wants_by_then_stays(world: Pieces, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last that a search looks at is leased while it looks."""
    residency = world.store.residency
    expel = residency._search._expel
    kept: list[Record] = []

    def expel_but_one(records: Sequence[Record]) -> bool:
        if not kept:
            kept.append(records[-1])
            residency.pin(records[-1])
        return expel(records)

    monkeypatch.setattr(residency._search, "_expel", expel_but_one)
    started_s = world.sim.clock()
    assert world.put_large(timeout_s=5.0) == ("stored", "")
    assert world.sim.clock() - started_s < run_search.PAUSE_S
    (record,) = kept
    assert record.packed
    world.call(residency.unpin, record)


def test_what_has_to_be_decided_about_keeps_what_it_continues() -> None:
    state = Index().declare(SMALL)
    records: list[Record] = []
    for at, parent in ((0, None), (3, 0), (5, None)):
        record = Record(state, key(at), records[parent] if parent is not None else None, NBYTES, 16)
        record.show_in_dram(Extent(0, at * NBYTES, NBYTES))
        records.append(record)
    root, leaf, other = records
    expelled: list[Record] = []

    def expel(needed: Sequence[Record]) -> bool:
        expelled.extend(needed)
        return True

    def search(waits: Record | None) -> list[Record]:
        expelled.clear()
        ended: list[bool] = []
        free = [Extent(0, at * NBYTES, NBYTES) for at in (1, 6)]
        made = RunSearch(
            lambda: free, lambda: iter([leaf, root, other]),
            lambda record: record is waits, lambda nbytes: nbytes, expel,
            lambda: ended.append(True), lambda: 0.0,
        )  # fmt: skip

        async def run() -> None:
            made.begin(2 * NBYTES)
            while not ended:
                await asyncio.sleep(0)

        asyncio.run(run())
        return list(expelled)

    assert search(None) == [leaf, root]
    assert search(leaf) == [other]  # beside what is free already


def test_a_store_that_closes_looks_no_further(world: Pieces) -> None:
    residency = world.store.residency

    async def begin() -> None:
        residency._search.begin(4 * NBYTES)
        assert residency._search.active
        assert residency.expects_room
        await residency.close()
        assert not residency._search.active

    world.run(begin())
    assert world.left() == list(range(N_FIT))

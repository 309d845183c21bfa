"""One blob filled by several ranks: it shows when the last has sealed, and never a mixture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blobstore.errors import InvalidRequest, SizeMismatch
from blobstore.layout import KVLayout, LayerGroup
from blobstore.namespace import Namespace
from blobstore.units import KIB, MIB
from tests.support.sim_store import SimStore
from tests.support.store_client import (
    StoreClient,
    Writing,
    chain,
    content,
    opaque,
)

NBYTES = 100 * KIB
SMALL = 20_000
"""Digested on the spot: a seal needs no thread."""

GRID = KVLayout((LayerGroup.attention(layers=2, heads=2, head_size=64),), head_groups=2)
RANKS = ((0, 2), (1, 3))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[SimStore]:
    with SimStore(tmp_path, ssd_bytes=0, lent_bytes_max=MIB) as made:
        yield made
        made.finish_all()
        made.audit(quiet=True)


@pytest.fixture
def ns(world: SimStore) -> Namespace:
    return world.declare(opaque(NBYTES))


@pytest.fixture
def client(world: SimStore) -> StoreClient:
    return world.client()


def used(world: SimStore) -> int:
    found: int = world.store.stats()["tiers"]["dram"]["used_bytes"]
    return found


class TestGroups:
    """B12: parts of one engine and epoch make a blob, and nothing else does."""

    @pytest.fixture
    def grid(self, world: SimStore) -> Namespace:
        return world.declare(Namespace("grid", GRID, tokens_per_blob=64))

    def reserve(
        self,
        world: SimStore,
        grid: Namespace,
        client: StoreClient,
        rank: int,
        epoch: int = 0,
        keys: list[bytes] | None = None,
        **terms: Any,
    ) -> Writing:
        return world.run(
            client.reserve(
                grid, keys or chain(1), group=("engine", epoch), parts=RANKS[rank], **terms
            )
        )

    def write(self, writing: Writing, rank: int, payload: bytes, index: int = 0) -> None:
        for part in GRID.parts(64):
            if part.index in RANKS[rank]:
                chunk = payload[part.offset : part.offset + part.nbytes]
                writing.write(index, chunk, part.offset)

    def test_a_blob_is_visible_when_its_last_part_is_sealed(
        self, world: SimStore, grid: Namespace
    ) -> None:
        payload = content(1, GRID.nbytes(64))
        ranks = [world.client("rank 0"), world.client("rank 1")]
        writings = [self.reserve(world, grid, client, n) for n, client in enumerate(ranks)]
        assert writings[0].loans == writings[1].loans
        self.write(writings[1], 1, payload)
        assert world.run(writings[1].seal()) == [("partial", "parts of other ranks are missing")]
        assert ranks[0].exists(grid, chain(1)) == [False]
        self.write(writings[0], 0, payload)
        assert world.run(writings[0].seal()) == [("stored", "")]
        assert world.run(ranks[1].read(grid, chain(1))) == [payload]

    def test_two_ranks_in_one_process_have_loans_of_their_own(
        self, world: SimStore, grid: Namespace, client: StoreClient
    ) -> None:
        first, second = (self.reserve(world, grid, client, rank) for rank in (0, 1))
        size = GRID.nbytes(64)
        assert client.holder.lent_bytes == 2 * size
        self.write(first, 0, content(1, size))
        world.run(first.seal())
        assert client.holder.lent_bytes == size
        world.sim.advance(61.0)
        assert used(world) == size, "the second rank may still write there"
        assert world.run(second.seal()) == [("refused", "expired")]
        assert used(world) == client.holder.lent_bytes == 0

    def test_views_of_two_ranks_in_one_process_are_handed_back_one_by_one(
        self, world: SimStore, grid: Namespace, client: StoreClient
    ) -> None:
        first, second = (self.reserve(world, grid, client, rank) for rank in (0, 1))
        world.run(first.seal(alive=[0]))
        world.run(second.seal(alive=[0]))
        loan = first.loans[0]
        assert loan is not None
        for left in (GRID.nbytes(64), 0):
            assert world.call(client.acknowledge, [loan]) == 1
            assert client.holder.lent_bytes == left
        assert used(world) == GRID.nbytes(64)

    def test_parts_of_different_epochs_never_mix(self, world: SimStore, grid: Namespace) -> None:
        client = world.client()
        size = GRID.nbytes(64)
        old = self.reserve(world, grid, client, 0, epoch=1)
        self.write(old, 0, content(1, size))
        assert world.run(old.seal())[0][0] == "partial"
        new = self.reserve(world, grid, client, 1, epoch=2)
        self.write(new, 1, content(2, size))
        assert world.run(new.seal())[0][0] == "partial"
        assert client.exists(grid, chain(1)) == [False]
        rest = self.reserve(world, grid, client, 0, epoch=2)
        self.write(rest, 0, content(2, size))
        assert world.run(rest.seal()) == [("stored", "")]
        assert world.run(client.read(grid, chain(1))) == [content(2, size)]

    def test_an_assembly_that_no_rank_comes_back_to_expires_as_a_whole(
        self, world: SimStore, grid: Namespace, client: StoreClient
    ) -> None:
        first = self.reserve(world, grid, client, 0)
        assert world.run(first.seal())[0][0] == "partial"
        assert client.holder.lent_bytes == 0
        world.sim.advance(59.0)
        assert used(world) == GRID.nbytes(64)
        world.sim.advance(2.0)
        assert used(world) == 0
        late = self.reserve(world, grid, client, 1)
        assert world.run(late.seal())[0][0] == "partial"
        world.sim.advance(61.0)

    def test_each_rank_that_is_heard_of_gives_the_others_more_time(
        self, world: SimStore, grid: Namespace, client: StoreClient
    ) -> None:
        first = self.reserve(world, grid, client, 0)
        world.run(first.seal())
        world.sim.advance(50.0)
        second = self.reserve(world, grid, client, 1)
        world.sim.advance(50.0)
        assert world.run(second.seal()) == [("stored", "")]

    def test_one_rank_that_aborts_ends_it_for_all(
        self, world: SimStore, grid: Namespace, client: StoreClient
    ) -> None:
        first, second = (self.reserve(world, grid, client, rank) for rank in (0, 1))
        world.run(first.seal())
        world.call(second.abort)
        assert used(world) == 0
        assert client.exists(grid, chain(1)) == [False]

    def test_a_rank_that_seals_after_the_blob_was_published_is_told_so(
        self, world: SimStore, grid: Namespace, client: StoreClient
    ) -> None:
        first, second = (self.reserve(world, grid, client, rank) for rank in (0, 1))
        second.seal_parts(0, RANKS[1])
        assert world.run(first.seal()) == [("stored", "")]
        assert world.run(second.seal()) == [("exists", "")]
        assert world.store.stats()["counters"]["put_blobs"] == {"stored": 1, "exists": 1}

    def test_what_another_rank_may_still_write_to_is_published_from_a_copy(
        self, world: SimStore, grid: Namespace, client: StoreClient
    ) -> None:
        payload = content(1, GRID.nbytes(64))
        first, second = (self.reserve(world, grid, client, rank) for rank in (0, 1))
        self.write(first, 0, payload)
        self.write(second, 1, payload)
        second.seal_parts(0, RANKS[1])
        assert world.run(first.seal()) == [("stored", "")]
        self.write(second, 1, b"\xff" * len(payload))
        assert world.run(client.read(grid, chain(1))) == [payload]
        world.run(second.seal())

    def test_a_complete_blob_is_published_even_if_a_rank_leaves_meanwhile(
        self, world: SimStore, grid: Namespace
    ) -> None:
        staying, leaving = world.client("staying"), world.client("leaving")
        first = self.reserve(world, grid, staying, 0)
        second = self.reserve(world, grid, leaving, 1)
        second.seal_parts(0, RANKS[1])
        sealing = world.sim.start(first.seal())
        assert not sealing.done()
        world.call(leaving.exit)
        assert world.sim.finish(sealing) == [("stored", "")]

    def test_parts_of_another_rank_cannot_be_sealed(
        self, world: SimStore, grid: Namespace, client: StoreClient
    ) -> None:
        first = self.reserve(world, grid, client, 0)
        with pytest.raises(InvalidRequest, match="not this writer's"):
            first.seal_parts(0, [1])
        with pytest.raises(InvalidRequest, match="blob 1 of a reservation of 1"):
            first.seal_parts(1, [0])
        world.call(first.abort)

    def test_ranks_must_agree_on_the_size_of_a_blob(
        self, world: SimStore, grid: Namespace, client: StoreClient
    ) -> None:
        first = self.reserve(world, grid, client, 0, tail_tokens=5)
        with pytest.raises(SizeMismatch, match="5 tokens for other ranks of the group, 64"):
            self.reserve(world, grid, client, 1)
        world.call(first.abort)

    def test_a_rank_that_waited_for_room_is_not_lent_what_ended_meanwhile(
        self, world: SimStore, grid: Namespace, ns: Namespace
    ) -> None:
        """The shared blob was given up, or published, while it waited for a second one."""
        client, other, filler = (world.client(name) for name in ("a", "b", "filler"))
        keys = chain(2)
        shared = self.reserve(world, grid, client, 0, keys=keys[:1])
        held = world.run(filler.reserve(ns, chain(7, "filler")))
        waiting = world.sim.start(
            other.reserve(grid, keys, group=("engine", 0), parts=RANKS[1], timeout_s=10.0)
        )
        assert not waiting.done()
        world.call(shared.abort)
        world.call(held.abort)
        writing = world.sim.finish(waiting)
        assert writing.reasons == ["expired", ""]
        assert writing.loans[0] is None
        world.call(writing.abort)
        assert used(world) == other.holder.lent_bytes == 0

    def test_of_two_ranks_that_wait_for_the_same_blob_one_opens_it(
        self, world: SimStore, grid: Namespace, ns: Namespace
    ) -> None:
        filler = world.client("filler")
        held = world.run(filler.reserve(ns, chain(7, "filler")))
        ranks = [world.client(f"rank {rank}") for rank in (0, 1)]
        waiting = [
            world.sim.start(
                client.reserve(
                    grid, chain(2), group=("engine", 0), parts=RANKS[rank], timeout_s=10.0
                )
            )
            for rank, client in enumerate(ranks)
        ]
        world.call(held.abort)
        first, second = (world.sim.finish(task) for task in waiting)
        assert first.loans == second.loans
        assert used(world) == 2 * GRID.nbytes(64)
        payload = content(3, GRID.nbytes(64))
        for index in range(2):
            self.write(first, 0, payload, index)
            self.write(second, 1, payload, index)
        assert world.run(first.seal())[0][0] == "partial"
        assert world.run(second.seal()) == [("stored", "")] * 2

    def test_the_highest_retention_that_a_rank_asks_for_counts(
        self, world: SimStore, grid: Namespace, client: StoreClient
    ) -> None:
        first = self.reserve(world, grid, client, 0, retention="volatile")
        second = self.reserve(world, grid, client, 1)
        world.run(first.seal())
        world.run(second.seal())
        assert client.stat(grid, chain(1))[0]["retention"] == "standard"

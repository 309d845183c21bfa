from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blobstore.errors import InvalidRequest
from blobstore.layout import KVLayout, LayerGroup
from blobstore.namespace import Namespace
from blobstore.units import KIB, MIB
from tests.support.sim_store import SimStore
from tests.support.store_client import (
    Loan,
    StoreClient,
    chain,
    content,
    digest_of,
    opaque,
)

NBYTES = 100 * KIB
SMALL = 20_000
"""Digested on the spot: a seal needs no thread."""


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


class TestSeal:
    def test_nothing_is_visible_before_the_seal(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        keys = chain(2)
        writing = world.run(client.reserve(ns, keys))
        assert client.exists(ns, keys) == [False, False]
        assert world.run(client.read(ns, keys)) == []
        for index in range(2):
            writing.write(index, content(index, NBYTES))
        assert client.exists(ns, keys) == [False, False]
        assert world.run(writing.seal()) == [("stored", ""), ("stored", "")]
        assert world.run(client.read(ns, keys)) == [content(0, NBYTES), content(1, NBYTES)]

    def test_many_writers_of_one_key_all_succeed_and_one_copy_stays(
        self, world: SimStore, ns: Namespace
    ) -> None:
        """B03"""
        clients = [world.client(f"client {n}") for n in range(7)]
        writings = [world.run(client.reserve(ns, chain(1))) for client in clients]
        for writing in writings:
            writing.write(0, content(7, NBYTES))
        seals = [world.sim.start(writing.seal()) for writing in writings]
        results = sorted(world.sim.finish(seal)[0][0] for seal in seals)
        assert results == ["exists"] * 6 + ["stored"]
        assert world.run(clients[0].read(ns, chain(1))) == [content(7, NBYTES)]
        assert used(world) == NBYTES
        assert world.store.stats()["reservations"] == 0

    def test_other_bytes_under_a_sealed_key_are_told_and_refused(
        self, world: SimStore, ns: Namespace
    ) -> None:
        first, second = world.client("first"), world.client("second")
        late = world.run(second.reserve(ns, chain(1)))
        assert world.run(first.put(ns, chain(1), [content(1, NBYTES)])) == [("stored", "")]
        late.write(0, content(2, NBYTES))
        assert world.run(late.seal())[0][0] == "divergent"
        assert world.run(second.put(ns, chain(1), [content(3, NBYTES)]))[0][0] == "divergent"
        assert world.run(second.read(ns, chain(1))) == [content(1, NBYTES)]
        assert world.store.stats()["counters"]["put_blobs"]["divergent"] == 2

    def test_a_seal_runs_to_its_end_without_who_asked_for_it(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        big = world.declare(opaque(512 * KIB, "big"))
        writing = world.run(client.reserve(big, chain(1)))
        writing.write(0, content(1, 512 * KIB))
        seal = world.sim.start(writing.seal())
        assert not seal.done()
        seal.cancel()
        world.rest()
        assert seal.cancelled()
        assert world.run(client.read(big, chain(1))) == [content(1, 512 * KIB)]

    def test_blobs_of_no_bytes_are_blobs(self, world: SimStore, client: StoreClient) -> None:
        """B08"""
        empty = world.declare(opaque(0, "empty"))
        keys = chain(3)
        assert world.run(client.put(empty, keys, [b"", b"", b""])) == [("stored", "")] * 3
        assert client.exists(empty, [*keys, *chain(1, "unknown")]) == [True] * 3 + [False]
        assert world.run(client.read(empty, keys)) == [b"", b"", b""]
        missed = world.run(client.get(empty, chain(1, "unknown")))
        assert (len(missed), missed.reason, missed.lease_id) == (0, "absent", 0)
        assert world.run(client.put(empty, keys, [b"", b"", b""])) == [("exists", "")] * 3
        assert used(world) == 0

    def test_a_blob_dropped_while_it_was_compared_is_not_said_to_exist(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        payload = content(1, NBYTES)
        world.run(client.put(ns, chain(1), [payload]))
        writing = world.run(client.reserve(ns, chain(1)))
        assert writing.reasons == ["exists"]
        world.call(client.drop, ns, chain(1))
        assert world.run(writing.seal([digest_of(payload)])) == [("refused", "gone")]
        assert client.exists(ns, chain(1)) == [False]

    def test_sealing_twice_is_an_error(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        writing = world.run(client.reserve(ns, chain(1)))
        world.run(writing.seal())
        with pytest.raises(InvalidRequest, match="unknown, or was ended"):
            world.run(writing.seal())
        with pytest.raises(InvalidRequest, match="unknown, or was ended"):
            writing.abort()


class TestRequests:
    @pytest.mark.parametrize(
        "terms",
        [
            {"tail_tokens": 16},
            {"tail_tokens": -1},
            {"parts": (1,)},
            {"parts": (-1,)},
            {"parent_key": chain(2)[1]},
        ],
    )
    def test_contradictions_are_refused_and_leave_nothing(
        self, world: SimStore, ns: Namespace, client: StoreClient, terms: dict[str, Any]
    ) -> None:
        with pytest.raises(InvalidRequest):
            world.run(client.reserve(ns, chain(2), **terms))
        assert client.holder.reservations == {}
        assert used(world) == 0

    @pytest.mark.parametrize("sealed", [True, False])
    def test_nothing_continues_a_partial_blob(
        self, world: SimStore, ns: Namespace, client: StoreClient, sealed: bool
    ) -> None:
        """Positions below it would be wrong, and so what a runner makes there."""
        keys = chain(3)
        writing = world.run(client.reserve(ns, keys[:2], tail_tokens=5))
        if sealed:
            world.run(writing.seal())
        with pytest.raises(InvalidRequest, match=r"partial, 5 tokens of 16: nothing continues"):
            world.run(client.reserve(ns, keys[2:], parent_key=keys[1]))
        assert len(client.holder.reservations) == (0 if sealed else 1)
        assert world.run(client.reserve(ns, keys[2:], parent_key=keys[0])).reasons == [""]

    def test_the_keys_of_a_chain_have_one_length(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        """They travel packed: with other lengths a reader would cut them wrongly."""
        root, rest = chain(1), [b"12345678", b"23456789"]
        world.run(client.put(ns, root, [content(0, NBYTES)]))
        with pytest.raises(InvalidRequest, match=r"one length: 32 bytes .* 8 that"):
            world.run(client.reserve(ns, rest, parent_key=root[0]))
        assert world.run(client.reserve(ns, rest)).reasons == ["", ""]

    def test_a_key_named_twice_is_refused(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        with pytest.raises(InvalidRequest, match="named twice"):
            world.run(client.reserve(ns, chain(1) * 2))

    def test_an_unknown_parent_makes_orphans(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        answers = world.run(client.put(ns, chain(2), [b"", b""], parent_key=chain(1, "unknown")[0]))
        assert answers == [("refused", "orphan")] * 2
        assert client.exists(ns, chain(2)) == [False, False]

    def test_a_parent_that_is_dropped_meanwhile_makes_orphans(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        root, *rest = chain(3)
        world.run(client.put(ns, [root], [content(0, NBYTES)]))
        writing = world.run(client.reserve(ns, rest, parent_key=root))
        world.call(client.drop, ns, [root])
        assert world.run(writing.seal()) == [("refused", "orphan")] * 2

    def test_what_can_never_fit_is_told_apart_from_what_must_wait(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        writing = world.run(client.reserve(ns, chain(12), timeout_s=5.0))
        assert writing.reasons == ["too_large"] * 12
        assert world.sim.clock() == 1000.0
        other = world.client("other")
        world.run(client.reserve(ns, chain(7, "held")))
        writing = world.run(other.reserve(ns, chain(1)))
        assert writing.reasons == ["full"]

    def test_a_partial_last_blob_has_the_size_of_its_tokens(
        self, world: SimStore, client: StoreClient
    ) -> None:
        layout = KVLayout((LayerGroup.attention(layers=2, heads=1, head_size=64),))
        grid = world.declare(Namespace("grid", layout, tokens_per_blob=16))
        full, part = layout.nbytes(16), layout.nbytes(5)
        payloads = [content(1, full), content(2, part)]
        assert world.run(client.put(grid, chain(2), payloads, tail_tokens=5)) == [
            ("stored", ""),
            ("stored", ""),
        ]
        assert world.run(client.read(grid, chain(2))) == payloads
        hits = world.store.stats()["counters"]
        assert hits["hit_tokens"] == {"dram": 21}
        assert hits["hit_bytes"] == {"dram": full + part}

    def test_a_cancelled_wait_for_room_leaves_nothing(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        holding = world.run(client.reserve(ns, chain(7, "held")))
        other = world.client("other")
        waiting = world.sim.start(other.reserve(ns, chain(2), timeout_s=10.0))
        assert other.holder.lent_bytes == 2 * NBYTES
        waiting.cancel()
        world.rest()
        assert other.holder.lent_bytes == 0
        assert world.store.residency.waiting == 0
        world.call(holding.abort)


class TestLentBytes:
    def test_the_cap_of_a_client_is_waited_for(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        first = world.run(client.reserve(ns, chain(6, "first")))
        waiting = world.sim.start(client.reserve(ns, chain(5, "second"), timeout_s=5.0))
        assert not waiting.done()
        world.call(first.abort)
        assert waiting.result().reasons == [""] * 5
        world.call(waiting.result().abort)

    def test_the_cap_is_told_when_time_is_up(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        world.run(client.reserve(ns, chain(6, "first")))
        writing = world.run(client.reserve(ns, chain(5, "second"), timeout_s=1.0))
        assert writing.reasons == ["lent_bytes"] * 5

    def test_what_exists_needs_no_room_and_does_not_wait_in_the_queue(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        world.run(client.put(ns, chain(1), [content(1, NBYTES)]))
        world.run(client.reserve(ns, chain(6, "held")))
        waiting = world.sim.start(client.reserve(ns, chain(3, "waits"), timeout_s=5.0))
        answers = world.sim.start(client.put(ns, chain(1), [content(1, NBYTES)]))
        assert answers.result() == [("exists", "")]
        assert world.sim.finish(waiting).reasons == ["full"] * 3


class TestLateWriters:
    """B24: what was lent comes back when it is handed back, and not before."""

    def test_a_reservation_expires_and_its_seal_is_refused(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        writing = world.run(client.reserve(ns, chain(2)))
        world.sim.advance(61.0)
        assert world.store.stats()["reservations"] == 0
        assert used(world) == 2 * NBYTES
        assert client.holder.lent_bytes == 2 * NBYTES
        writing.write(0, b"late" * (NBYTES // 4))
        assert world.run(writing.seal()) == [("refused", "expired")] * 2
        assert client.exists(ns, chain(2)) == [False, False]
        assert used(world) == client.holder.lent_bytes == 0
        assert world.store.stats()["counters"]["expired_reservations"] == 1

    def test_a_stopped_writer_never_reaches_what_others_put_meanwhile(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        stopped = world.run(client.reserve(ns, chain(2)))
        world.sim.advance(61.0)
        other = world.client("other")
        payloads = [content(n, NBYTES) for n in range(2)]
        assert world.run(other.put(ns, chain(2), payloads)) == [("stored", "")] * 2
        for index in range(2):
            stopped.write(index, b"\xff" * NBYTES)
        assert world.run(other.read(ns, chain(2))) == payloads
        assert world.run(stopped.seal()) == [("refused", "expired")] * 2
        assert world.run(other.read(ns, chain(2))) == payloads

    def test_what_a_writer_still_views_is_published_from_a_copy(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        writing = world.run(client.reserve(ns, chain(2)))
        payloads = [content(n, NBYTES) for n in range(2)]
        for index in range(2):
            writing.write(index, payloads[index])
        assert world.run(writing.seal(alive=[1])) == [("stored", "")] * 2
        for index in range(2):
            if index == 1:
                writing.write(index, b"\xff" * NBYTES)
        assert world.run(client.read(ns, chain(2))) == payloads
        assert client.holder.lent_bytes == NBYTES
        assert used(world) == 3 * NBYTES
        loan = writing.loans[1]
        assert loan is not None
        assert world.call(client.acknowledge, [loan]) == 1
        assert world.call(client.acknowledge, [loan]) == 0
        assert client.holder.lent_bytes == 0
        assert used(world) == 2 * NBYTES

    def test_what_an_aborting_writer_still_views_stays_lent(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        writing = world.run(client.reserve(ns, chain(2)))
        world.call(writing.abort, [0])
        assert used(world) == client.holder.lent_bytes == NBYTES
        assert world.call(client.acknowledge, [loan for loan in writing.loans if loan]) == 1
        assert used(world) == client.holder.lent_bytes == 0

    def test_without_room_for_the_copy_the_put_is_refused(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        writing = world.run(client.reserve(ns, chain(7)))
        answers = world.run(writing.seal(alive=range(7)))
        refused = [answer for answer in answers if answer[0] != "stored"]
        assert refused
        assert refused[0] == ("refused", "full")
        assert client.exists(ns, chain(7)) == [a == ("stored", "") for a in answers]

    def test_a_dead_process_gives_everything_back_at_once(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        kept = world.run(client.reserve(ns, chain(1, "kept")))
        world.run(kept.seal(alive=[0]))
        world.run(client.reserve(ns, chain(2)))
        expired = world.run(client.reserve(ns, chain(1, "expired")))
        world.store.writers.give_up(expired.reservation, "writer_gone")
        assert client.holder.lent_bytes == 4 * NBYTES
        world.call(client.exit)
        world.rest()
        assert client.holder.lent_bytes == 0
        assert used(world) == NBYTES
        other = world.client("other")
        answers = world.run(other.put(ns, chain(2), [content(1, NBYTES), content(2, NBYTES)]))
        assert answers == [("stored", "")] * 2

    def test_a_lost_connection_ends_what_it_reserved_but_not_its_loans(
        self, world: SimStore, ns: Namespace, client: StoreClient
    ) -> None:
        writing = world.run(client.reserve(ns, chain(1)))
        client.holder.connections += 1
        world.call(world.store.detach, client.holder, [writing.reservation.reservation_id, 12345])
        assert used(world) == client.holder.lent_bytes == NBYTES
        assert world.run(writing.seal()) == [("refused", "writer_gone")]
        assert used(world) == 0


class TestParentInSealing:
    """Windows of one chain overlap: the next is written while the last is digested."""

    def test_a_window_may_continue_one_that_is_being_sealed(
        self, world: SimStore, client: StoreClient
    ) -> None:
        big = world.declare(opaque(300 * KIB, "big"))
        keys = chain(2)
        first = world.run(client.reserve(big, keys[:1]))
        first.write(0, content(0, 300 * KIB))
        sealing = world.sim.start(first.seal())
        assert not sealing.done()
        second = world.run(client.reserve(big, keys[1:], parent_key=keys[0]))
        assert second.reasons == [""]
        second.write(0, content(1, 300 * KIB))
        both = [sealing, world.sim.start(second.seal())]
        assert [world.sim.finish(seal) for seal in both] == [[("stored", "")]] * 2
        assert client.match(big, keys) == 2
        assert world.run(client.read(big, keys)) == [content(n, 300 * KIB) for n in range(2)]

    def test_the_seal_of_a_child_waits_for_its_parent(
        self, world: SimStore, client: StoreClient
    ) -> None:
        small = world.declare(opaque(SMALL, "small"))
        root, leaf = chain(2)
        first = world.run(client.reserve(small, [root]))
        second = world.run(client.reserve(small, [leaf], parent_key=root))
        waiting = world.sim.start(second.seal())
        assert not waiting.done()
        assert client.exists(small, [leaf]) == [False]
        world.run(first.seal())
        assert world.sim.finish(waiting) == [("stored", "")]

    @pytest.mark.parametrize("how", ["abort", "expire"])
    def test_a_parent_that_never_comes_makes_orphans(
        self, world: SimStore, client: StoreClient, how: str
    ) -> None:
        small = world.declare(opaque(SMALL, "small"))
        root, leaf = chain(2)
        first = world.run(client.reserve(small, [root]))
        second = world.run(client.reserve(small, [leaf], parent_key=root))
        waiting = world.sim.start(second.seal())
        if how == "abort":
            world.call(first.abort)
        assert world.sim.finish(waiting) == [("refused", "orphan")]
        if how == "expire":
            world.call(first.abort)

    def test_keys_that_name_each_other_as_parents_do_not_wait_for_ever(
        self, world: SimStore, client: StoreClient
    ) -> None:
        small = world.declare(opaque(SMALL, "small"))
        a, b = chain(2)
        opening = world.run(client.reserve(small, [a]))
        writings = [
            world.run(client.reserve(small, [b], parent_key=a)),
            world.run(client.reserve(small, [a], parent_key=b)),
        ]
        seals = [world.sim.start(writing.seal()) for writing in writings]
        world.call(opening.abort)
        answers = [world.sim.finish(seal) for seal in seals]
        assert answers == [[("refused", "orphan")]] * 2
        assert used(world) == 0


def test_concurrent_writers_and_readers_see_a_miss_or_the_whole_blob(tmp_path: Path) -> None:
    """B03, with every interleaving that a seed gives."""
    for seed in range(20):
        with SimStore(tmp_path / str(seed), ssd_bytes=0, seed=seed) as world:
            big = world.declare(opaque(150 * KIB))
            payload = content(seed, 150 * KIB)
            clients = [world.client(f"client {n}") for n in range(5)]
            tasks: list[asyncio.Task[object]] = []
            for round_ in range(6):
                for client in clients:
                    writes = (round_ + clients.index(client)) % 2
                    work = client.put(big, chain(1), [payload], timeout_s=1.0)
                    read = client.read(big, chain(1), wait_for_writers=bool(round_ % 3))
                    if writes:
                        read.close()
                        tasks.append(world.sim.start(work))
                    else:
                        work.close()
                        tasks.append(world.sim.start(read))
                    world.sim.step()
            for task in tasks:
                outcome = world.sim.finish(task)
                assert outcome in ([], [payload], [("stored", "")], [("exists", "")])
            world.finish_all()
            world.audit(quiet=True)


def test_loans_are_of_the_size_asked_for(world: SimStore, ns: Namespace) -> None:
    writing = world.run(world.client().reserve(ns, chain(2)))
    assert [loan.nbytes for loan in writing.loans if isinstance(loan, Loan)] == [NBYTES] * 2
    world.call(writing.abort)

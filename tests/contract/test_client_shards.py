"""The clients' contract: ranks that write blobs together, and ranks that read them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np
import pytest

from blobstore.clients import (
    BoundNamespace,
    Client,
    KVLayout,
    LayerGroup,
    Namespace,
    Shard,
    WriterGroup,
)
from blobstore.errors import InvalidRequest
from blobstore.layout import Part
from tests.support import rank as other_rank
from tests.support.contract import make_cold
from tests.support.daemon import Daemon
from tests.support.program import Program

TOKENS = 4
N = 3
ENGINE = WriterGroup("engine", 7)

ATTENTION = LayerGroup.attention(layers=4, heads=8, head_size=64)
FEW_HEADS = LayerGroup.attention(layers=4, heads=2, head_size=64)
LATENT = LayerGroup.latent(layers=4, width=96)
SLIDING = LayerGroup.sliding(layers=2, heads=8, head_size=32, window=2 * TOKENS)
LAYOUTS = {
    "attention": KVLayout((ATTENTION,), head_groups=8),
    "attention in wide parts": KVLayout((ATTENTION,), layers_per_part=2, head_groups=4),
    "fewer heads than ranks": KVLayout((FEW_HEADS,), head_groups=4),
    "latent": KVLayout((LATENT,)),
    "state of all ranks": KVLayout((LayerGroup.state(layers=4, state_bytes=512),)),
    "state by heads": KVLayout((LayerGroup.state(layers=4, heads=4, state_bytes=512),), 1, 4),
    "hybrid": KVLayout(
        (ATTENTION, SLIDING, LayerGroup.state(layers=2, heads=8, state_bytes=512), LATENT),
        head_groups=8,
    ),
}
Degrees = tuple[int, int]
"""Of tensor and of pipeline parallelism."""


def ranks(degrees: Degrees) -> list[Shard]:
    tp_size, pp_size = degrees
    return [Shard(tp, tp_size, pp, pp_size) for pp in range(pp_size) for tp in range(tp_size)]


def pattern(blob: int, part: Part, rank: int) -> bytes:
    """What the rank writes to that part, and to no other."""
    return np.random.default_rng([blob, part.index, rank]).bytes(part.nbytes)


class Engine:
    """All ranks of an engine, on one or more clients. Their writers are open."""

    def __init__(
        self, clients: Sequence[Any], namespace: Namespace, degrees: Degrees, group: WriterGroup
    ) -> None:
        self.namespace = namespace
        self.parts = namespace.layout.parts(TOKENS)
        self.of_client = [client for _, client in zip(ranks(degrees), cycle(clients), strict=False)]
        self.bound: list[BoundNamespace] = [
            client.namespace(namespace, shard)
            for client, shard in zip(self.of_client, ranks(degrees), strict=True)
        ]
        self.keys = namespace.keys(range(TOKENS * N))
        self.group = group
        self.writers: dict[int, Any] = {}

    @property
    def at_work(self) -> list[int]:
        """Ranks that write anything: others may hold the same bytes."""
        return [rank for rank, ns in enumerate(self.bound) if ns.writes]

    def open(self, rank: int) -> Any:
        ns = self.bound[rank]
        self.writers[rank] = self.of_client[rank].put(ns, self.keys, group=self.group)
        return self.writers[rank]

    def fill(self, rank: int) -> None:
        writer, numbers = self.writers[rank], self.bound[rank].writes
        for blob in range(N):
            for number, view in zip(numbers, writer.parts(blob), strict=True):
                view[:] = pattern(blob, self.parts[number], rank)

    def write(self, rank: int) -> list[str]:
        """Open, fill and seal: the results."""
        self.open(rank)
        self.fill(rank)
        self.writers[rank].seal()
        results: list[str] = self.writers[rank].results
        return results

    def part_of(self, blob: int, number: int) -> bytes:
        """What part `number` of the blob must be."""
        (owner,) = (rank for rank, ns in enumerate(self.bound) if number in ns.writes)
        return pattern(blob, self.parts[number], owner)

    def payload(self, blob: int) -> bytes:
        return b"".join(self.part_of(blob, number) for number in range(len(self.parts)))


@pytest.fixture
def namespace(model: str) -> Namespace:
    return Namespace(model, LAYOUTS["attention"], tokens_per_blob=TOKENS)


def two_ranks(kv: Any, namespace: Namespace, group: WriterGroup = ENGINE) -> Engine:
    """Both on one client; they have not begun to write. No fixture: those outlive the client."""
    return Engine([kv], namespace, (2, 1), group)


@pytest.mark.in_place
class TestWriting:
    @pytest.mark.parametrize("degrees", [(2, 1), (4, 1), (1, 2), (2, 2), (8, 1)], ids=str)
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_ranks_fill_blobs_together_in_any_order(
        self, kv: Any, other: Client, model: str, layout: str, degrees: Degrees
    ) -> None:
        namespace = Namespace(model, LAYOUTS[layout], tokens_per_blob=TOKENS)
        if layout == "attention in wide parts" and degrees == (8, 1):
            with pytest.raises(InvalidRequest, match="head_groups=8"):
                _ = kv.namespace(namespace, Shard(0, 8)).writes
            return
        engine = Engine([kv, other], namespace, degrees, ENGINE)
        rng = random.Random(model)
        at_work = engine.at_work
        for step in (engine.open, engine.fill):
            rng.shuffle(at_work)
            for rank in at_work:
                step(rank)
        rng.shuffle(at_work)
        *others, last = at_work
        for rank in others:
            engine.writers[rank].seal()
            assert engine.writers[rank].results == ["partial"] * N
            assert kv.match(engine.bound[0], engine.keys).blobs == 0
            assert other.exists(engine.bound[0], engine.keys) == [False] * N
        engine.writers[last].seal()
        assert engine.writers[last].results == ["stored"] * N
        with kv.get(kv.namespace(namespace), engine.keys) as lease:
            assert [bytes(view) for view in lease] == [engine.payload(blob) for blob in range(N)]

    @pytest.mark.parametrize("layout", ["latent", "fewer heads than ranks", "hybrid"])
    def test_every_part_is_written_by_one_rank(self, kv: Any, model: str, layout: str) -> None:
        namespace = Namespace(model, LAYOUTS[layout], tokens_per_blob=TOKENS)
        for degrees in ((1, 1), (2, 1), (4, 1), (8, 1), (2, 2)):
            engine = Engine([kv], namespace, degrees, ENGINE)
            written = sorted(number for ns in engine.bound for number in ns.writes)
            assert written == list(range(namespace.layout.n_parts))

    def test_a_rank_whose_bytes_others_write_has_nothing_to_do(self, kv: Any, model: str) -> None:
        layout = KVLayout((LayerGroup.latent(layers=2, width=96),))
        engine = Engine([kv], Namespace(model, layout, tokens_per_blob=TOKENS), (4, 1), ENGINE)
        assert engine.at_work == [0, 1]
        idle = engine.open(3)
        assert idle.parts(0) == ()
        idle.seal()
        assert (idle.results, idle.reasons) == (["partial"] * N, ["no_parts"] * N)
        assert engine.write(1) == ["partial"] * N
        assert engine.write(0) == ["stored"] * N

    def test_ranks_of_one_engine_may_come_one_after_the_other(
        self, kv: Any, namespace: Namespace
    ) -> None:
        engine = two_ranks(kv, namespace)
        assert engine.write(1) == ["partial"] * N
        assert engine.write(0) == ["stored"] * N
        assert engine.write(1) == ["exists"] * N

    def test_another_epoch_never_mixes(self, kv: Any, namespace: Namespace) -> None:
        """An engine that restarted in the middle must not be completed by its successor."""
        engine = two_ranks(kv, namespace)
        restarted = two_ranks(kv, namespace, WriterGroup(ENGINE.id, ENGINE.epoch + 1))
        others = two_ranks(kv, namespace, WriterGroup("another engine", ENGINE.epoch))
        assert engine.write(0) == ["partial"] * N
        assert restarted.write(1) == ["partial"] * N
        assert others.write(1) == ["partial"] * N
        assert kv.exists(engine.bound[0], engine.keys) == [False] * N
        restarted.open(0)
        for blob in range(N):
            for part in restarted.writers[0].parts(blob):
                part[:] = b"r" * part.nbytes
        restarted.writers[0].seal()
        assert restarted.writers[0].results == ["stored"] * N
        assert engine.write(1) == others.write(0) == ["exists"] * N
        with kv.get(engine.bound[0], engine.keys) as lease:
            for blob in range(N):
                assert {*b"".join(lease.parts(blob))} == {ord("r")}
        with kv.get(engine.bound[1], engine.keys) as lease:
            for blob in range(N):
                expected = [restarted.part_of(blob, number) for number in engine.bound[1].reads]
                assert list(lease.parts(blob)) == expected

    def test_a_rank_that_gives_up_ends_the_blob_for_all(
        self, kv: Any, namespace: Namespace
    ) -> None:
        engine = two_ranks(kv, namespace)
        engine.open(0)
        engine.open(1)
        engine.fill(0)
        engine.writers[0].seal()
        engine.writers[1].abort()
        assert kv.exists(engine.bound[0], engine.keys) == [False] * N
        assert engine.write(1) == ["partial"] * N
        assert engine.write(0) == ["stored"] * N

    def test_a_rank_that_dies_ends_the_blob_for_all(
        self, kv: Any, shared: Daemon, model: str
    ) -> None:
        namespace, keys = (
            other_rank.namespace_of(model),
            other_rank.namespace_of(model).keys(range(TOKENS * N)),
        )
        first, second = (kv.namespace(namespace, Shard(number, 2)) for number in range(2))
        whole = [bytes(other_rank.LAYOUT.nbytes(TOKENS) // 2)] * N
        with Program("tests.support.rank", shared.address, model) as dying:
            assert dying.hear() == [""] * N
            assert kv.put_from(first, keys, whole, group=other_rank.GROUP) == ["partial"] * N
            with kv.get(second, keys, stream=True, wait=True) as lease:
                assert len(lease) == N
                dying.kill()
                assert lease.wait(0, 0, timeout_s=10.0) is False
                assert lease.reason == "writer_gone"
        assert kv.exists(first, keys) == [False] * N
        assert kv.put_from(second, keys, whole, group=other_rank.GROUP) == ["partial"] * N
        assert kv.put_from(first, keys, whole, group=other_rank.GROUP) == ["stored"] * N
        with kv.get(kv.namespace(namespace), keys) as lease:
            assert {*b"".join(lease)} == {0}

    def test_a_share_alone_is_refused(self, kv: Any, namespace: Namespace) -> None:
        engine = two_ranks(kv, namespace)
        ns, keys = engine.bound[0], engine.keys
        with pytest.raises(InvalidRequest, match="name the group"):
            kv.put(ns, keys)
        with pytest.raises(InvalidRequest, match="name the group"):
            kv.put_from(ns, keys, [b""] * N)

    def test_ranks_put_from_buffers_of_their_share(self, kv: Any, namespace: Namespace) -> None:
        engine = two_ranks(kv, namespace)
        for rank, result in ((0, "partial"), (1, "stored")):
            ns = engine.bound[rank]
            shares = [
                b"".join(engine.part_of(blob, number) for number in ns.writes) for blob in range(N)
            ]
            assert kv.put_from(ns, engine.keys, shares, group=ENGINE) == [result] * N
        with kv.get(kv.namespace(engine.namespace), engine.keys) as lease:
            assert [bytes(view) for view in lease] == [engine.payload(blob) for blob in range(N)]

    def test_a_rank_that_does_not_fit_the_grid_is_told_what_would(
        self, kv: Any, model: str
    ) -> None:
        three = Namespace(model, LAYOUTS["attention"], tokens_per_blob=TOKENS)
        with pytest.raises(InvalidRequest, match="8 KV heads do not split evenly"):
            kv.namespace(three, Shard(0, 3))
        with pytest.raises(InvalidRequest, match="4 layers do not split evenly"):
            kv.namespace(three, Shard(pp_rank=0, pp_size=3))
        coarse = Namespace(model, KVLayout((ATTENTION,), head_groups=2), tokens_per_blob=TOKENS)
        ns = kv.namespace(coarse, Shard(0, 4))
        with pytest.raises(InvalidRequest, match="head_groups=4"):
            kv.put(ns, coarse.keys(range(TOKENS)), group=ENGINE)
        opaque = Namespace(model, KVLayout.opaque(8), tokens_per_blob=TOKENS)
        with pytest.raises(InvalidRequest, match="nothing of ranks"):
            kv.namespace(opaque, Shard(0, 2))


def owns(part: Part, heads: int, shard: Shard, n_layers: int) -> bool:
    """Whether any of the part's layers and heads are the rank's."""
    per_stage = n_layers // shard.pp_size
    stage = range(shard.pp_rank * per_stage, (shard.pp_rank + 1) * per_stage)
    if shard.tp_size <= heads:
        share = heads // shard.tp_size
        own = range(shard.tp_rank * share, (shard.tp_rank + 1) * share)
    else:
        own = range(
            shard.tp_rank * heads // shard.tp_size, 1 + shard.tp_rank * heads // shard.tp_size
        )
    return any(layer in stage for layer in range(*part.layers)) and any(
        head in own for head in range(*part.heads)
    )


READERS: list[Degrees] = [(1, 1), (2, 1), (4, 1), (8, 1), (16, 1), (1, 2), (2, 2), (4, 4)]


class TestReading:
    @pytest.mark.parametrize("written_by", [(1, 1), (4, 1), (2, 2)], ids=str)
    @pytest.mark.parametrize("layout", ["attention", "attention in wide parts", "latent"])
    def test_readers_of_every_degree_get_their_own_heads_and_layers(
        self, kv: Any, other: Client, model: str, layout: str, written_by: Degrees
    ) -> None:
        namespace = Namespace(model, LAYOUTS[layout], tokens_per_blob=TOKENS)
        (group,) = namespace.layout.groups
        engine = Engine([other], namespace, written_by, ENGINE)
        results = [engine.write(rank) for rank in engine.at_work]
        assert results[-1] == ["stored"] * N
        for degrees in READERS:
            seen: set[int] = set()
            for shard in ranks(degrees):
                ns = kv.namespace(namespace, shard)
                own = [part for part in engine.parts if owns(part, group.heads, shard, 4)]
                seen |= {part.index for part in own}
                shares = [[engine.part_of(blob, part.index) for part in own] for blob in range(N)]
                with kv.get(ns, engine.keys) as lease:
                    assert lease.n_parts == len(own)
                    assert [list(lease.parts(blob)) for blob in range(N)] == shares
                buffers = [bytearray(sum(part.nbytes for part in own)) for _ in range(N)]
                assert kv.get_into(ns, engine.keys, buffers) == N
                assert buffers == [b"".join(share) for share in shares]
            assert seen == {part.index for part in engine.parts}

    def test_a_hybrid_is_read_by_ranks_from_ssd(self, kv: Any, other: Client, model: str) -> None:
        namespace = Namespace(model, LAYOUTS["hybrid"], tokens_per_blob=TOKENS)
        engine = Engine([other], namespace, (4, 1), ENGINE)
        for rank in engine.at_work:
            engine.write(rank)
        make_cold(kv, engine.bound[0], engine.keys)
        for shard in ranks((2, 1)):
            ns = kv.namespace(namespace, shard)
            with kv.get(ns, engine.keys, stream=True) as lease:
                assert len(lease) == N
                for part, number in enumerate(ns.reads):
                    for blob in range(N):
                        assert lease.wait(blob, part)
                        assert lease.parts(blob)[part] == engine.part_of(blob, number)

    @pytest.mark.in_place
    def test_a_reader_follows_its_own_rank_without_the_others(
        self, kv: Any, namespace: Namespace
    ) -> None:
        """A decode rank takes over from its prefill rank before the others have written."""
        engine = two_ranks(kv, namespace)
        engine.open(0)
        engine.open(1)
        engine.fill(1)
        engine.writers[1].seal()
        with (
            kv.get(engine.bound[1], engine.keys, stream=True, wait=True) as mine,
            kv.get(engine.bound[0], engine.keys, stream=True, wait=True) as theirs,
        ):
            assert len(mine) == len(theirs) == N
            for blob in range(N):
                for part, number in enumerate(engine.bound[1].reads):
                    assert mine.wait(blob, part)
                    assert mine.parts(blob)[part] == engine.part_of(blob, number)
            assert theirs.wait(0, 0, timeout_s=0.05) is False
            with pytest.raises(InvalidRequest, match="wait for it"):
                theirs.parts(0)[0]
            assert kv.exists(engine.bound[0], engine.keys) == [False] * N
            engine.fill(0)
            engine.writers[0].seal()
            assert theirs.wait(0, 0)
            assert theirs.parts(0)[0] == engine.part_of(0, engine.bound[0].reads[0])
        assert kv.match(engine.bound[0], engine.keys).blobs == N

"""Saves of a worker: copied before the step ends, sealed behind it, and never in its way."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blobstore.clients import Client, KVLayout, LayerGroup
from blobstore.clients.sync import Writer
from blobstore.clients.vllm import saves
from blobstore.clients.vllm.faults import Faults
from blobstore.clients.vllm.metadata import Save
from blobstore.clients.vllm.recorder import SAVED, SAVED_BYTES, UNSAVED, Data, Recorder
from blobstore.clients.vllm.saves import Saves
from blobstore.errors import Full
from tests.support.polling import poll_until
from tests.support.served_store import served_store
from tests.support.vllm_fakes import (
    BLOB_BYTES,
    BLOB_TOKENS,
    TOKEN_BYTES,
    FakeCopies,
    FakeDaemon,
    FakeIdentity,
    block_hashes,
    content,
)

TOKENS = list(range(32))
BLOBS = 4


class Bench:
    """A worker's saves over a client, or none; the engine's memory holds TOKENS in blocks 1…8."""

    def __init__(self, client: Client | None) -> None:
        self.identity = FakeIdentity()
        self.ns = self.identity.bound()
        self.keys = self.identity.keys(block_hashes(TOKENS))
        self.copies = FakeCopies()
        self.copies.blocks = {block + 1: content(TOKENS, block) for block in range(8)}
        self.client: Any = client
        self.daemon = FakeDaemon(client)
        self.recorder = Recorder()
        daemon: Any = self.daemon
        self.saves = Saves(self.identity, daemon, self.recorder, Faults(), timeout_s=5.0)

    def save(self, first: int = 0, end: int = BLOBS, **fields: Any) -> Save:
        told: dict[str, Any] = {"retention": "standard", "ttl_s": 0.0, "hint": {}} | fields
        return Save(
            "r", self.ns.namespace.encode(), self.keys[first:end].packed, 32,
            self.keys[first - 1] if first else b"", first,
            [list(range(1 + 2 * first, 1 + 2 * end))], **told,
        )  # fmt: skip

    def step(self, *saves: Save) -> None:
        """A step whose forward lasts until all memory is there."""
        self.saves.begin(saves)
        for saving in self.saves._step:
            assert saving._ready.wait(10.0)
        copies: Any = self.copies
        self.saves.finish(copies)

    def stored(self) -> int:
        """Leading blobs that the store has."""
        return int(self.client.match(self.ns, self.keys).blobs)

    def drain(self) -> Data:
        self.saves.close(10.0)
        return self.recorder.take() or {}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with served_store(tmp_path / "b.sock") as served, Client(served.address) as client:
        made = Bench(client)
        yield made
        made.saves.close(5.0)


def test_blobs_are_stored_as_their_tokens_dictate(bench: Bench) -> None:
    bench.step(bench.save(0, 2), bench.save(2, 4))
    data = bench.drain()
    assert bench.client is not None
    with bench.client.get(bench.ns, bench.keys) as lease:
        payloads = [bytes(view) for view in lease]
    assert payloads == [
        content(TOKENS, 2 * blob) + content(TOKENS, 2 * blob + 1) for blob in range(BLOBS)
    ]
    assert (data[SAVED], data[SAVED_BYTES]) == ({"": 32}, {"": BLOBS * BLOB_BYTES})
    assert bench.saves.take_unsaved() == {}


def test_what_a_later_step_writes_to_the_blocks_is_not_saved(bench: Bench) -> None:
    bench.step(bench.save())
    bench.copies.blocks = dict.fromkeys(bench.copies.blocks, bytes(BLOB_BYTES // 2))
    bench.drain()
    assert bench.client is not None
    with bench.client.get(bench.ns, bench.keys) as lease:
        assert bytes(lease[0]) == content(TOKENS, 0) + content(TOKENS, 1)


def test_a_chain_goes_on_while_its_head_is_being_sealed(bench: Bench) -> None:
    for blob in range(BLOBS):
        bench.step(bench.save(blob, blob + 1))
    bench.drain()
    assert bench.client is not None
    assert bench.client.match(bench.ns, bench.keys).blobs == BLOBS


def test_held_blobs_are_neither_copied_nor_missed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.step(bench.save())
    poll_until(lambda: bench.client is not None and bench.client.match(bench.ns, bench.keys).blobs)
    bench.recorder.take()
    bench.copies.fails = True
    put, writers = Client.put, []

    def noted(*args: Any, **kwargs: Any) -> Any:
        writers.append(put(*args, **kwargs))
        return writers[-1]

    monkeypatch.setattr(Client, "put", noted)
    bench.step(bench.save())
    assert bench.drain() == {}
    assert bench.saves.take_unsaved() == {}
    (writer,) = writers
    assert writer.results == ["exists"] * BLOBS


def test_what_another_ranks_seal_made_whole_counts_as_saved(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that are sealed one by one may all be there before their blob is."""
    seal = Writer.seal

    def after_another(writer: Writer, **kwargs: Any) -> None:
        seal(writer, **kwargs)
        writer.results = ["exists"] * len(writer)

    monkeypatch.setattr(Writer, "seal", after_another)
    bench.step(bench.save())
    assert bench.drain()[SAVED] == {"": BLOBS * BLOB_TOKENS}


def test_an_orphan_is_told_to_begin_again_at_the_root(bench: Bench) -> None:
    bench.step(bench.save(2, 4))
    assert bench.drain()[UNSAVED] == {"orphan": 2}
    assert bench.saves.take_unsaved() == {"r": 0}
    assert bench.saves.take_unsaved() == {}


def test_without_a_daemon_nothing_is_tried() -> None:
    bench = Bench(None)
    bench.daemon.usable = False
    bench.step(bench.save(1))
    assert bench.drain()[UNSAVED] == {"unavailable": 3}
    assert bench.saves.take_unsaved() == {"r": 1}


def test_a_daemon_that_went_is_a_miss() -> None:
    bench = Bench(None)
    bench.step(bench.save())
    assert bench.drain()[UNSAVED] == {"unavailable": 4}


def slow_memory(bench: Bench) -> threading.Event:
    """Reservations wait until the event is set."""
    reach, slow = bench.daemon.reach, threading.Event()

    def slowly() -> Any:
        assert slow.wait(10.0)
        return reach()

    bench.daemon.reach = slowly  # type: ignore[method-assign]
    return slow


def test_what_is_computed_before_its_memory_is_there_is_stored_as_it_was(bench: Bench) -> None:
    slow = slow_memory(bench)
    bench.saves.begin([bench.save()])
    copies: Any = bench.copies
    bench.saves.finish(copies)
    bench.copies.blocks = dict.fromkeys(bench.copies.blocks, bytes(BLOB_BYTES // 2))
    slow.set()
    assert bench.client is not None
    client = bench.client
    poll_until(lambda: client.match(bench.ns, bench.keys).blobs == BLOBS, 10.0, "all is stored")
    with client.get(bench.ns, bench.keys) as lease:
        assert bytes(lease[0]) == content(TOKENS, 0) + content(TOKENS, 1)
        assert bytes(lease[3]) == content(TOKENS, 6) + content(TOKENS, 7)
    assert bench.drain()[SAVED] == {"": 32}
    assert bench.saves._aside.held == 0


@pytest.mark.parametrize(("name", "value"), [("RESERVE_S", 0.0), ("ASIDE_BYTES_MAX", 1)])
def test_memory_that_comes_too_late_is_given_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, name: str, value: float
) -> None:
    """The step does not wait for it, and nothing half written is left."""
    monkeypatch.setattr(saves, name, value)
    bench.saves._aside.most = saves.ASIDE_BYTES_MAX
    slow = slow_memory(bench)
    bench.saves.begin([bench.save()])
    copies: Any = bench.copies
    bench.saves.finish(copies)
    poll_until(lambda: bench.saves._unsaved, 10.0, "it is given up")
    slow.set()
    assert bench.drain()[UNSAVED] == {"late": 4}
    assert bench.client is not None
    assert bench.client.match(bench.ns, bench.keys).blobs == 0
    assert bench.saves.take_unsaved() == {"r": 0}
    assert bench.saves._aside.held == 0


def test_what_cannot_be_copied_aside_is_not_stored(bench: Bench) -> None:
    slow = slow_memory(bench)
    bench.copies.fails = True
    bench.saves.begin([bench.save()])
    copies: Any = bench.copies
    bench.saves.finish(copies)
    slow.set()
    assert bench.drain()[UNSAVED] == {"failed": 4}
    assert bench.saves._aside.held == 0


def test_a_copy_that_fails_stores_nothing(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.copies.fails = True
    bench.step(bench.save())
    assert bench.drain()[UNSAVED] == {"failed": 4}
    assert bench.client is not None
    assert bench.client.match(bench.ns, bench.keys).blobs == 0
    assert "the device is gone" in caplog.text


def test_a_step_that_is_never_finished_stores_nothing(bench: Bench) -> None:
    bench.saves.begin([bench.save()])
    bench.saves.begin([])
    bench.drain()
    assert bench.client is not None
    assert bench.client.match(bench.ns, bench.keys).blobs == 0


def test_more_than_the_daemon_lends_is_a_miss(bench: Bench) -> None:
    big = bench.identity
    big.blob_bytes = 12 << 20
    bench.ns = big.bound()
    bench.step(bench.save())
    assert set(bench.drain()[UNSAVED]) <= {"too_large", "no_room"}


def test_blobs_are_kept_for_as_long_as_asked(bench: Bench) -> None:
    bench.step(bench.save(ttl_s=60.0))
    bench.drain()
    assert bench.client is not None
    (facts, *_) = bench.client.explain(bench.ns, bench.keys)
    assert facts["client_pin_s"] > 0


def test_durable_blobs_are_on_ssd_when_they_are_sealed(bench: Bench) -> None:
    bench.step(bench.save(retention="durable"))
    bench.drain()
    assert bench.client is not None
    assert all("ssd" in fact["tiers"] for fact in bench.client.stat(bench.ns, bench.keys))


def layered(client: Client, layers: int) -> Bench:
    """A bench whose blobs have as many layers, in parts of their own."""
    bench = Bench(client)
    width = TOKEN_BYTES // layers
    group = LayerGroup.latent(layers=layers, width=width, dtype="uint8")
    bench.identity.layout = KVLayout((group,))
    bench.ns = bench.identity.bound()
    bench.copies.layers = layers
    return bench


def test_layer_by_layer_a_follower_has_what_is_computed(tmp_path: Path) -> None:
    with served_store(tmp_path / "b.sock") as served, Client(served.address) as client:
        bench = layered(client, 4)
        whole = content(TOKENS, 0) + content(TOKENS, 1)
        bench.saves.begin([bench.save(0, 1)])
        assert bench.saves._step[0]._ready.wait(10.0)
        used: Any = bench.copies
        with client.get(bench.ns, bench.keys[:1], stream=True, wait=True) as lease:
            for layer in range(3):
                bench.saves.layer(used, layer, layer)
                assert lease.wait(0, layer)
                span = BLOB_BYTES // 4
                assert lease.part(0, layer) == whole[layer * span : (layer + 1) * span]
            bench.saves.layer(used, 3, 3)
            bench.copies.blocks = {}  # all was copied: the end of the step reads no block again
            bench.saves.finish(used)
            assert lease.wait(0)
        bench.saves.close(5.0)
        with client.get(bench.ns, bench.keys[:1]) as lease:
            assert bytes(lease[0]) == whole


@pytest.mark.parametrize("seen", [[], [0, 1], [2, 3], [2, 3, 2, 3], [0, 1, 1, 3]])
def test_layers_that_were_not_copied_in_order_are_copied_at_the_end(
    tmp_path: Path, seen: list[int]
) -> None:
    """Memory may come when some are computed already, or a layer may not be told of."""
    with served_store(tmp_path / "b.sock") as served, Client(served.address) as client:
        bench = layered(client, 4)
        used: Any = bench.copies
        bench.saves.begin([bench.save(0, 1)])
        assert bench.saves._step[0]._ready.wait(10.0)
        for layer in seen:
            bench.saves.layer(used, layer, layer)
        bench.saves.finish(used)
        bench.saves.close(5.0)
        with client.get(bench.ns, bench.keys[:1]) as lease:
            assert bytes(lease[0]) == content(TOKENS, 0) + content(TOKENS, 1)


def test_a_layer_that_is_computed_in_portions_is_copied_at_the_end(tmp_path: Path) -> None:
    with served_store(tmp_path / "b.sock") as served, Client(served.address) as client:
        bench = layered(client, 4)
        used, right = bench.copies, bench.copies.blocks
        copies: Any = used
        bench.saves.begin([bench.save(0, 1)])
        assert bench.saves._step[0]._ready.wait(10.0)
        used.blocks = {block: bytes(len(each)) for block, each in right.items()}
        for layer in range(4):
            bench.saves.layer(copies, layer, layer)
        used.blocks = right
        bench.saves.layer(copies, 0, 0)
        bench.saves.finish(copies)
        bench.saves.close(5.0)
        with client.get(bench.ns, bench.keys[:1]) as lease:
            assert bytes(lease[0]) == content(TOKENS, 0) + content(TOKENS, 1)


def test_after_a_forward_that_failed_only_what_was_copied_before_is_stored(bench: Bench) -> None:
    slow = slow_memory(bench)
    bench.saves.begin([bench.save(0, 2)])
    copies: Any = bench.copies
    bench.saves.finish(copies)  # it is set aside
    bench.saves.begin([bench.save(2, 4)])
    bench.saves.stop()
    slow.set()
    poll_until(lambda: bench.stored() == 2, 10.0)
    bench.step(bench.save(2, 4))
    assert bench.drain()[UNSAVED] == {"failed": 2}
    assert bench.stored() == 2
    assert bench.saves.take_unsaved() == {"r": 2}


def test_layers_before_the_one_that_failed_are_no_blob(tmp_path: Path) -> None:
    with served_store(tmp_path / "b.sock") as served, Client(served.address) as client:
        bench = layered(client, 4)
        used: Any = bench.copies
        bench.saves.begin([bench.save(0, 1)])
        assert bench.saves._step[0]._ready.wait(10.0)
        with client.get(bench.ns, bench.keys[:1], stream=True, wait=True) as lease:
            for layer in range(2):
                bench.saves.layer(used, layer, layer)
                assert lease.wait(0, layer)
            bench.saves.stop()
            assert not lease.wait(0)
        bench.saves.close(5.0)
        assert bench.stored() == 0


def test_a_copy_that_is_interrupted_is_not_stored(bench: Bench) -> None:
    """By a signal, in the middle: the process may go on."""
    bench.saves.begin([bench.save(0, 2), bench.save(2, 4)])
    for saving in bench.saves._step:
        assert saving._ready.wait(10.0)
    copies: Any = InterruptedCopies(bench.copies)
    with pytest.raises(KeyboardInterrupt):
        bench.saves.finish(copies)
    bench.saves.begin([])
    bench.drain()
    assert bench.stored() == 0


class InterruptedCopies:
    """Somebody presses Ctrl-C when the second blob is copied."""

    def __init__(self, copies: FakeCopies) -> None:
        self._copies = copies
        self._left = 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._copies, name)

    def out(self, *args: Any) -> Any:
        if not self._left:
            raise KeyboardInterrupt
        self._left -= 1
        return self._copies.out(*args)


def test_a_layer_that_never_arrived_is_never_part_of_a_blob(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A device may fail when the engine has long gone on."""
    with served_store(tmp_path / "b.sock") as served, Client(served.address) as client:
        bench = layered(client, 4)
        used: Any = bench.copies
        bench.saves.begin([bench.save(0, 1)])
        (saving,) = bench.saves._step
        assert saving._ready.wait(10.0)
        used.breaks = True
        bench.saves.layer(used, 0, 0)
        poll_until(lambda: not saving._finishes and saving._fault, 10.0)
        used.breaks = False
        for layer in range(1, 4):
            bench.saves.layer(used, layer, layer)
        bench.saves.finish(used)
        assert bench.drain()[UNSAVED] == {"failed": 1}
        assert bench.stored() == 0
        assert "the device was lost" in caplog.text


def test_copies_that_never_arrive_store_nothing(bench: Bench) -> None:
    bench.copies.breaks = True
    bench.step(bench.save())
    assert bench.drain()[UNSAVED] == {"failed": 4}
    assert bench.stored() == 0


@pytest.mark.parametrize("retention", ["standard", "durable"])
@pytest.mark.parametrize("room", [0, 1, 3])
def test_blobs_without_room_for_their_copies_are_saved_later(
    bench: Bench, room: int, retention: str
) -> None:
    """Those before them are saved now, and the others from the first of them on."""
    bench.copies.room = room
    bench.step(bench.save(retention=retention))
    poll_until(lambda: bench.saves._unsaved, 10.0)
    assert bench.stored() == room
    assert bench.saves.take_unsaved() == {"r": room}
    bench.copies.room = None
    bench.step(bench.save(room))
    data = bench.drain()
    assert bench.stored() == BLOBS
    assert data[UNSAVED] == {"busy": BLOBS - room}
    assert data[SAVED] == {"": 32}


def test_layers_without_room_are_no_blob(tmp_path: Path) -> None:
    """The memory of blobs whose first layers were copied looks as if it was written."""
    with served_store(tmp_path / "b.sock") as served, Client(served.address) as client:
        bench = layered(client, 4)
        used: Any = bench.copies
        used.room = 5
        bench.saves.begin([bench.save(0, 2)])
        assert bench.saves._step[0]._ready.wait(10.0)
        for layer in range(4):
            bench.saves.layer(used, layer, layer)
        used.room = 1
        bench.saves.finish(used)
        assert bench.drain()[UNSAVED] == {"busy": 2}
        assert bench.stored() == 0


@pytest.mark.parametrize("held", [0, 2])
def test_blobs_without_room_for_copies_aside_are_saved_later(bench: Bench, held: int) -> None:
    if held:
        bench.step(bench.save(0, held))
        poll_until(lambda: bench.stored() == held, 10.0)
    slow = slow_memory(bench)
    bench.copies.room = 2
    bench.saves.begin([bench.save()])
    copies: Any = bench.copies
    bench.saves.finish(copies)
    slow.set()
    poll_until(lambda: bench.saves._unsaved, 10.0)
    assert bench.drain()[UNSAVED] == {"busy": 2}
    assert bench.stored() == 2
    assert bench.saves.take_unsaved() == {"r": 2}
    assert bench.saves._aside.held == 0


class PartWriter:
    """A writer of which the store takes no more than the first blobs."""

    def __init__(self, before: str, why: str, error: Exception | None) -> None:
        self.reasons = [before, before, why, why]
        self.results = [before, before, "refused", "refused"]
        self._error = error

    def __getitem__(self, number: int) -> memoryview:
        return memoryview(bytearray(BLOB_BYTES))

    def seal(self, *, timeout_s: float) -> None:
        self.results[:2] = ["stored", "stored"]
        if self._error is not None:
            raise self._error

    def abort(self) -> None:
        """It has ended."""


class PartClient:
    def __init__(self, writer: PartWriter) -> None:
        self._writer = writer

    def put(self, *args: Any, **kwargs: Any) -> PartWriter:
        return self._writer


@pytest.mark.parametrize(
    ("before", "error", "stored", "why"),
    [
        ("", None, {"": 16}, "full"),
        ("", Full("blob 2 of a durable put was refused: full"), {"": 16}, "failed"),
        ("exists", None, None, "full"),
    ],
)
def test_only_what_was_refused_is_counted_and_tried_again(
    before: str, error: Exception | None, stored: Any, why: str
) -> None:
    client: Any = PartClient(PartWriter(before, "full", error))
    bench = Bench(client)
    bench.step(bench.save(0, 4))
    data = bench.drain()
    assert data.get(SAVED) == stored
    assert data[UNSAVED] == {why: 2}
    assert bench.saves.take_unsaved() == {"r": 2}

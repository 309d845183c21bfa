"""What handlers may do with a job, and what their servers do."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from blobstore.clients import (
    AsyncClient,
    AsyncRebuildJob,
    BoundNamespace,
    Client,
    KVLayout,
    LayerGroup,
    Namespace,
    RebuildJob,
    Shard,
    Terms,
    rebuilds,
)
from blobstore.clients.rebuilds import RebuildServer
from blobstore.clients.steps import Operation
from blobstore.errors import DeadlineExceeded, InvalidRequest
from blobstore.protocol import Rebuild
from tests.support.polling import poll_until
from tests.support.served_store import ServedStore, served_store

TOKENS = 4
NAMESPACE = Namespace("m", KVLayout.opaque(4096), tokens_per_blob=TOKENS)
N = 5
IDS = np.arange(N * TOKENS, dtype=np.uint32)
WAIT_S = 20.0

Handler = Callable[[RebuildJob], None]


def payload(index: int) -> bytes:
    return bytes([index + 1]) * 4096


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedStore]:
    with served_store(tmp_path / "s") as served:
        yield served


@pytest.fixture
def kv(served: ServedStore) -> Iterator[Client]:
    with Client(served.address, timeout_s=WAIT_S) as kv:
        yield kv


@pytest.fixture
def ns(kv: Client) -> BoundNamespace:
    return kv.namespace(NAMESPACE, terms=Terms(recall="rebuild"))


def drop(kv: Client, ns: BoundNamespace, keep: int = 0) -> None:
    """All but the first blobs is left as text alone."""
    keys = ns.keys(IDS)
    assert len(kv.put_from(ns, keys, [payload(i) for i in range(N)], token_ids=IDS)) == N
    assert kv.drop(ns, keys[keep:]) == N - keep


def read(kv: Client, ns: BoundNamespace) -> list[bytes]:
    with kv.get(ns, ns.keys(IDS)) as lease:
        return [bytes(view) for view in lease]


def serve(kv: Client, ns: BoundNamespace, handler: Handler) -> tuple[list[bytes], dict[str, int]]:
    """What a reader gets while `handler` serves, and what the server counted."""
    with kv.serve_rebuilds([ns], handler) as server:
        got = read(kv, ns)
        poll_until(lambda: server.stats()["jobs"] == 1, WAIT_S, "the job has ended")
        return got, server.stats()


def test_what_is_not_sealed_is_when_the_handler_returns(kv: Client, ns: BoundNamespace) -> None:
    drop(kv, ns, keep=2)

    def handler(job: RebuildJob) -> None:
        for index in reversed(range(len(job))):  # in any order
            job[index][:] = payload(2 + index)

    got, stats = serve(kv, ns, handler)
    assert got == [payload(i) for i in range(N)]
    assert (stats["failed"], stats["blobs"], stats["tokens"]) == (0, 3, 3 * TOKENS)


def test_a_daemon_that_is_slow_to_answer_is_not_registered_with_twice(
    kv: Client, ns: BoundNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    ask = RebuildServer._next

    def late_once(server: RebuildServer, runner_id: int) -> Operation[Rebuild | None]:
        asked.append(runner_id)
        if len(asked) == 1:
            raise DeadlineExceeded("no answer in time")
        return ask(server, runner_id)

    monkeypatch.setattr(RebuildServer, "_next", late_once)
    monkeypatch.setattr(rebuilds, "RETRY_S", 0.0)
    with kv.serve_rebuilds([ns], lambda job: None):
        poll_until(lambda: len(asked) >= 2, WAIT_S, "it asks again")
        assert asked[0] == asked[1]
        assert kv.stats()["rebuild"]["runners"] == 1


def test_a_job_tells_what_it_is_about(kv: Client, ns: BoundNamespace) -> None:
    drop(kv, ns, keep=2)
    seen: list[RebuildJob] = []

    def handler(job: RebuildJob) -> None:
        seen.append(job)
        assert job.parent is not None
        assert [bytes(view) for view in job.parent] == [payload(0), payload(1)]
        for index in range(len(job)):
            job.parts(index)[0][:] = payload(2 + index)

    serve(kv, ns, handler)
    (job,) = seen
    assert job.namespace == ns
    assert (job.position, len(job), job.wanted) == (2 * TOKENS, 3, 3)
    assert job.tokens.tolist() == IDS[2 * TOKENS :].tolist()
    assert job.blob_tokens(1).tolist() == IDS[3 * TOKENS : 4 * TOKENS].tolist()
    assert job.context is not None
    assert job.context.tolist() == IDS[: 2 * TOKENS].tolist()
    assert list(job.context_keys) + list(job.keys) == list(ns.keys(IDS))
    assert 0 < job.deadline_s <= WAIT_S


def test_a_root_has_no_context(kv: Client, ns: BoundNamespace) -> None:
    drop(kv, ns)
    seen: list[object] = []

    def handler(job: RebuildJob) -> None:
        seen.extend((job.parent, job.position, len(job.context_keys)))
        assert job.context is not None
        assert job.context.size == 0
        for index in range(len(job)):
            job[index][:] = payload(index)

    serve(kv, ns, handler)
    assert seen == [None, 0, 0]


def test_a_partial_last_blob_comes_back(kv: Client, ns: BoundNamespace) -> None:
    ids = IDS[: 2 * TOKENS + 3]
    keys = ns.keys(ids, tail=True)
    assert len(kv.put_from(ns, keys, [payload(i) for i in range(3)], token_ids=ids)) == 3
    kv.drop(ns, keys)
    sizes: list[int] = []

    def handler(job: RebuildJob) -> None:
        for index in range(len(job)):
            sizes.append(len(job.blob_tokens(index)))
            job[index][:] = payload(index)

    with kv.serve_rebuilds([ns], handler), kv.get(ns, keys) as lease:
        assert [bytes(view) for view in lease] == [payload(i) for i in range(3)]
    assert sizes == [TOKENS, TOKENS, 3]
    (tail,) = kv.stat(ns, keys[2:])
    assert tail["tokens"] == 3


def test_sealed_blobs_are_readable_before_the_job_ends(kv: Client, ns: BoundNamespace) -> None:
    drop(kv, ns)
    keys, found = ns.keys(IDS), list[int]()

    def handler(job: RebuildJob) -> None:
        for index in range(len(job)):
            job[index][:] = payload(index)
            job.seal(index)
            job.seal(index)  # again is harmless
            found.append(kv.match(ns, keys).blobs)

    serve(kv, ns, handler)
    assert found == [1, 2, 3, 4, 5]


def test_misuse_is_the_handlers_failure(
    kv: Client, ns: BoundNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    drop(kv, ns)
    wrong: list[str] = []

    def handler(job: RebuildJob) -> None:
        with pytest.raises(InvalidRequest, match="was not written"):
            job.seal(0)
        job[0][:] = payload(0)
        job.seal(0)
        for misuse in (lambda: job[0], lambda: job[N], lambda: job.seal(2)):
            try:
                misuse()
            except (InvalidRequest, IndexError) as error:
                wrong.append(str(error))
        raise RuntimeError("out of order")

    with caplog.at_level(logging.WARNING, "blobstore.clients"):
        got, stats = serve(kv, ns, handler)
    assert len(wrong) == 3
    assert got == [payload(0)]
    assert stats["failed"] == 1
    assert "out of order" in caplog.text


def test_a_server_may_be_closed_while_its_handler_works(kv: Client, ns: BoundNamespace) -> None:
    drop(kv, ns)
    began, go = threading.Event(), threading.Event()

    def handler(job: RebuildJob) -> None:
        began.set()
        assert go.wait(WAIT_S)
        assert job.wanted == 0

    server = kv.serve_rebuilds([ns], handler)
    reading = threading.Thread(target=read, args=(kv, ns))
    reading.start()
    assert began.wait(WAIT_S)
    closing = threading.Thread(target=server.close)
    closing.start()
    reading.join(WAIT_S)
    assert not reading.is_alive()
    go.set()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    server.close()


def test_who_can_be_no_runner_is_refused(kv: Client, ns: BoundNamespace) -> None:
    group = LayerGroup("attention", layers=2, heads=2, head_size=8, dtype="bf16")
    grouped = KVLayout((group,), head_groups=2)
    with pytest.raises(InvalidRequest, match="namespaces"):
        kv.serve_rebuilds([], lambda job: None)
    sharded = kv.namespace(Namespace("m", grouped), shard=Shard(0, 2))
    with pytest.raises(InvalidRequest, match="whole blobs"):
        kv.serve_rebuilds([sharded], lambda job: None)


async def test_coroutines_write_what_is_lent_ahead(served: ServedStore) -> None:
    async with AsyncClient(served.address, timeout_s=WAIT_S) as kv:
        # Of half of DRAM a quarter is lent to a job: two blobs of 1 MiB.
        large = Namespace("m", KVLayout.opaque(1 << 20), tokens_per_blob=TOKENS)
        ns = await kv.namespace(large, terms=Terms(recall="rebuild"))
        keys, payloads = ns.keys(IDS), [payload(i) * 256 for i in range(N)]
        await kv.put_from(ns, keys, payloads, token_ids=IDS)
        await kv.drop(ns, keys)
        ahead: list[int] = []

        async def handler(job: AsyncRebuildJob) -> None:
            with pytest.raises(InvalidRequest, match="not lent yet"):
                job[2]
            for index in range(len(job)):
                ahead.append(job.ahead)
                job[index][:] = payloads[index]
                await job.seal(index)

        async with await kv.serve_rebuilds([ns], handler), kv.get(ns, keys) as lease:
            assert [bytes(view) for view in lease] == payloads
        assert ahead == [2, 2, 2, 2, 1]

"""Two runners make the same blobs with bytes that differ: one falls silent, comes back, and seals.

As a program this is such a runner, which does each step when told to:

    python -m tests.process.test_rebuild_races ADDRESS VERSION
"""

from __future__ import annotations

import json
import queue
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from blobstore.clients import BoundNamespace, Client, RebuildJob, Terms
from blobstore.clients.rebuild_job import RebuildStopped
from tests.support.daemon import Daemon, daemon
from tests.support.polling import poll_until
from tests.support.program import Program, say
from tests.support.rebuild_runner import (
    NAMESPACE,
    TOKENS,
    ids_of,
    payload_of,
    put_and_drop,
    read,
    rebuilds,
)

WAIT_S = 30.0
N = 4
N_READERS = 4
IDS = ids_of(N)
END = ["end", 0]


def version_of(payload: bytes, version: int) -> bytes:
    """As another GPU might compute it; version 0 is what was put."""
    return payload[version:] + payload[:version]


def told_runner(address: str, version: int) -> None:
    """Be the runner: "write" and "seal" blobs of a job as told, and say what became of it."""
    told = queue.SimpleQueue[list[object]]()

    def handle(job: RebuildJob) -> None:
        assert job.context is not None
        ids = np.concatenate([job.context, job.tokens])
        say({"job": len(job)})
        for verb, index in iter(told.get, END):
            assert isinstance(index, int)
            if verb == "write":
                start = job.position + index * TOKENS
                payload = payload_of(ids[:start], job.blob_tokens(index))
                job[index][:] = version_of(payload, version)
                say("written")
                continue
            try:
                job.seal(index)
            except RebuildStopped as error:
                say(error.why)
                raise
            say("sealed")

    with (
        Client(address, timeout_s=WAIT_S) as kv,
        kv.serve_rebuilds([kv.namespace(NAMESPACE)], handle),
    ):
        say("ready")
        for line in sys.stdin:
            told.put(json.loads(line))


@contextmanager
def runner(run: Daemon, version: int) -> Iterator[Program]:
    with Program("tests.process.test_rebuild_races", run.address, version) as program:
        assert program.hear() == "ready"
        yield program


def made(program: Program, index: int) -> str:
    """Have it write and seal a blob; what became of that."""
    assert program.ask(["write", index]) == "written"
    return str(program.ask(["seal", index]))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Daemon]:
    with daemon(tmp_path, environ={"BLOBSTORE__TIERING__POLICY": "lru"}) as run:
        yield run


@pytest.fixture
def kv(run: Daemon) -> Iterator[Client]:
    with Client(run.address, timeout_s=WAIT_S) as kv:
        yield kv


Reads = list[Future[tuple[list[bytes], str]]]


@pytest.fixture
def readers() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(N_READERS) as readers:
        yield readers


@contextmanager
def race(
    run: Daemon, kv: Client, ns: BoundNamespace, readers: ThreadPoolExecutor, versions: list[int]
) -> Iterator[tuple[Program, Program, Reads]]:
    """The first has written two blobs and falls silent; the second, which has its job, wrote one.

    When it begins all readers wait, and both go on.
    """
    with runner(run, versions[0]) as first:
        reads = [readers.submit(read, kv, ns, IDS) for _ in range(N_READERS)]
        assert first.hear() == {"job": N}
        for index in range(2):
            assert first.ask(["write", index]) == "written"
        with runner(run, versions[1]) as second:
            first.signal(signal.SIGSTOP)
            assert second.hear() == {"job": N}
            first.signal(signal.SIGCONT)
            assert second.ask(["write", 0]) == "written"
            assert rebuilds(kv)["waiting"] == N_READERS
            yield first, second, reads
            for program in (first, second):
                program.tell(END)
            poll_until(lambda: rebuilds(kv)["jobs"] == 0, WAIT_S, "the job is over")
            poll_until(lambda: kv.stats()["lent_bytes"] == 0, WAIT_S, "nothing is lent")
    assert kv.verify()["corrupt"] == []


def counted(kv: Client) -> tuple[dict[str, int], dict[str, int]]:
    """What became of blobs that runners sealed, and how many were not those of before."""
    counters = kv.stats()["counters"]
    return counters["rebuilt_blobs"], counters["diverged_blobs"]


def test_whichever_runner_seals_a_blob_first_is_the_one_all_readers_get(
    run: Daemon, kv: Client, readers: ThreadPoolExecutor
) -> None:
    ns = kv.namespace(NAMESPACE, terms=Terms(recall="rebuild", divergence="accept"))
    put = put_and_drop(kv, ns, IDS)
    with race(run, kv, ns, readers, [1, 2]) as (late, second, reads):
        assert second.ask(["seal", 0]) == "sealed"
        assert late.ask(["seal", 0]) == "sealed", "though others were first"
        assert late.ask(["seal", 1]) == "sealed"
        assert made(second, 1) == "sealed", "though others were first"
        assert late.ask(["write", 2]) == "written"
        assert made(second, 2) == "sealed"
        assert late.ask(["seal", 2]) == "sealed", "though others were first"
        assert made(second, 3) == "sealed"
        won = [version_of(*each) for each in zip(put, [2, 1, 2, 2], strict=True)]
        assert [each.result(WAIT_S) for each in reads] == [(won, "")] * N_READERS
    assert counted(kv) == ({"stored": 4, "divergent": 3}, {"accept": 4})
    assert rebuilds(kv)["ended"] == {"made": 1}
    assert read(kv, ns, IDS) == (won, "")


def test_a_strict_service_gets_the_bytes_of_before_whoever_seals_others_meanwhile(
    run: Daemon, kv: Client, readers: ThreadPoolExecutor
) -> None:
    ns = kv.namespace(NAMESPACE, terms=Terms(recall="rebuild", divergence="reject"))
    put = put_and_drop(kv, ns, IDS)
    with race(run, kv, ns, readers, [1, 0]) as (late, second, reads):
        assert second.ask(["seal", 0]) == "sealed"
        assert late.ask(["seal", 0]) == "sealed", "though others were first"
        assert late.ask(["seal", 1]) == "divergent"
        for index in range(1, N):
            assert made(second, index) == "sealed"
        assert [each.result(WAIT_S) for each in reads] == [(put, "")] * N_READERS
    assert counted(kv) == ({"stored": 4, "divergent": 1, "refused": 1}, {"reject": 1})
    assert rebuilds(kv)["ended"] == {"made": 1}
    assert read(kv, ns, IDS) == (put, "")


def test_what_a_late_runner_makes_as_before_is_kept_though_the_readers_have_their_miss(
    run: Daemon, kv: Client, readers: ThreadPoolExecutor
) -> None:
    ns = kv.namespace(NAMESPACE, terms=Terms(recall="rebuild", divergence="reject"))
    put = put_and_drop(kv, ns, IDS)
    with race(run, kv, ns, readers, [0, 1]) as (late, second, reads):
        assert second.ask(["seal", 0]) == "divergent"
        assert [each.result(WAIT_S) for each in reads] == [([], "divergent")] * N_READERS
        assert late.ask(["seal", 0]) == "sealed"
    assert read(kv, ns, IDS)[0] == put[:2], "what it had written it sealed at its end"
    assert counted(kv) == ({"refused": 1, "stored": 2}, {"reject": 1})


if __name__ == "__main__":
    told_runner(sys.argv[1], int(sys.argv[2]))

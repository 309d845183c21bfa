"""Runners that are not on the node: jobs are posted to them, and blobs put back over HTTP."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from blobstore import rebuilds
from blobstore.clients import BoundNamespace, Client, Terms
from blobstore.http.door import DoorTerms, HttpDoor
from blobstore.http.tokens import load
from tests.support.daemon import Daemon
from tests.support.http_daemon import Answer, HttpDaemon, http_daemon
from tests.support.polling import poll_until
from tests.support.rebuild_runner import (
    NAMESPACE,
    NBYTES,
    TOKENS,
    ids_of,
    payload_of,
    put_and_drop,
    read,
)
from tests.support.served_store import served_store

WAIT_S = 30.0
OTHER = dataclasses.replace(NAMESPACE, model="other")
ONE = f"/v1/namespaces/{NAMESPACE.id.hex()}"

Answering = Callable[[dict[str, Any]], int]


class Elsewhere:
    """An HTTP server that is a runner: `answering` does a job, and gives the status."""

    def __init__(self, answering: Answering) -> None:
        self.jobs: list[dict[str, Any]] = []
        self.cookies: list[str] = []
        """That came with jobs."""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                job = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.jobs.append(job)
                outer.cookies += self.headers.get_all("Cookie", [])
                status = answering(job)
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", "/elsewhere")
                self.send_header("Set-Cookie", f"job{job['job']}=1")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/jobs"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def door(tmp_path: Path) -> Iterator[HttpDaemon]:
    with http_daemon(tmp_path) as door:
        yield door


@pytest.fixture
def kv(door: HttpDaemon) -> Iterator[Client]:
    with Client(door.run.address, timeout_s=WAIT_S) as kv:
        yield kv


@pytest.fixture
def ns(kv: Client) -> BoundNamespace:
    return kv.namespace(NAMESPACE, terms=Terms(recall="rebuild"))


@pytest.fixture
def elsewhere() -> Iterator[Callable[[Answering], Elsewhere]]:
    servers: list[Elsewhere] = []

    def start(answering: Answering) -> Elsewhere:
        servers.append(Elsewhere(answering))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def putting(door: HttpDaemon, n_blobs: int | None = None, status: int = 200) -> Answering:
    """Computes the blobs of a job, or its first few, and puts them."""

    def answer(job: dict[str, Any]) -> int:
        ids = np.array([*job["context_token_ids"], *job["token_ids"]], np.uint32)
        parent = job["parent"]
        for index, key in enumerate(job["keys"][:n_blobs]):
            start = job["position"] + index * TOKENS
            payload = payload_of(ids[:start], ids[start : start + TOKENS])
            query = f"job={job['job']}" + (f"&parent={parent}" if parent else "")
            put = door.ask("PUT", f"{ONE}/blobs/{key}?{query}", payload)
            assert put.status == 201, put.body
            parent = key
        return status

    return answer


def test_a_runner_elsewhere_puts_what_it_computed(
    door: HttpDaemon, kv: Client, ns: BoundNamespace, elsewhere: Callable[[Answering], Elsewhere]
) -> None:
    ids = ids_of(6)
    payloads = put_and_drop(kv, ns, ids, keep=2)
    server = elsewhere(putting(door))
    registered = door.post(f"{ONE}/rebuilders", {"url": server.url, "blob_bytes": NBYTES})
    assert (registered.status, registered.json["ttl_s"]) == (200, 600.0)
    assert read(kv, ns, ids) == (payloads, "")
    (job,) = server.jobs
    assert job["namespace"] == NAMESPACE.id.hex()
    assert job["token_ids"] == ids[2 * TOKENS :].tolist()
    assert job["context_token_ids"] == ids[: 2 * TOKENS].tolist()
    assert job["context_keys"] == [key.hex() for key in ns.keys(ids)[:2]]
    assert 0 < job["deadline_s"] <= WAIT_S
    poll_until(lambda: kv.stats()["rebuild"]["ended"] == {"made": 1}, WAIT_S, "it said so")
    again = door.post(f"{ONE}/rebuilders", {"url": server.url, "ttl_s": 60})
    assert again.json["runner"] == registered.json["runner"]
    door.post(f"{ONE}/rebuilders", {"url": server.url, "ttl_s": 0})
    assert kv.stats()["rebuild"]["runners"] == 0


@pytest.mark.parametrize("status", [302, 404, 500])
def test_a_runner_that_refuses_is_a_miss(
    status: int,
    door: HttpDaemon,
    kv: Client,
    ns: BoundNamespace,
    elsewhere: Callable[[Answering], Elsewhere],
) -> None:
    ids = ids_of(3)
    put_and_drop(kv, ns, ids)
    server = elsewhere(lambda job: status)
    door.post(f"{ONE}/rebuilders", {"url": server.url})
    payloads, reason = read(kv, ns, ids)
    assert (payloads, bool(reason), len(server.jobs)) == ([], True, 1)


def test_a_runner_that_puts_nothing_has_failed(
    door: HttpDaemon, kv: Client, ns: BoundNamespace, elsewhere: Callable[[Answering], Elsewhere]
) -> None:
    ids = ids_of(3)
    put_and_drop(kv, ns, ids)
    server = elsewhere(lambda job: 200)
    door.post(f"{ONE}/rebuilders", {"url": server.url})
    assert read(kv, ns, ids)[0] == []
    assert kv.stats()["rebuild"]["blobs"] == 0


@pytest.mark.parametrize("chunked", [False, True], ids=["of a known length", "chunked"])
@pytest.mark.parametrize(("nbytes", "status"), [(0, 400), (NBYTES - 1, 400), (NBYTES + 1, 413)])
def test_a_payload_of_a_wrong_size_is_refused_and_the_reader_has_its_miss(
    nbytes: int,
    status: int,
    chunked: bool,
    door: HttpDaemon,
    kv: Client,
    ns: BoundNamespace,
    elsewhere: Callable[[Answering], Elsewhere],
) -> None:
    payloads = put_and_drop(kv, ns, ids_of(2))
    answers: list[Answer] = []

    def wrong(job: dict[str, Any]) -> int:
        payload = bytes(nbytes)
        put = f"{ONE}/blobs/{job['keys'][0]}?job={job['job']}"
        answers.append(door.ask("PUT", put, iter([payload]) if chunked else payload))
        return 200  # as if all were well

    server = elsewhere(wrong)
    door.post(f"{ONE}/rebuilders", {"url": server.url})
    assert read(kv, ns, ids_of(2)) == ([], "incomplete")
    (answer,) = answers
    assert (answer.status, answer.error) == (status, "size_mismatch")
    assert f"has {NBYTES} bytes, found" in answer.json["message"]
    poll_until(door.nothing_is_lent, WAIT_S)
    door.post(f"{ONE}/rebuilders", {"url": server.url, "ttl_s": 0})
    door.post(f"{ONE}/rebuilders", {"url": elsewhere(putting(door)).url})
    assert read(kv, ns, ids_of(2)) == (payloads, "")


@pytest.mark.parametrize("n_put", [0, 1])
@pytest.mark.parametrize("status", [500, 200])
def test_what_one_runner_failed_to_make_another_makes(
    n_put: int,
    status: int,
    door: HttpDaemon,
    kv: Client,
    ns: BoundNamespace,
    elsewhere: Callable[[Answering], Elsewhere],
) -> None:
    payloads = put_and_drop(kv, ns, ids_of(3))
    other, fail = elsewhere(putting(door)), putting(door, n_put, status)

    def failing(job: dict[str, Any]) -> int:
        """The other one is there from now on: this is the one that has the job."""
        assert door.post(f"{ONE}/rebuilders", {"url": other.url}).status == 200
        return fail(job)

    server = elsewhere(failing)
    door.post(f"{ONE}/rebuilders", {"url": server.url})
    assert read(kv, ns, ids_of(3)) == (payloads, "")
    assert (len(server.jobs), [job["position"] for job in other.jobs]) == (1, [n_put * TOKENS])
    poll_until(lambda: kv.stats()["rebuild"]["ended"] == {"made": 1}, WAIT_S, "one job in all")


@contextmanager
def own_door(path: Path) -> Iterator[HttpDaemon]:
    """That of a store in this process, which has a local one too."""
    with served_store(path) as served:
        data = path.parent / "data"
        terms = DoorTerms(("127.0.0.1", 0), load(data, None))
        made = served.call(lambda store: HttpDoor(store, terms))

        def run(steps: Callable[[], Coroutine[Any, Any, None]]) -> None:
            task = served.call(lambda store: asyncio.get_running_loop().create_task(steps()))
            poll_until(task.done, WAIT_S)
            task.result()

        run(made.start)
        try:
            said = SimpleNamespace(said=f"ready: {made.address}", data=data)
            yield HttpDaemon(cast("Daemon", said))
        finally:
            run(made.close)


def test_a_job_that_hangs_at_one_runner_is_made_by_another_once_it_is_late(
    tmp_path: Path,
    elsewhere: Callable[[Answering], Elsewhere],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, hung = tmp_path / "b.sock", threading.Event()
    with own_door(path) as door, Client(f"unix:{path}", timeout_s=WAIT_S) as kv:
        ns = kv.namespace(NAMESPACE, terms=Terms(recall="rebuild"))
        payloads = put_and_drop(kv, ns, ids_of(3))
        other, usual_s = elsewhere(putting(door)), rebuilds.JOB_S_UNKNOWN

        def hanging(job: dict[str, Any]) -> int:
            monkeypatch.setattr(rebuilds, "JOB_S_UNKNOWN", usual_s)
            assert door.post(f"{ONE}/rebuilders", {"url": other.url}).status == 200
            return 500 + hung.wait(WAIT_S)

        server = elsewhere(hanging)
        monkeypatch.setattr(rebuilds, "JOB_S_UNKNOWN", 2.0)
        door.post(f"{ONE}/rebuilders", {"url": server.url})
        try:
            assert read(kv, ns, ids_of(3)) == (payloads, "")
            assert (len(server.jobs), len(other.jobs)) == (1, 1)
        finally:
            hung.set()
        poll_until(lambda: kv.stats()["rebuild"]["ended"] == {"made": 1}, WAIT_S)


def test_a_runner_that_hangs_and_is_taken_out_is_followed_by_another_at_once(
    door: HttpDaemon, kv: Client, ns: BoundNamespace, elsewhere: Callable[[Answering], Elsewhere]
) -> None:
    payloads, hung = put_and_drop(kv, ns, ids_of(3)), threading.Event()
    other = elsewhere(putting(door))
    server = elsewhere(lambda job: 500 + hung.wait(WAIT_S))
    door.post(f"{ONE}/rebuilders", {"url": server.url})
    with ThreadPoolExecutor(1) as readers:
        reading = readers.submit(read, kv, ns, ids_of(3))
        try:
            poll_until(lambda: server.jobs, WAIT_S, "it has the job")
            door.post(f"{ONE}/rebuilders", {"url": other.url})
            door.post(f"{ONE}/rebuilders", {"url": server.url, "ttl_s": 0})
            assert reading.result(WAIT_S / 2) == (payloads, "")
        finally:
            hung.set()
    assert (len(server.jobs), len(other.jobs)) == (1, 1)


def test_a_daemon_killed_while_a_runner_elsewhere_works_has_the_text_when_it_is_back(
    tmp_path: Path, elsewhere: Callable[[Answering], Elsewhere]
) -> None:
    ids, begun, killed = ids_of(4), threading.Event(), threading.Event()
    with (
        http_daemon(tmp_path) as door,
        Client(door.run.address, timeout_s=WAIT_S) as kv,
        ThreadPoolExecutor(1) as readers,
    ):
        ns = kv.namespace(NAMESPACE, terms=Terms(recall="rebuild"))
        payloads = put_and_drop(kv, ns, ids)
        poll_until(lambda: kv.stats()["texts"]["pending"] == 0, WAIT_S, "texts are on disk")
        begin = putting(door, 1)

        def working(job: dict[str, Any]) -> int:
            status = begin(job)
            begun.set()
            killed.wait(WAIT_S)
            return status

        server = elsewhere(working)
        try:
            door.post(f"{ONE}/rebuilders", {"url": server.url})
            reading = readers.submit(read, kv, ns, ids)
            assert begun.wait(WAIT_S)
            door.run.kill()
            got, reason = reading.result(WAIT_S)
            assert (got, bool(reason)) == (payloads[: len(got)], True)
        finally:
            killed.set()
    with http_daemon(tmp_path) as door, Client(door.run.address, timeout_s=WAIT_S) as kv:
        ns = kv.namespace(NAMESPACE, terms=Terms(recall="rebuild"))
        assert kv.stats()["texts"]["entries"] == 4
        n_kept = kv.match(ns, ns.keys(ids)).blobs
        assert n_kept <= 1, "of what was put again a crash may lose some"
        other = elsewhere(putting(door))
        door.post(f"{ONE}/rebuilders", {"url": other.url})
        assert read(kv, ns, ids) == (payloads, "")
        (job,) = other.jobs  # what was kept is on SSD, from where a rebuild need not begin
        assert job["position"] in (0, n_kept * TOKENS)
        assert len(server.jobs) == 1, "its registration went with the daemon"
        assert kv.verify()["corrupt"] == []


def test_what_runners_say_beside_their_answer_is_not_kept(
    door: HttpDaemon, kv: Client, ns: BoundNamespace, elsewhere: Callable[[Answering], Elsewhere]
) -> None:
    server = elsewhere(putting(door))
    door.post(f"{ONE}/rebuilders", {"url": server.url.replace("127.0.0.1", "localhost")})
    for seed in range(3):
        put_and_drop(kv, ns, ids_of(1, seed))
        assert read(kv, ns, ids_of(1, seed))[1] == ""
    assert (len(server.jobs), server.cookies) == (3, [])


def test_many_registrations_cost_others_nothing(door: HttpDaemon, ns: BoundNamespace) -> None:
    started_s = time.monotonic()
    for n in range(200):
        asked = {"url": f"http://127.0.0.1:1/{n}", "concurrency": 256}
        assert door.post(f"{ONE}/rebuilders", asked).status == 200
    assert door.ask("GET", "/v1/namespaces").status == 200
    assert time.monotonic() - started_s < 15.0


def test_a_runner_that_hangs_holds_up_no_other(
    door: HttpDaemon, kv: Client, ns: BoundNamespace, elsewhere: Callable[[Answering], Elsewhere]
) -> None:
    hung, other = threading.Event(), kv.namespace(OTHER, terms=Terms(recall="rebuild"))
    hanging = elsewhere(lambda job: 500 + hung.wait(WAIT_S))
    for n in range(8):  # of which each may be given so many at once
        door.post(f"{ONE}/rebuilders", {"url": f"{hanging.url}/{n}", "concurrency": 16})
    chains = [ids_of(1, seed) for seed in range(128)]
    for ids in chains:
        put_and_drop(kv, ns, ids)
    readers = [threading.Thread(target=read, args=(kv, ns, ids)) for ids in chains]
    try:
        for reader in readers:
            reader.start()
        poll_until(lambda: kv.stats()["rebuild"]["running"] == 128, WAIT_S, "all of them hang")
        server = elsewhere(lambda job: 500)
        door.post(f"/v1/namespaces/{OTHER.id.hex()}/rebuilders", {"url": server.url})
        put_and_drop(kv, other, ids_of(1))
        assert kv.get(other, other.keys(ids_of(1)), timeout_s=WAIT_S / 2).reason == "failed"
        assert len(server.jobs) == 1
    finally:
        hung.set()
        for n in range(8):
            door.post(f"{ONE}/rebuilders", {"url": f"{hanging.url}/{n}", "ttl_s": 0})
        for reader in readers:
            reader.join()


def test_no_log_holds_what_a_url_or_a_runner_says(
    door: HttpDaemon, kv: Client, ns: BoundNamespace
) -> None:
    put_and_drop(kv, ns, ids_of(1))
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/?token=in-the-url"
        door.post(f"{ONE}/rebuilders", {"url": url})
        reader = threading.Thread(target=read, args=(kv, ns, ids_of(1)))
        reader.start()
        with server.accept()[0] as peer:
            peer.recv(1 << 16)
            peer.sendall(b"no HTTP at all: in-the-answer\r\n\r\n")
        reader.join()
    log = door.run.said
    assert "a runner cannot be asked" in log
    assert "in-the" not in log


def test_nobody_at_the_address_is_a_miss(door: HttpDaemon, kv: Client, ns: BoundNamespace) -> None:
    ids = ids_of(3)
    put_and_drop(kv, ns, ids)
    door.post(f"{ONE}/rebuilders", {"url": "http://127.0.0.1:1/"})
    assert read(kv, ns, ids)[0] == []


@pytest.mark.parametrize(
    "body",
    [
        {"url": "ftp://host/"},
        {"url": "http:///path"},
        {"url": "http://user:secret@host/"},
        {"url": "file:///etc/passwd"},
        {"url": "http://host/", "ttl_s": 1},
        {"url": "http://host/", "ttl_s": 1e9},
        {"url": "http://host/", "concurrency": 0},
        {"url": "http://host/", "blob_bytes": NBYTES + 1},
        {"url": "http://host/" + "x" * 3000},
        {},
    ],
)
def test_bad_registrations_are_refused(
    body: dict[str, Any], door: HttpDaemon, kv: Client, ns: BoundNamespace
) -> None:
    refused = door.post(f"{ONE}/rebuilders", body)
    assert refused.status == 400
    assert kv.stats()["rebuild"]["runners"] == 0


def test_without_a_token_nobody_registers(door: HttpDaemon, ns: BoundNamespace) -> None:
    assert door.post(f"{ONE}/rebuilders", {"url": "http://host/"}, token=None).status == 401


def raw_server() -> socket.socket:
    """One that speaks no HTTP by itself."""
    server = socket.create_server(("127.0.0.1", 0))
    server.settimeout(WAIT_S)
    return server


def url_of(server: socket.socket) -> str:
    return f"http://127.0.0.1:{server.getsockname()[1]}/"


def take_job(server: socket.socket) -> tuple[socket.socket, dict[str, Any]]:
    """The connection of the next job, and the job."""
    peer = server.accept()[0]
    peer.settimeout(WAIT_S)
    with peer.makefile("rb") as request:
        headers = dict(
            line.split(b": ") for line in iter(request.readline, b"\r\n") if b":" in line
        )
        return peer, json.loads(request.read(int(headers[b"Content-Length"])))


def test_a_job_that_nobody_wants_any_more_is_cut_off(
    door: HttpDaemon, kv: Client, ns: BoundNamespace
) -> None:
    put_and_drop(kv, ns, ids_of(3))
    with raw_server() as server:
        door.post(f"{ONE}/rebuilders", {"url": url_of(server)})
        connection = door.connection()  # a reader who hangs up while the runner computes
        key = ns.keys(ids_of(3))[0].hex()
        connection.request("GET", f"{ONE}/blobs/{key}?timeout_s=60", headers=door.headers())
        peer, _ = take_job(server)
        with peer:
            connection.close()
            assert peer.recv(1) == b"", "the daemon hangs up"
        poll_until(lambda: kv.stats()["rebuild"]["jobs"] == 0, WAIT_S, "the job is over")
        assert kv.stats()["rebuild"]["ended"] == {"cancelled": 1}
        assert kv.stats()["rebuild"]["able"] == 1


def test_one_that_is_wanted_later_goes_on(
    door: HttpDaemon, kv: Client, ns: BoundNamespace, elsewhere: Callable[[Answering], Elsewhere]
) -> None:
    """A reader whose time is up leaves the result to others."""
    payloads = put_and_drop(kv, ns, ids_of(2))
    waiting = threading.Event()
    make = putting(door)
    server = elsewhere(lambda job: make(job) if waiting.wait(WAIT_S) else 500)
    door.post(f"{ONE}/rebuilders", {"url": server.url})
    with kv.get(ns, ns.keys(ids_of(2)), timeout_s=0.2) as lease:
        assert lease.reason == "deadline"
    poll_until(lambda: kv.stats()["rebuild"]["running"] == 1, WAIT_S)
    waiting.set()
    poll_until(lambda: kv.match(ns, ns.keys(ids_of(2))).blobs == 2, WAIT_S, "it was made")
    assert read(kv, ns, ids_of(2)) == (payloads, "")
    assert len(server.jobs) == 1


@pytest.mark.parametrize("head", [b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: y\r\n"])
def test_heads_without_end_cost_a_runner_its_job_and_others_nothing(
    head: bytes, door: HttpDaemon, kv: Client, ns: BoundNamespace
) -> None:
    put_and_drop(kv, ns, ids_of(1))
    stopped = threading.Event()

    def flood(peer: socket.socket) -> None:
        with peer, suppress(OSError):
            while not stopped.is_set():
                peer.sendall(head * 1000)

    with raw_server() as server:
        door.post(f"{ONE}/rebuilders", {"url": url_of(server)})
        with ThreadPoolExecutor(2) as threads:
            reading = threads.submit(read, kv, ns, ids_of(1))
            flooding = threads.submit(flood, take_job(server)[0])
            try:
                payloads, reason = reading.result(WAIT_S / 2)
                assert (payloads, reason) == ([], "failed")
                flooding.result(WAIT_S / 2)  # the daemon has hung up
            finally:
                stopped.set()


def test_an_answer_may_come_after_a_few_heads_and_in_pieces(
    door: HttpDaemon, kv: Client, ns: BoundNamespace
) -> None:
    payloads = put_and_drop(kv, ns, ids_of(1))
    with raw_server() as server:
        door.post(f"{ONE}/rebuilders", {"url": url_of(server)})
        with ThreadPoolExecutor(1) as threads:
            reading = threads.submit(read, kv, ns, ids_of(1))
            peer, job = take_job(server)
            with peer:
                peer.sendall(
                    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 102 Processing\r\nA: b\r\n\r\n"
                )
                blob = f"{ONE}/blobs/{job['keys'][0]}?job={job['job']}"
                assert door.ask("PUT", blob, payloads[0]).status == 201
                peer.sendall(b"HTTP/1.1 20")
                peer.sendall(b"0 OK\r\nContent-Length: 3\r\n\r\nabc")
            assert reading.result(WAIT_S) == (payloads, "")
    poll_until(lambda: kv.stats()["rebuild"]["ended"] == {"made": 1}, WAIT_S)

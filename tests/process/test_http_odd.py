"""Requests over HTTP that nobody should send: always a 4xx with a reason, never a 5xx."""

from __future__ import annotations

import json
import os
import random
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.http_daemon import (
    HttpDaemon,
    http_daemon,
    key,
    put,
)
from tests.support.polling import poll_until

BODY = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpDaemon]:
    """One daemon for all tests that leave it as it was."""
    with http_daemon(tmp_path_factory.mktemp("http")) as running:
        yield running
        assert running.nothing_is_lent()
        assert "Traceback" not in running.run.said


ODD = [
    "..%2f..%2fetc%2fpasswd", "%2e%2e", "%00", key(1).upper(), key(1)[:-1], "0" * 14,
    "0" * 130,
    f"sha256:{key(1)}", "0" * 10_000, "%f0%9f%98%80" * 8, "zz" * 32,
    "ab%20cd" * 4,
    key(1) + "%0a", "%20" + key(1)[1:], "\u0661".encode().hex() + "g", "ffff+fff" * 2,
    "*", "{key}",
]  # fmt: skip


@pytest.mark.parametrize("odd", ODD, ids=range(len(ODD)))
def test_odd_keys_are_refused_with_a_reason(door: HttpDaemon, odd: str) -> None:
    ns = door.declare(8, "odd")
    for method in ("GET", "PUT", "DELETE", "HEAD"):
        body = bytes(8) if method == "PUT" else None
        for path in (f"{ns}/blobs/{odd}", f"/v1/namespaces/{odd}/blobs/{key(1)}"):
            answer = door.ask(method, path, body)
            assert 400 <= answer.status < 500, (method, path, answer)
    for field in ("parent", "after"):
        method, path = ("PUT", f"/{key(1)}") if field == "parent" else ("GET", "")
        body = bytes(8) if method == "PUT" else None
        answer = door.ask(method, f"{ns}/blobs{path}?{field}={odd}", body)
        assert 400 <= answer.status < 500, (field, odd, answer)
    assert sorted(os.listdir(door.run.data)) == ["LOCK", "catalogue", "http.token", "segments"]


@pytest.mark.parametrize(
    "model", ["a/b", "../../etc/passwd", "me@here", "with space", "\U0001f600", "x" * 4096, "a\0b"]
)
def test_any_model_name_makes_a_namespace(door: HttpDaemon, model: str) -> None:
    ns = door.declare(8, model)
    assert put(door, f"{ns}/blobs/{key(1)}", bytes(8)).status in (200, 201)
    listed = door.ask("GET", "/v1/namespaces").json["namespaces"]
    assert model in [entry["model"] for entry in listed]


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b"3", b'"x"', b"{}", b'{"keys": []}', b'{"keys": [1]}',
        b'{"keys": "ab"}', b'{"keys": ["AB"]}', b'{"keys": [""]}', b'{"keys": ["\\ud800"]}',
        b'{"keys": ["00112233445566"]}', b'{"keys": ["0011223344556677", "001122334455667788"]}',
        b'{"keys": ["00 1122334455667 7"]}', b'{"keys": ["0011223344556677"], "more": 1}',
        b"\xff\xfe", b"[" * 100_000, b'{"keys": {"a": 1}}',
        b'{"keys": ["\\u0660' + b"0" * 15 + b'"]}',
    ],
)  # fmt: skip
def test_odd_bodies_are_refused(door: HttpDaemon, body: bytes) -> None:
    ns = door.declare(8, "odd")
    for verb in ("match", "exists", "stat", "prefetch", "pin", "drop", "forget"):
        answer = door.ask("POST", f"{ns}/{verb}", body, BODY)
        assert (answer.status, answer.error) == (400, "invalid_request"), (verb, answer)
    answer = door.ask("POST", "/v1/namespaces", body, BODY)
    assert (answer.status, answer.error) == (400, "invalid_request")
    encoded = {"Content-Type": "application/octet-stream"}
    assert door.ask("POST", "/v1/namespaces", body, encoded).status == 400
    assert door.ask("POST", f"{ns}/match", body, {"Content-Type": "text/plain"}).status == 415


@pytest.mark.parametrize(
    "changes",
    [
        {"opaque_bytes": -1}, {"opaque_bytes": 1 << 80}, {"opaque_bytes": 1.5}, {"model": ""},
        {"model": "x" * 4097}, {"tokens_per_blob": 0}, {"tokens_per_blob": 1 << 40}, {"salt": 3},
        {"revision": None}, {"other": 1}, {"opaque_bytes": 10**400},
    ],
)  # fmt: skip
def test_odd_namespaces_are_refused(door: HttpDaemon, changes: dict[str, object]) -> None:
    answer = door.post("/v1/namespaces", {"model": "m", "opaque_bytes": 8} | changes)
    assert (answer.status, answer.error) == (400, "invalid_request"), answer


@pytest.mark.parametrize("query", ["timeout_s=-1", "timeout_s=nan", "timeout_s=inf", "timeout_s=x"])
def test_odd_times_are_refused(door: HttpDaemon, query: str) -> None:
    ns = door.declare(8, "odd")
    for method in ("GET", "HEAD"):
        assert door.ask(method, f"{ns}/blobs/{key(1)}?{query}").status in (400, 404)
    assert door.ask("GET", f"{ns}/blobs/{key(1)}?{query}").status == 400
    for ttl in (-1, 1e300):
        assert door.post(f"{ns}/pin", {"keys": [key(1)], "ttl_s": ttl}).status == 400


def test_what_is_not_served(door: HttpDaemon) -> None:
    ns = door.declare(8, "odd")
    for method, path, status in (
        ("GET", "/nothing", 404), ("GET", "/v1", 404), ("POST", f"{ns}/blobs/{key(1)}", 405),
        ("PUT", f"{ns}/blobs/", 404), ("GET", f"{ns}/match", 405), ("PATCH", ns, 404),
        ("GET", "//etc/passwd", 404), ("GET", "/v1/namespaces/../../etc/passwd", 404),
    ):  # fmt: skip
        answer = door.ask(method, path)
        assert answer.status == status, (method, path, answer)
        assert answer.headers["content-type"] == "application/json"
    assert door.ask("GET", f"{ns}/match").headers["allow"] == "POST"


@pytest.mark.parametrize(
    "sent",
    [
        b"\0" * 100, b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00" * 9,
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nA: " + b"a" * 20_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"A: a\r\n" * 1000 + b"\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
)  # fmt: skip
def test_what_is_no_request_is_refused_and_logged_in_no_detail(
    door: HttpDaemon, sent: bytes
) -> None:
    with door.connect() as peer:
        peer.sendall(sent)
        said = peer.recv(65536)
        assert said.startswith(b"HTTP/1.")
        head, _, body = said.partition(b"\r\n\r\n")
        assert b"aiohttp" not in said
        assert b"Server: blobstore" in head
        assert json.loads(body)["error"] in ("invalid_request", "not_found")
        assert sent[-40:-4] not in body
    assert door.ask("GET", "/healthz", token=None).status == 200
    assert "Traceback" not in door.run.said


CHUNKED = b"5\r\nhello\r\n0\r\n\r\n"


@pytest.mark.parametrize("coding", ["gzip, chunked", "deflate,chunked", "x, chunked"])
def test_bodies_in_codings_that_would_be_stored_are_refused(door: HttpDaemon, coding: str) -> None:
    path = f"{door.declare(5, 'coded')}/blobs/{key(coding)}"
    for method, where in (("PUT", path), ("POST", "/v1/namespaces")):
        with door.connect() as peer:
            peer.sendall(
                door.head_of(method, where, BODY | {"Transfer-Encoding": coding}) + CHUNKED
            )
            said = peer.recv(65536)
            assert said.startswith((b"HTTP/1.1 415 ", b"HTTP/1.0 400 ")), said
    assert door.ask("HEAD", path).status == 404


def test_encodings_named_twice_are_refused(door: HttpDaemon) -> None:
    path = f"{door.declare(5, 'coded')}/blobs/{key('twice')}"
    twice = "identity\r\nContent-Encoding: gzip"
    head = door.head_of("PUT", path, {"Content-Length": "5", "Content-Encoding": twice})
    with door.connect() as peer:
        peer.sendall(head + b"hello")
        assert peer.recv(65536).startswith(b"HTTP/1.1 415 ")


@pytest.mark.parametrize(
    "query", ["parnet=x", "Parent=x", "parent", "tokens=256&tokens=256", "retention=durable&x="]
)
def test_a_misspelt_query_is_refused_not_ignored(door: HttpDaemon, query: str) -> None:
    path = f"{door.declare(8, 'query')}/blobs/{key(query)}"
    query = query.replace("parent", f"parent={key(1)}&parent={key(2)}")
    answer = door.ask("PUT", f"{path}?{query}", bytes(8))
    assert (answer.status, answer.error) == (400, "invalid_request"), answer
    assert "known are job, parent, retention, timeout_s, tokens" in answer.json["message"]
    assert door.ask("HEAD", path).status == 404
    assert door.ask("GET", "/v1/stats?x=1").status == 400
    assert door.ask("GET", "/healthz?now=1", token=None).status == 200
    assert door.ask("GET", "/?x=1", token=None).status == 200


def test_what_is_not_served_says_what_is(door: HttpDaemon) -> None:
    assert "/openapi.json" in door.ask("GET", "/v2").json["message"]
    ns = door.declare(8, "odd")
    assert "for POST" in door.ask("GET", f"{ns}/match").json["message"]


def test_an_answer_ends_its_line(door: HttpDaemon) -> None:
    for path in ("/healthz", "/v1/stats", "/v1/namespaces", "/nothing"):
        assert door.ask("GET", path).body.endswith(b"}\n")


def test_mutated_requests_harm_nobody(tmp_path: Path) -> None:
    numbers = random.Random(20)
    with http_daemon(tmp_path, environ={"BLOBSTORE__HTTP__IO_TIMEOUT_S": "2"}) as door:
        ns = door.declare(64)
        path = f"{ns}/blobs/{key(1)}"
        sound = bytes(range(64))
        assert put(door, path, sound).status == 201
        seeds = [
            door.head_of("PUT", path, {"Content-Length": "64"}) + sound,
            door.head_of("PUT", path, {"Transfer-Encoding": "chunked"}) + b"40\r\n" + sound,
            door.head_of("GET", path, {"Range": "bytes=3-9", "If-None-Match": '"x"'}),
            door.head_of("POST", f"{ns}/match", BODY | {"Content-Length": "2"}) + b"{}",
        ]
        for turn in range(1000):
            request = bytearray(numbers.choice(seeds))
            for _ in range(numbers.randrange(1, 4)):
                at = numbers.randrange(len(request))
                request[at : at + numbers.choice((0, 1, 1, 8))] = numbers.randbytes(
                    numbers.choice((0, 1, 1, 30))
                )
            with door.connect() as peer, suppress(OSError):
                peer.sendall(request)
                if turn % 2:
                    peer.shutdown(socket.SHUT_WR)
                peer.settimeout(0.05)  # for those that wait for more
                answer = peer.recv(65536)
                assert not answer.startswith(b"HTTP/1.1 5"), (request, answer)
        poll_until(door.nothing_is_lent, 10.0)
        assert door.ask("GET", path).body == sound
        assert "Traceback" not in door.run.said

"""The HTTP door of a real daemon: blobs in and out, ranges, conditions, verbs."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import os
import re
import shutil
import socket
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from blobstore.clients import KVLayout, LayerGroup, Namespace
from blobstore.http.tokens import FILE_NAME
from blobstore.units import MIB
from tests.support.http_daemon import (
    Answer,
    HttpDaemon,
    ask_over,
    http_daemon,
    key,
    pattern,
    put,
)
from tests.support.polling import poll_until

N = 3 * MIB + 17
DATA = pattern(N)
BODY = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpDaemon]:
    """One daemon for all tests that leave it as it was."""
    with http_daemon(tmp_path_factory.mktemp("http")) as running:
        yield running
        assert running.nothing_is_lent()
        assert "Traceback" not in running.run.said


def repr_digest(data: bytes) -> str:
    return f"sha-256=:{base64.b64encode(hashlib.sha256(data).digest()).decode()}:"


def test_a_blob_comes_back_as_it_was_put(door: HttpDaemon) -> None:
    ns = door.declare(N, "round-trip")
    path = f"{ns}/blobs/{key(1)}"
    answer = put(door, path, DATA, Repr_Digest=repr_digest(DATA))
    assert (answer.status, answer.json) == (201, {"result": "stored"})
    answer = door.ask("GET", path)
    assert (answer.status, answer.body == DATA) == (200, True)
    assert answer.headers["content-length"] == str(N)
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["accept-ranges"] == "bytes"
    assert answer.headers["x-blobstore-tier"] == "dram"
    (facts,) = door.post(f"{ns}/stat", {"keys": [key(1)]}).json["blobs"]
    assert answer.headers["etag"] == f'"{facts["digest"]}"'


def test_head_tells_what_get_would(door: HttpDaemon) -> None:
    ns = door.declare(N, "head")
    path = f"{ns}/blobs/{key(1)}"
    put(door, path, DATA)
    got, head = door.ask("GET", path), door.ask("HEAD", path)
    assert (head.status, head.body) == (200, b"")
    for headers in (got.headers, head.headers):
        headers.pop("date")
    assert got.headers == head.headers


def test_the_same_again_exists_and_other_bytes_are_divergent(door: HttpDaemon) -> None:
    ns = door.declare(N, "again")
    path = f"{ns}/blobs/{key(1)}"
    put(door, path, DATA)
    answer = put(door, path, DATA)
    assert (answer.status, answer.json) == (200, {"result": "exists"})
    answer = put(door, path, b"\xff" + DATA[1:])
    assert (answer.status, answer.error, answer.json["result"]) == (409, *["divergent"] * 2)
    assert door.ask("GET", path).body == DATA


def test_an_empty_blob_is_not_a_miss(door: HttpDaemon) -> None:
    ns = door.declare(0, "empty")
    path = f"{ns}/blobs/{key(1)}"
    assert door.ask("HEAD", path).status == 404
    assert put(door, path, b"").status == 201
    head = door.ask("HEAD", path)
    assert (head.status, head.headers["content-length"]) == (200, "0")
    assert door.ask("GET", path).body == b""
    assert door.ask("GET", path, headers={"Range": "bytes=0-"}).status == 416
    assert put(door, path, b"x").status == 413


def test_a_miss_says_why(door: HttpDaemon) -> None:
    ns = door.declare(N, "miss")
    answer = door.ask("GET", f"{ns}/blobs/{key(1)}")
    assert (answer.status, answer.error, answer.json["reason"]) == (404, "miss", "absent")
    head = door.ask("HEAD", f"{ns}/blobs/{key(1)}")
    assert (head.status, head.headers["x-blobstore-reason"]) == (404, "absent")


def test_a_body_in_chunks_is_counted(door: HttpDaemon) -> None:
    ns = door.declare(N, "chunked")

    def sent(data: bytes, number: int) -> Answer:
        pieces = iter([data[:5], data[5 : MIB + 1], data[MIB + 1 :]])
        return door.ask("PUT", f"{ns}/blobs/{key(number)}", pieces)

    assert sent(DATA, 1).status == 201
    assert door.ask("GET", f"{ns}/blobs/{key(1)}").body == DATA
    short, long = sent(DATA[:-1], 2), sent(DATA + b"x", 3)
    assert (short.status, short.error) == (400, "size_mismatch")
    assert (long.status, long.error) == (413, "size_mismatch")
    assert door.post(f"{ns}/exists", {"keys": [key(2), key(3)]}).json == {"held": [False, False]}


def test_a_tail_is_shorter_and_says_its_tokens(door: HttpDaemon) -> None:
    namespace = _layered("tail")
    ns = f"/v1/namespaces/{_declare_encoded(door, namespace)}"
    full, tail = namespace.nbytes, namespace.layout.nbytes(3)
    assert put(door, f"{ns}/blobs/{key(1)}", bytes(full)).status == 201
    path = f"{ns}/blobs/{key(2)}?parent={key(1)}"
    assert put(door, path, bytes(tail)).status == 400
    assert put(door, f"{path}&tokens=3", bytes(tail)).status == 201
    got = door.ask("GET", f"{ns}/blobs/{key(2)}")
    assert (got.headers["x-blobstore-tokens"], len(got.body)) == ("3", tail)
    matched = door.post(f"{ns}/match", {"keys": [key(1), key(2)], "tail_tokens": 3}).json
    assert (matched["blobs"], matched["tokens"]) == (2, 16 + 3)
    for wrong in ("0", "17", "x", "-1", "1e9", "9" * 30):
        assert put(door, f"{path}&tokens={wrong}", bytes(tail)).status == 400


def _layered(model: str) -> Namespace:
    group = LayerGroup.attention(layers=2, heads=2, head_size=8, dtype="bf16")
    return Namespace(model=model, layout=KVLayout((group,)), tokens_per_blob=16)


def _declare_encoded(door: HttpDaemon, namespace: Namespace) -> str:
    headers = {"Content-Type": "application/octet-stream"}
    answer = door.ask("POST", "/v1/namespaces", namespace.encode(), headers)
    assert answer.json["id"] == namespace.id.hex()
    return str(answer.json["id"])


def test_an_orphan_is_refused_before_its_body(door: HttpDaemon) -> None:
    ns = door.declare(N, "orphan")
    path = f"{ns}/blobs/{key(2)}?parent={key(1)}"
    with door.connect() as peer:
        head = door.head_of("PUT", path, {"Content-Length": str(N), "Expect": "100-continue"})
        peer.sendall(head)
        assert peer.recv(65536).startswith(b"HTTP/1.1 409 ")
    put(door, f"{ns}/blobs/{key(1)}", DATA)
    assert put(door, path, DATA).status == 201
    assert door.post(f"{ns}/match", {"keys": [key(1), key(2)]}).json["blobs"] == 2


@pytest.mark.parametrize(
    ("header", "start", "end"),
    [
        ("bytes=0-0", 0, 1),
        (f"bytes={N - 1}-", N - 1, N),
        (f"bytes={N - 1}-{N + 5}", N - 1, N),
        ("bytes=-1", N - 1, N),
        (f"bytes=-{N + 1}", 0, N),
        (f"bytes={MIB - 1}-{MIB}", MIB - 1, MIB + 1),
        (f"bytes=3-{2 * MIB + 4}", 3, 2 * MIB + 5),
    ],
)
def test_a_range_is_exact(door: HttpDaemon, header: str, start: int, end: int) -> None:
    path = f"{door.declare(N, 'range')}/blobs/{key(1)}"
    put(door, path, DATA)
    answer = door.ask("GET", path, headers={"Range": header})
    assert answer.status == 206
    assert answer.headers["content-range"] == f"bytes {start}-{end - 1}/{N}"
    assert answer.headers["content-length"] == str(end - start)
    assert answer.body == DATA[start:end]


def test_ranges_that_are_none_and_that_cannot_be(door: HttpDaemon) -> None:
    path = f"{door.declare(N, 'range')}/blobs/{key(1)}"
    put(door, path, DATA)
    for header in (f"bytes={N}-", "bytes=-0", f"bytes={'9' * 40}-"):
        answer = door.ask("GET", path, headers={"Range": header})
        assert (answer.status, answer.headers["content-range"]) == (416, f"bytes */{N}")
    for header in ("bytes=5-3", "bytes=0-1,5-6", "lines=1-2", "bytes=x"):
        answer = door.ask("GET", path, headers={"Range": header})
        assert (answer.status, len(answer.body)) == (200, N)
    assert door.ask("HEAD", path, headers={"Range": "bytes=0-0"}).status == 200


def test_conditional_requests(door: HttpDaemon) -> None:
    path = f"{door.declare(N, 'conditions')}/blobs/{key(1)}"
    assert put(door, path, DATA, If_Match="*").status == 412
    assert put(door, path, DATA, If_None_Match="*").status == 201
    assert put(door, path, DATA, If_None_Match="*").status == 412
    etag = door.ask("HEAD", path).headers["etag"]
    for method in ("GET", "HEAD"):
        answer = door.ask(method, path, headers={"If-None-Match": etag})
        assert (answer.status, answer.body, answer.headers["etag"]) == (304, b"", etag)
        assert door.ask(method, path, headers={"If-None-Match": '"00"'}).status == 200
        assert door.ask(method, path, headers={"If-Match": '"00"'}).status == 412
        assert door.ask(method, path, headers={"If-Match": etag}).status == 200
    ranged = {"Range": "bytes=0-0", "If-Range": etag}
    assert door.ask("GET", path, headers=ranged).status == 206
    assert door.ask("GET", path, headers=ranged | {"If-Range": '"00"'}).status == 200


def test_a_wrong_digest_stores_nothing(door: HttpDaemon) -> None:
    ns = door.declare(N, "digest")
    path = f"{ns}/blobs/{key(1)}"
    wrong = put(door, path, b"x" + DATA[1:], Repr_Digest=repr_digest(DATA))
    assert (wrong.status, wrong.error) == (400, "corrupt")
    for malformed in ("sha-256=abc", "sha-256=:AAAA:", "sha-256=:****:", "sha-256"):
        assert put(door, path, DATA, Repr_Digest=malformed).error == "invalid_request"
    assert door.post(f"{ns}/exists", {"keys": [key(1)]}).json == {"held": [False]}
    assert put(door, path, DATA, Repr_Digest=f"md5=:AAAA:, {repr_digest(DATA)}").status == 201
    assert door.ask("GET", path).body == DATA
    assert put(door, path, DATA, Repr_Digest=repr_digest(b"other")).error == "corrupt"


def test_a_cut_upload_stores_nothing(door: HttpDaemon) -> None:
    ns = door.declare(N, "cut")
    path = f"{ns}/blobs/{key(1)}"
    for sent in (0, 1, MIB, N - 1):
        with door.connect() as peer:
            peer.sendall(door.head_of("PUT", path, {"Content-Length": str(N)}) + DATA[:sent])
            poll_until(lambda: door.stats()["reservations"] == 1)
            if sent % 2:  # a reset, and not a close
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        poll_until(door.nothing_is_lent)
    assert door.ask("HEAD", path).status == 404
    assert put(door, path, DATA).status == 201


def test_a_cut_body_in_chunks_stores_nothing(door: HttpDaemon) -> None:
    path = f"{door.declare(N, 'cut-chunks')}/blobs/{key(1)}"
    head = door.head_of("PUT", path, {"Transfer-Encoding": "chunked"})
    whole = (b"5\r\nabc", b"5\r\nabcde\r\n")  # so far
    for rest in (*whole, b"zz\r\n", b"5\r\nabcdeXX"):
        with door.connect() as peer:
            peer.sendall(head + rest)
            if rest in whole:
                poll_until(lambda: door.stats()["reservations"] == 1)
        poll_until(door.nothing_is_lent)
    assert door.ask("HEAD", path).status == 404


def test_too_much_is_refused_before_the_body(door: HttpDaemon) -> None:
    path = f"{door.declare(N, 'size')}/blobs/{key(1)}"
    before = door.stats()["counters"]
    for length, status in ((N + 1, 413), (1 << 50, 413), (N - 1, 400), (0, 400)):
        with door.connect() as peer:
            peer.sendall(door.head_of("PUT", path, {"Content-Length": str(length)}))
            answer = peer.recv(65536)
            assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer
            assert b"size_mismatch" in answer
    assert door.stats()["counters"]["put_blobs"] == before["put_blobs"]


def test_a_refused_body_leaves_the_connection_usable(door: HttpDaemon) -> None:
    path = f"{door.declare(N, 'size')}/blobs/{key(1)}"
    connection = http.client.HTTPConnection(door.host, door.port, timeout=10)
    try:
        for _ in range(3):
            answer = ask_over(connection, "PUT", path, DATA + b"x", door.headers())
            assert answer.status == 413
            assert ask_over(connection, "GET", "/v1/stats", None, door.headers()).status == 200
    finally:
        connection.close()


def test_compressed_bodies_are_refused(door: HttpDaemon) -> None:
    path = f"{door.declare(N, 'gzip')}/blobs/{key(1)}"
    assert put(door, path, DATA, Content_Encoding="gzip").status == 415
    assert put(door, path, DATA, Content_Encoding="identity").status == 201


def test_a_part_is_no_blob(door: HttpDaemon) -> None:
    path = f"{door.declare(4, 'part')}/blobs/{key(1)}"
    answer = put(door, path, bytes(4), Content_Range="bytes 0-3/8")
    assert (answer.status, answer.error) == (400, "invalid_request")
    assert door.ask("HEAD", path).status == 404


def test_curls_expectation_is_met(door: HttpDaemon) -> None:
    path = f"{door.declare(4, 'expect')}/blobs/{key(1)}"
    with door.connect() as peer:
        peer.sendall(door.head_of("PUT", path, {"Content-Length": "4", "Expect": "100-continue"}))
        assert peer.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        peer.sendall(b"data")
        assert peer.recv(65536).startswith(b"HTTP/1.1 201 ")


def test_batches_of_keys(door: HttpDaemon) -> None:
    ns = door.declare(8, "batch")
    keys = [key(n) for n in range(5)]
    parent = ""
    for number, one in enumerate(keys[:3]):
        query = f"?parent={parent}" if parent else ""
        assert put(door, f"{ns}/blobs/{one}{query}", b"%08d" % number).status == 201
        parent = one
    matched = door.post(f"{ns}/match", {"keys": keys}).json
    assert (matched["blobs"], matched["tokens"], matched["tiers"]) == (3, 768, ["dram"] * 3)
    assert door.post(f"{ns}/exists", {"keys": keys}).json["held"] == [True] * 3 + [False] * 2
    facts = door.post(f"{ns}/stat", {"keys": keys}).json["blobs"]
    assert [fact.get("nbytes") for fact in facts] == [8, 8, 8, None, None]
    assert door.post(f"{ns}/prefetch", {"keys": keys}).json == {"count": 0}
    assert door.post(f"{ns}/pin", {"keys": keys, "ttl_s": 60}).json == {"count": 3}
    assert door.post(f"{ns}/pin", {"keys": keys, "ttl_s": 0}).json == {"count": 3}
    assert door.post(f"{ns}/drop", {"keys": keys[2:]}).json == {"count": 1}
    assert door.ask("DELETE", f"{ns}/blobs/{keys[0]}").json == {"count": 2}
    assert door.post(f"{ns}/match", {"keys": keys}).json["blobs"] == 0


def test_blobs_and_namespaces_are_listed_by_pages(door: HttpDaemon) -> None:
    ns = door.declare(8, "listed")
    keys = sorted(key(n) for n in range(7))
    for one in keys:
        put(door, f"{ns}/blobs/{one}", bytes(8))
    found, after = [], ""
    while after is not None:
        page = door.ask("GET", f"{ns}/blobs?limit=3&after={after}").json
        assert len(page["blobs"]) <= 3
        found += [blob["key"] for blob in page["blobs"]]
        after = page["next"]
    assert found == keys
    for query in ("limit=0", "limit=1001", "limit=x", "limit=-1", "after=zz", "after=ABCD"):
        assert door.ask("GET", f"{ns}/blobs?{query}").status == 400
    listed = door.ask("GET", "/v1/namespaces").json["namespaces"]
    (own,) = [entry for entry in listed if entry["model"] == "listed"]
    assert (own["id"], own["blobs"], own["blob_bytes"]) == (ns.rpartition("/")[2], 7, 8)


def test_many_keys_at_once(door: HttpDaemon) -> None:
    ns = door.declare(8, "many")
    keys = [key(n) for n in range(100_000)]
    assert door.post(f"{ns}/exists", {"keys": keys}).json["held"] == [False] * 100_000
    assert door.post(f"{ns}/exists", {"keys": [*keys, key(-1)]}).status == 400
    huge = json.dumps({"keys": ["0" * 128]}).encode() + b" " * (17 << 20)
    assert door.ask("POST", f"{ns}/exists", huge, BODY).status == 413


def test_long_calls_have_every_answer_in_its_place(door: HttpDaemon) -> None:
    ns = door.declare(8, "long")
    keys = [key(n) for n in range(2500)]
    for number in (0, 999, 1000, 2499):
        assert put(door, f"{ns}/blobs/{keys[number]}", bytes(8)).status == 201
    held = {"keys": keys}
    facts = door.post(f"{ns}/stat", held).json["blobs"]
    assert [n for n, fact in enumerate(facts) if fact] == [0, 999, 1000, 2499]
    exists = door.post(f"{ns}/exists", held).json["held"]
    assert [n for n, there in enumerate(exists) if there] == [0, 999, 1000, 2499]
    assert len(facts) == len(exists) == 2500
    assert door.post(f"{ns}/pin", held | {"ttl_s": 1}).json == {"count": 4}
    assert door.post(f"{ns}/drop", held).json == {"count": 4}


def test_operations_are_measured(door: HttpDaemon) -> None:
    ns = door.declare(8, "measured")
    put(door, f"{ns}/blobs/{key(1)}", bytes(8))
    door.ask("GET", f"{ns}/blobs/{key(1)}")
    door.ask("GET", f"{ns}/blobs/odd")
    answer = door.ask("GET", "/metrics", token=None)
    assert answer.status == 200
    text = answer.body.decode()
    for line in (
        'blobstore_operation_duration_seconds_count{door="http",verb="get"}',
        'blobstore_operation_duration_seconds_count{door="http",verb="put"}',
        'blobstore_failed_operations_total{door="http",error="invalid_request",verb="get"}',
        'blobstore_open_connections{door="http"} 1.0',
        'blobstore_open_connections{door="local"} 0.0',
        "blobstore_loop_lag_p99_seconds",
    ):
        assert line in text, line


def test_verify_reports(door: HttpDaemon) -> None:
    put(door, f"{door.declare(N, 'verify')}/blobs/{key(1)}", DATA)
    report = door.post("/v1/verify", {"timeout_s": 30}).json
    assert (report["complete"], report["corrupt"]) == (True, []), report
    assert report["blobs"] >= 1


def test_health_needs_no_token(door: HttpDaemon) -> None:
    for path in ("/healthz", "/readyz", "/openapi.json", "/metrics", "/"):
        assert door.ask("GET", path, token=None).status == 200, path


# The manual


@pytest.mark.skipif(
    not (shutil.which("curl") and shutil.which("openssl")), reason="needs curl and openssl"
)
def test_a_stranger_gets_through_the_manual(door: HttpDaemon, tmp_path: Path) -> None:
    manual = (Path(__file__).parents[2] / "docs" / "HTTP.md").read_text()
    blocks = re.findall(r"^```sh\n(.*?)^```", manual, re.MULTILINE | re.DOTALL)
    script = "".join(blocks).replace("http://127.0.0.1:8470", door.url)
    script = script.replace("/var/lib/blobstore/http.token", os.fspath(door.run.data / FILE_NAME))
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = done.stdout
    assert said.count('{"result":"stored"}') == 2
    assert '"tiers":["dram","dram"],"eta_s":0.0,"rebuild_blobs":0,"rebuild_eta_s":0.0}' in said
    assert "the same bytes\n1000\n" in said
    assert '{"result":"exists"}' in said
    assert "my-model" in said

"""HTTP peers that are slow, stop or vanish; many at once; and the end of the daemon."""

from __future__ import annotations

import http.client
import os
import re
import select
import signal
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from blobstore.units import MIB
from tests.support.http_daemon import (
    HttpDaemon,
    Upload,
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


def test_a_reader_that_stops_loses_its_lease_and_others_go_on(tmp_path: Path) -> None:
    nbytes = 24 * MIB
    with http_daemon(tmp_path, environ={"BLOBSTORE__HTTP__IO_TIMEOUT_S": "1"}) as door:
        path = f"{door.declare(nbytes)}/blobs/{key(1)}"
        assert put(door, path, bytes(nbytes)).status == 201
        with door.connect(receive_bytes=4096) as peer:
            peer.sendall(door.head_of("GET", path))
            assert peer.recv(1024).startswith(b"HTTP/1.1 200")
            assert door.stats()["leases"] == 1
            assert len(door.ask("GET", path).body) == nbytes
            poll_until(door.nothing_is_lent, 10.0)
            assert _rest_of(peer) < nbytes  # it does not look like the end of the blob


def _rest_of(peer: socket.socket, until: bytes = b"\0never\0") -> int:
    """How many bytes still come before the connection ends, or one of them is `until`."""
    received = 0
    with suppress(ConnectionError):
        while data := peer.recv(1 << 20):
            received += len(data)
            if until in data:
                break
    return received


def test_a_reader_that_vanishes_gives_everything_back_at_once(tmp_path: Path) -> None:
    nbytes = 24 * MIB
    with http_daemon(tmp_path, environ={"BLOBSTORE__HTTP__IO_TIMEOUT_S": "300"}) as door:
        path = f"{door.declare(nbytes)}/blobs/{key(1)}"
        put(door, path, bytes(nbytes))
        for _ in range(5):
            with door.connect(receive_bytes=4096) as peer:
                peer.sendall(door.head_of("GET", path))
                peer.recv(1024)
                assert door.stats()["leases"] == 1
            poll_until(door.nothing_is_lent, 5.0)
        assert _failed(door, "get", "cut") == 5
        assert "Traceback" not in door.run.said


def _failed(door: HttpDaemon, verb: str, error: str) -> int:
    labels = f'door="http",error="{error}",verb="{verb}"'
    return _gauge(door, f"blobstore_failed_operations_total{{{labels}}}")


def test_a_writer_that_stops_loses_its_reservation(tmp_path: Path) -> None:
    with http_daemon(tmp_path, environ={"BLOBSTORE__HTTP__IO_TIMEOUT_S": "0.5"}) as door:
        ns = door.declare(N)
        with door.connect() as peer:
            head = door.head_of("PUT", f"{ns}/blobs/{key(1)}", {"Content-Length": str(N)})
            peer.sendall(head + DATA[:MIB])
            poll_until(lambda: door.stats()["reservations"] == 1)
            poll_until(door.nothing_is_lent, 10.0)
            assert _rest_of(peer) == 0
        with door.connect() as peer:  # the same for a body of JSON
            head = door.head_of("POST", f"{ns}/match", BODY | {"Content-Length": "99"})
            peer.sendall(head + b"{")
            peer.settimeout(10.0)
            assert _rest_of(peer) == 0
        assert door.ask("HEAD", f"{ns}/blobs/{key(1)}").status == 404
        assert [_failed(door, verb, "cut") for verb in ("put", "match")] == [1, 1]
        assert "Traceback" not in door.run.said


def test_a_peer_that_asks_and_never_reads_is_cut_off(tmp_path: Path) -> None:
    with http_daemon(tmp_path, environ={"BLOBSTORE__HTTP__IO_TIMEOUT_S": "0.5"}) as door:
        asked = door.head_of("GET", "/openapi.json")
        with door.connect(receive_bytes=4096) as peer:
            peer.settimeout(1.0)
            with suppress(OSError):  # once nobody reads at either end
                peer.sendall(asked * 5000)
            poll_until(lambda: _n_connections(door) == 1, 10.0)
        assert "Traceback" not in door.run.said


def _n_connections(door: HttpDaemon) -> int:
    return _gauge(door, 'blobstore_open_connections{door="http"}')


def _gauge(door: HttpDaemon, name: str) -> int:
    """What /metrics says of it; 0 if it is not there."""
    text = door.ask("GET", "/metrics").body.decode()
    found = re.search(rf"^{re.escape(name)} ([0-9.]+)$", text, re.MULTILINE)
    return int(float(found[1])) if found is not None else 0


def test_a_slow_upload_that_goes_on_outlasts_a_reservation(tmp_path: Path) -> None:
    environ = {"BLOBSTORE__TIMES__RESERVATION_S": "3"}
    nbytes = 6 * MIB
    with http_daemon(tmp_path, environ=environ) as door:
        path = f"{door.declare(nbytes)}/blobs/{key(1)}"
        with door.connect() as peer:
            peer.sendall(door.head_of("PUT", path, {"Content-Length": str(nbytes)}))
            began_s = door.stats()["uptime_s"]
            for number in range(6):
                peer.sendall(bytes(MIB))
                due_s = began_s + (number + 1) * 0.8
                poll_until(lambda due_s=due_s: door.stats()["uptime_s"] > due_s)  # type: ignore[misc]
            assert peer.recv(65536).startswith(b"HTTP/1.1 201 ")


def test_of_two_that_must_be_the_first_one_is(tmp_path: Path) -> None:
    with http_daemon(tmp_path) as door:
        path = f"{door.declare(N)}/blobs/{key(1)}"
        upload = Upload(door, path, DATA, {"If-None-Match": "*"})
        upload.half_sent.wait(10)
        poll_until(lambda: door.stats()["reservations"] == 1)
        assert put(door, path, DATA, If_None_Match="*").status == 201
        answer = upload.finish()
        assert answer is not None
        assert answer.status == 412


def test_full_is_507_and_busy_is_503(tmp_path: Path) -> None:
    nbytes = 20 * MIB  # of 64 MiB, half of which one client may have on loan
    with http_daemon(tmp_path, "--ssd", "off") as door:
        ns = door.declare(nbytes)
        upload = Upload(door, f"{ns}/blobs/{key(1)}", bytes(nbytes))
        upload.half_sent.wait(10)
        second = put(door, f"{ns}/blobs/{key(2)}?timeout_s=0", bytes(nbytes))
        assert (second.status, second.error) == (503, "busy")
        assert second.headers["retry-after"] == "1"
        answer = upload.finish()
        assert answer is not None
        assert answer.status == 201
        durable = put(door, f"{ns}/blobs/{key(3)}?retention=durable", bytes(nbytes))
        assert durable.status in (400, 507), durable
        big = door.declare(40 * MIB)
        assert put(door, f"{big}/blobs/{key(1)}", bytes(40 * MIB)).status == 413
    with http_daemon(tmp_path, "--ssd", "off") as door:
        ns = door.declare(nbytes, "full")
        for number in range(2):  # the rest is kept free for loads
            path = f"{ns}/blobs/{key(number)}"
            assert put(door, path, bytes(nbytes)).status == 201
            door.post(f"{ns}/pin", {"keys": [key(number)], "ttl_s": 60})
        full = put(door, f"{ns}/blobs/{key(9)}?timeout_s=0.1", bytes(nbytes))
        assert (full.status, full.error) == (507, "full")


def test_blobs_come_from_disk_in_pieces(tmp_path: Path) -> None:
    with http_daemon(tmp_path) as door:
        ns = door.declare(N)
        path = f"{ns}/blobs/{key(1)}"
        put(door, f"{path}?retention=durable", DATA)
        for headers, expected in (({}, DATA), ({"Range": f"bytes={MIB}-"}, DATA[MIB:])):
            assert door.post(f"{ns}/drop", {"keys": [key(1)], "tier": "dram"}).json["count"] == 1
            assert door.ask("HEAD", path).headers["x-blobstore-tier"] == "ssd"
            answer = door.ask("GET", path, headers=headers)
            assert answer.headers["x-blobstore-tier"] == "ssd"
            assert answer.body == expected
        poll_until(door.nothing_is_lent)


@pytest.mark.parametrize("at", [5, N - 5])
def test_bytes_that_went_bad_on_disk_are_never_sent_as_a_blob(tmp_path: Path, at: int) -> None:
    with http_daemon(tmp_path) as door:
        ns = door.declare(N)
        path = f"{ns}/blobs/{key(1)}"
        assert put(door, f"{path}?retention=durable", DATA).status == 201
        assert door.post(f"{ns}/drop", {"keys": [key(1)], "tier": "dram"}).json["count"] == 1
        segment = door.run.data / "segments" / "00000001.seg"
        start = segment.read_bytes().index(DATA[:4096])
        with segment.open("r+b") as file:
            file.seek(start + at)
            file.write(bytes([DATA[at] ^ 1]))
            file.flush()
            os.fsync(file.fileno())
        with door.connect() as peer:
            peer.sendall(door.head_of("GET", path))
            assert _rest_of(peer, until=b'"retry_after_s"') < N
        answer = door.ask("GET", path)
        assert (answer.status, answer.error) == (404, "miss")
        assert put(door, path, DATA).status == 201
        assert door.ask("GET", path).body == DATA
        assert "Traceback" not in door.run.said


def test_a_cut_read_does_not_spoil_the_next(tmp_path: Path) -> None:
    nbytes = 8 * MIB
    with http_daemon(tmp_path) as door:
        ns = door.declare(nbytes)
        contents = [bytes([number + 1]) * nbytes for number in range(3)]
        for number, content in enumerate(contents):
            assert put(door, f"{ns}/blobs/{key(number)}", content).status == 201
        for turn in range(60):
            with door.connect(receive_bytes=65536) as peer:
                peer.sendall(door.head_of("GET", f"{ns}/blobs/{key(turn % 3)}"))
                peer.recv(1 + turn * 1000)
            number = (turn + 1) % 3
            assert door.ask("GET", f"{ns}/blobs/{key(number)}").body == contents[number]
        poll_until(door.nothing_is_lent)
        assert "Traceback" not in door.run.said


def test_long_bodies_take_no_more_memory_than_there_is_for_them(tmp_path: Path) -> None:
    nbytes = 15 * MIB
    with http_daemon(tmp_path) as door, ExitStack() as stack:
        ns = door.declare(8)
        head = door.head_of("POST", f"{ns}/exists", BODY | {"Content-Length": str(nbytes)})
        peers = [stack.enter_context(door.connect()) for _ in range(12)]
        before = _anonymous_bytes(door)
        for peer in peers:
            with suppress(OSError):  # the daemon hung up on what it had refused
                peer.sendall(head + bytes(nbytes - 1))
        poll_until(lambda: len(_answered(peers)) >= 3)
        assert len(_answered(peers)) < 12
        assert _anonymous_bytes(door) - before < 200 * MIB
        assert door.post(f"{ns}/exists", {"keys": [key(1)]}).status == 200
        stack.close()
        poll_until(lambda: _takes_a_long_body(door, ns), 10.0)


def _answered(peers: list[socket.socket]) -> list[socket.socket]:
    """Those that have an answer, or a connection that broke."""
    return select.select(peers, [], [], 0)[0]


def _takes_a_long_body(door: HttpDaemon, ns: str) -> bool:
    keys = [f"{number:0128x}" for number in range(100_000)]
    answers = [door.post(f"{ns}/{verb}", {"keys": keys}) for verb in ("exists", "stat")]
    return [answer.status for answer in answers] == [200, 200]


def test_thousands_of_idle_connections(tmp_path: Path) -> None:
    environ = {"BLOBSTORE__HTTP__MAX_CONNECTIONS": "2000"}
    with http_daemon(tmp_path, environ=environ) as door, ExitStack() as idle:
        for _ in range(1990):
            idle.enter_context(door.connect())
        assert door.ask("GET", "/v1/stats").status == 200
        for _ in range(20):
            idle.enter_context(door.connect())
        with door.connect() as peer:
            answer = peer.recv(65536)
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"Retry-After" in answer
        idle.close()
        poll_until(lambda: _serves(door))
        door.run.process.send_signal(signal.SIGTERM)
        assert door.run.wait() == 0


def _serves(door: HttpDaemon) -> bool:
    try:
        return door.ask("GET", "/v1/stats").status == 200
    except OSError:
        return False


def test_three_large_blobs_up_and_down_at_once_cost_little_memory(tmp_path: Path) -> None:
    nbytes, n = 200 * MIB, 3
    limits = {"BLOBSTORE__LOCAL__LENT_MAX": str(n * nbytes)}
    with http_daemon(tmp_path, "--dram", "700MiB", "--ssd", "off", environ=limits) as door:
        ns = door.declare(nbytes)
        data = bytes(nbytes)
        before = _anonymous_bytes(door)
        uploads = [Upload(door, f"{ns}/blobs/{key(i)}", data) for i in range(n)]
        for upload in uploads:
            upload.half_sent.wait(60)
        most = _anonymous_bytes(door) - before
        for upload in uploads:
            upload.go_on()
        for upload in uploads:
            answer = upload.finish()
            assert answer is not None
            assert answer.status == 201
        peers = [door.connect() for _ in range(n)]
        for number, peer in enumerate(peers):
            peer.sendall(door.head_of("GET", f"{ns}/blobs/{key(number)}"))
        received = [0] * n
        while min(received) < nbytes:
            for number, peer in enumerate(peers):
                if received[number] < nbytes:
                    received[number] += len(peer.recv(4 * MIB))
            most = max(most, _anonymous_bytes(door) - before)
        for peer in peers:
            peer.close()
        assert most < 64 * MIB, most


def _anonymous_bytes(door: HttpDaemon) -> int:
    status = Path(f"/proc/{door.run.process.pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


def test_uploads_in_flight_at_sigterm_finish_and_new_ones_are_refused(tmp_path: Path) -> None:
    with http_daemon(tmp_path) as door, ExitStack() as stack:
        ns = door.declare(N)
        uploads = [Upload(door, f"{ns}/blobs/{key(i)}", DATA) for i in range(4)]
        for upload in uploads:
            upload.half_sent.wait(10)
        poll_until(lambda: door.stats()["reservations"] == 4)
        idle = [stack.enter_context(door.connect()) for _ in range(5)]
        for _ in range(5):
            kept = http.client.HTTPConnection(door.host, door.port, timeout=10)
            stack.callback(kept.close)
            ask_over(kept, "GET", "/healthz")
            assert kept.sock is not None
            idle.append(kept.sock)
        door.run.process.send_signal(signal.SIGTERM)
        assert [peer.recv(100) for peer in idle] == [b""] * 10
        late = put(door, f"{ns}/blobs/{key(9)}", DATA)
        assert (late.status, late.error) == (503, "unavailable")
        assert late.headers["connection"] == "close"
        assert door.ask("GET", "/readyz", token=None).status == 503
        assert door.ask("GET", "/healthz", token=None).status == 200
        answers = [upload.finish() for upload in uploads]
        assert [answer.status for answer in answers if answer is not None] == [201] * 4
        assert door.run.wait() == 0
        assert "Traceback" not in door.run.said
    with http_daemon(tmp_path) as door:
        for number in range(4):
            assert door.ask("GET", f"{ns}/blobs/{key(number)}").body == DATA


def test_an_upload_that_never_ends_does_not_outlast_the_drain_limit(tmp_path: Path) -> None:
    with http_daemon(tmp_path, environ={"BLOBSTORE__TIMES__DRAIN_S": "0.5"}) as door:
        upload = Upload(door, f"{door.declare(N)}/blobs/{key(1)}", DATA)
        upload.half_sent.wait(10)
        poll_until(lambda: door.stats()["reservations"] == 1)
        door.run.process.send_signal(signal.SIGTERM)
        assert door.run.wait(10.0) == 0
        upload.finish()
        assert "Traceback" not in door.run.said


def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    with http_daemon(tmp_path, environ={"BLOBSTORE__TIMES__DRAIN_S": "60"}) as door:
        upload = Upload(door, f"{door.declare(N)}/blobs/{key(1)}", DATA)
        upload.half_sent.wait(10)
        poll_until(lambda: door.stats()["reservations"] == 1)
        door.run.process.send_signal(signal.SIGTERM)
        poll_until(lambda: "draining" in door.run.said)
        door.run.process.send_signal(signal.SIGTERM)
        assert door.run.wait(10.0) == 0
        upload.finish()
        assert "Traceback" not in door.run.said


def test_the_token_survives_a_restart(tmp_path: Path) -> None:
    with http_daemon(tmp_path) as door:
        first = door.token
    with http_daemon(tmp_path) as door:
        assert door.token == first
        assert (door.run.data / "http.token").stat().st_mode & 0o777 == 0o600

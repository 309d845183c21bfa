"""Clients over HTTP against servers that answer badly, late, or not at all."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from blobstore.clients import (
    Keys,
    KVLayout,
    LayerGroup,
    Namespace,
    Shard,
    WriterGroup,
    http_reading,
)
from blobstore.clients.http_address import HttpAddress
from blobstore.clients.http_exchange import Head
from blobstore.clients.http_landing import Digesting
from blobstore.clients.http_lookup import Lookup
from blobstore.clients.http_pool import CONNECTIONS_MAX
from blobstore.clients.http_wire import parse_head
from blobstore.clients.writer import digest_of
from blobstore.digest import payload_digest, piece_digests
from blobstore.errors import InvalidRequest, ProtocolError, StorageFailed, Unavailable
from blobstore.units import KIB, MIB
from tests.support.blobs import chain, opaque, payload_of, payloads_of
from tests.support.both_clients import KINDS, connect
from tests.support.http_puppet import (
    Asked,
    HttpPuppet,
    Script,
    answer,
    failed,
    ok,
    payload,
)

NBYTES = 100 * KIB
NAMESPACE = opaque(NBYTES)
KEYS = chain(NAMESPACE, 1, 4)
Serve = Callable[..., tuple[Any, HttpPuppet]]


@pytest.fixture(params=KINDS)
def serve(request: pytest.FixtureRequest) -> Iterator[Serve]:
    """Makes a server of a script, and a client of each kind that has connected to it."""
    with ExitStack() as stack:

        def made(script: Script, **options: Any) -> tuple[Any, HttpPuppet]:
            puppet = stack.enter_context(HttpPuppet(script, **options))
            kv = stack.enter_context(connect(request.param, puppet.url, timeout_s=20.0, token="t"))
            return kv, puppet

        yield made


def daemon_of(keys: Keys, *, otherwise: Script = lambda asked: failed(404, "miss")) -> Script:
    """A daemon that holds `keys`; payloads are served by `otherwise` where it has an answer."""

    def script(asked: Asked) -> bytes | list[bytes] | None:
        if asked.path == "/v1/namespaces":
            return ok({"id": NAMESPACE.id.hex()})
        if asked.path.endswith("/exists"):
            return ok({"held": [True] * (asked.body.count(b'"') // 2 - 1)})
        if asked.path.endswith("/stat"):
            return ok({"blobs": [{}] * (asked.body.count(b'"') // 2 - 1)})
        return otherwise(asked)

    return script


def key_of(asked: Asked) -> bytes:
    return bytes.fromhex(asked.path.partition("?")[0].rpartition("/")[2])


def right(asked: Asked) -> bytes:
    return payload(payload_of(key_of(asked), NBYTES))


class TestAddresses:
    @pytest.mark.parametrize(
        ("url", "parts"),
        [
            ("http://h", ("h", 80, "")),
            ("HTTP://H", ("h", 80, "")),
            ("https://h", ("h", 443, "")),
            ("http://127.0.0.1:8080/", ("127.0.0.1", 8080, "")),
            ("http://[::1]:1/base/", ("::1", 1, "/base")),
        ],
    )
    def test_a_url_is_taken_apart(self, url: str, parts: tuple[str, int, str]) -> None:
        address = HttpAddress.of(url)
        assert (address.host, address.port, address.base) == parts
        assert (address.tls is not None) == url.startswith("https")

    @pytest.mark.parametrize(
        "url",
        ["http://", "http://h:x", "http://u:p@h", "http://h?q", "http://h#f", "http://h/\r\nX: y",
         "http://h/ü", "http://h/a b"],
    )  # fmt: skip
    def test_others_are_the_callers_mistake(self, url: str) -> None:
        with pytest.raises(InvalidRequest):
            HttpAddress.of(url)

    def test_so_are_tokens_and_ca_files_that_cannot_be_used(self) -> None:
        for token in ("a b", "a\r\nX: y", "ü"):
            with pytest.raises(InvalidRequest, match="token"):
                HttpAddress.of("http://h", token=token)
        with pytest.raises(InvalidRequest, match="/nowhere"):
            HttpAddress.of("https://h", ca_file="/nowhere")
        with pytest.raises(InvalidRequest, match="for https"):
            HttpAddress.of("http://h", ca_file="/nowhere")
        with pytest.raises(InvalidRequest, match="token and ca_file"):
            connect("threads", "unix:/nowhere", token="t")

    def test_the_token_is_not_shown(self) -> None:
        assert "secret" not in repr(HttpAddress.of("http://h", token="secret"))


class TestHeads:
    def test_headers_are_found_in_any_case(self) -> None:
        head = parse_head(b"HTTP/1.1 200 OK\r\nContent-LENGTH:  7 \r\nX: a:b\r\nx: c")
        assert head == Head(200, {"content-length": "7", "x": "c"}, keeps_alive=True)
        assert head.content_length == 7

    @pytest.mark.parametrize("lines", [b"HTTP/1.0 200 OK", b"HTTP/1.1 200\r\nConnection: Close"])
    def test_some_say_that_the_connection_ends(self, lines: bytes) -> None:
        assert not parse_head(lines).keeps_alive

    @pytest.mark.parametrize(
        "lines",
        [b"", b"SSH-2.0", b"HTTP/2 200", b"HTTP/1.1 abc", b"HTTP/1.1 200\r\nno colon",
         b"HTTP/1.1 200\r\nA : b"],
    )  # fmt: skip
    def test_others_are_none(self, lines: bytes) -> None:
        with pytest.raises(ProtocolError):
            parse_head(lines)

    @pytest.mark.parametrize("told", ["-1", "1e3", "", "٣", "1" * 5000])
    def test_a_length_is_a_number(self, told: str) -> None:
        with pytest.raises(ProtocolError):
            _ = Head(200, {"content-length": told}, keeps_alive=True).content_length


def test_an_answer_without_an_end_does_not_outlast_the_deadline(serve: Serve) -> None:
    endless = [b"HTTP/1.1 100 Continue\r\n\r\n" * 4000] * 20_000
    kv, _ = serve(daemon_of(KEYS, otherwise=lambda asked: endless))
    ns = kv.namespace(NAMESPACE)
    assert kv.match(ns, KEYS, timeout_s=0.2).reason == "deadline"


class HangingResolver:
    """Answers for no name before it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on = threading.Event()
        self.n_asked = 0
        monkeypatch.setattr(socket, "getaddrinfo", self._look_up)

    def _look_up(self, *where: object, flags: int = 0, **options: object) -> list[Any]:
        if not flags & socket.AI_NUMERICHOST:
            self.n_asked += 1
            self.go_on.wait(20.0)
        raise socket.gaierror(socket.EAI_NONAME, "unknown")


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_that_is_not_found_in_time_is_a_miss_in_time(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolver = HangingResolver(monkeypatch)
    try:
        for _ in range(3):
            with pytest.raises(Unavailable, match="in time"):
                connect(kind, "http://kv.example", timeout_s=0.05)
    finally:
        resolver.go_on.set()


def test_those_who_look_up_a_name_at_once_share_a_look_up() -> None:
    lookup, go_on = Lookup(), threading.Event()
    asked: list[int] = []

    def function() -> int:
        asked.append(go_on.wait(20.0))
        return len(asked)

    under_way = [lookup.begin(function) for _ in range(5)]
    go_on.set()
    assert [future.result(20.0) for future in under_way] == [1] * 5
    assert lookup.begin(function).result(20.0) == 2
    with pytest.raises(ZeroDivisionError):
        lookup.begin(lambda: 1 / 0).result(20.0)


@pytest.mark.parametrize("step", [1, 1000, MIB - 1, MIB, MIB + 1, 4 * MIB])
def test_a_digest_is_the_same_however_the_bytes_come(step: int) -> None:
    data = np.random.default_rng(step).bytes(min(step * 50, 3 * MIB + 7))
    digesting = Digesting()
    for at in range(0, len(data), step):
        digesting.update(memoryview(data)[at : at + step])
    assert digesting.digest() == payload_digest(len(data), piece_digests(memoryview(data)))


class TestConnecting:
    @pytest.mark.parametrize("kind", KINDS)
    def test_nobody_there_is_unavailable(self, kind: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        with pytest.raises(Unavailable, match=str(port)):
            connect(kind, f"http://127.0.0.1:{port}")
        with pytest.raises(Unavailable, match="no host"):
            connect(kind, "http://nobody.invalid")

    @pytest.mark.parametrize("kind", KINDS)
    def test_one_who_does_not_answer_is_unavailable(self, kind: str) -> None:
        with (
            socket.create_server(("127.0.0.1", 0)) as mute,
            pytest.raises(Unavailable, match="in time"),
        ):
            connect(kind, f"http://127.0.0.1:{mute.getsockname()[1]}", timeout_s=0.1)

    @pytest.mark.parametrize("kind", KINDS)
    def test_tls_with_one_who_has_none_is_unavailable(self, kind: str) -> None:
        with HttpPuppet(lambda asked: None) as puppet, pytest.raises(Unavailable):
            connect(kind, puppet.url.replace("http", "https"), timeout_s=0.2)

    def test_the_token_is_shown_with_every_request(self, serve: Serve) -> None:
        kv, puppet = serve(daemon_of(KEYS, otherwise=right))
        assert kv.exists(kv.namespace(NAMESPACE), KEYS) == [True] * 4
        assert {asked.headers["authorization"] for asked in puppet.asked} == {"Bearer t"}
        assert kv.boot_id == 7


class TestFaultsOfTheServer:
    @pytest.mark.parametrize(
        ("said", "reason"),
        [
            (failed(404, "miss", reason="io_error"), "io_error"),
            (failed(503, "busy"), "busy"),
            (failed(504, "deadline"), "deadline"),
            (failed(500, "storage_failed"), "storage_failed"),
            (failed(401, "unauthorized"), "unauthorized"),
            (failed(403, "forbidden"), "forbidden"),
            (answer(500, b"<html>"), "error"),
            (answer(502, b"<html>"), "unavailable"),
            (answer(504, b""), "deadline"),
            (answer(401, b""), "unauthorized"),
            (answer(302, b"", "Location: /"), "error"),
            (answer(206, b"part"), "error"),
            (b"SSH-2.0-OpenSSH_9.9\r\n\r\n", "protocol"),
            (b"HTTP/1.1 200 OK\r\n\r\n", "protocol"),
            (b"X" * 70_000, "protocol"),
            (answer(200, b"no digest"), "protocol"),
            (payload(b"too long" * NBYTES), "protocol"),
            (payload(b"x", "Content-Encoding: gzip"), "protocol"),
            (payload(bytes(NBYTES)).replace(b"\0" * 9, b"\1" * 9, 1), "corrupt"),
            (payload(bytes(NBYTES))[:-1], "deadline"),
            ([payload(bytes(NBYTES))[:-1], None], "unavailable"),
            (None, "unavailable"),
        ],
    )
    def test_a_payload_that_does_not_come_is_a_miss_with_a_reason(
        self, serve: Serve, said: Any, reason: str
    ) -> None:
        def script(asked: Asked) -> Any:
            return right(asked) if key_of(asked) in KEYS[:2] else said

        def cut(asked: Asked) -> Any:
            found = script(asked)
            if isinstance(found, list):
                puppet.connections[asked.connection].sendall(found[0])
                return None
            return found

        kv, puppet = serve(daemon_of(KEYS, otherwise=cut))
        ns = kv.namespace(NAMESPACE)
        with kv.get(ns, KEYS, timeout_s=0.5) as lease:
            assert (len(lease), lease.reason, lease.served) == (2, reason, {"ssd": 2})
            assert [bytes(view) for view in lease] == payloads_of(KEYS[:2], NBYTES)
        assert kv.get_into(ns, KEYS, bytearray(4 * NBYTES), timeout_s=0.5) == 2
        assert kv.get(ns, KEYS[:2]).reason == "", "and the client goes on"

    @pytest.mark.parametrize(
        ("said", "reason"),
        [
            (failed(507, "full"), "full"),
            (failed(413, "size_mismatch"), "too_large"),
            (failed(409, "orphan"), "orphan"),
            (failed(403, "forbidden"), "forbidden"),
            (answer(201, b"{}"), "error"),
            (None, "unavailable"),
        ],
    )
    def test_a_put_that_is_refused_says_why(self, serve: Serve, said: Any, reason: str) -> None:
        def script(asked: Asked) -> Any:
            return answer(201, b'{"result":"stored"}') if key_of(asked) == KEYS[0] else said

        kv, puppet = serve(daemon_of(KEYS, otherwise=script))
        ns = kv.namespace(NAMESPACE)
        with kv.put(ns, KEYS) as writer:
            for index, key in enumerate(KEYS):
                writer[index][:] = payload_of(key, NBYTES)
        assert writer.results == ["stored"] + ["refused"] * 3
        assert writer.reasons == ["", *[reason] * 3]
        first, second = [asked for asked in puppet.asked if asked.method == "PUT"][:2]
        assert first.body == payload_of(KEYS[0], NBYTES)
        assert f"parent={KEYS[0].hex()}" in second.path
        assert "parent" not in first.path

    def test_a_durable_put_that_is_refused_raises(self, serve: Serve) -> None:
        kv, _ = serve(daemon_of(KEYS, otherwise=lambda asked: failed(500, "storage_failed")))
        ns = kv.namespace(NAMESPACE)
        with pytest.raises(StorageFailed, match="blob 0"):
            kv.put_from(ns, KEYS, [bytes(NBYTES)] * 4, retention="durable")

    def test_an_answer_that_comes_before_the_body_was_sent_counts(self, serve: Serve) -> None:
        """Nobody reads the body; the connection is not used again."""
        large = opaque(32 * MIB)
        kv, puppet = serve(daemon_of(KEYS, otherwise=lambda asked: failed(507, "full")))
        puppet.leave_unread = "PUT"
        ns = kv.namespace(large)
        for _ in range(2):
            assert kv.put_from(ns, KEYS[:1], [bytes(32 * MIB)]) == ["refused"]
        writer = kv.put(ns, KEYS[:1])
        writer[0][:1] = b"x"
        writer.seal()
        assert (writer.results, writer.reasons) == (["refused"], ["full"])

    def test_json_may_come_in_chunks(self, serve: Serve) -> None:
        chunked = (
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"b;ext=1\r\n" b'{"blobs":2,' b"\r\n"
            b"1a\r\n" b'"tiers":["dram"],"eta_s":1' b"\r\n"
            b"1\r\n}\r\n0\r\nTrailer: x\r\n\r\n"
        )  # fmt: skip
        kv, puppet = serve(daemon_of(KEYS, otherwise=lambda asked: [bytes([b]) for b in chunked]))
        ns = kv.namespace(NAMESPACE)
        for _ in range(2):
            hit = kv.match(ns, KEYS)
            assert (hit.blobs, hit.warm, hit.eta_s, hit.reason) == (2, 1, 1.0, "")
        assert len(puppet.connections) == 1

    @pytest.mark.parametrize(
        "body", [b"zz\r\n", b"-1\r\n", b"1\r\nab\r\n", b"7fffffff\r\n", b"x" * 70_000]
    )
    def test_chunks_that_are_none_are_refused(self, serve: Serve, body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        kv, _ = serve(daemon_of(KEYS, otherwise=lambda asked: head + body))
        assert kv.match(kv.namespace(NAMESPACE), KEYS).reason == "protocol"


class TestConnections:
    def test_one_is_used_again(self, serve: Serve) -> None:
        kv, puppet = serve(daemon_of(KEYS, otherwise=right))
        ns = kv.namespace(NAMESPACE)
        for _ in range(20):
            kv.get(ns, KEYS[:1]).release()
        assert len(puppet.connections) == 1

    def test_one_that_was_closed_while_idle_is_not(self, serve: Serve) -> None:
        kv, puppet = serve(daemon_of(KEYS, otherwise=right))
        ns = kv.namespace(NAMESPACE)
        for _ in range(5):
            assert kv.get(ns, KEYS).reason == ""
            puppet.hang_up()

    def test_one_that_is_closed_at_the_next_request_is_replaced_once(self, serve: Serve) -> None:
        seen: set[int] = set()

        def closing(asked: Asked) -> bytes | None:
            if asked.connection in seen:
                return None
            seen.add(asked.connection)
            return right(asked)

        kv, puppet = serve(daemon_of(KEYS, otherwise=closing))
        ns = kv.namespace(NAMESPACE)
        for _ in range(5):
            assert kv.get(ns, KEYS[:1]).reason == ""
        assert len(puppet.connections) == 5

    def test_one_that_never_answers_is_not_tried_for_ever(self, serve: Serve) -> None:
        kv, puppet = serve(daemon_of(KEYS, otherwise=lambda asked: None))
        assert kv.get(kv.namespace(NAMESPACE), KEYS[:1]).reason == "unavailable"
        assert len([path for path in puppet.paths() if "blobs" in path]) <= 2

    def test_one_that_says_more_than_it_was_asked_is_closed(self, serve: Serve) -> None:
        """Else the surplus would be the answer to what comes next."""
        kv, _ = serve(
            daemon_of(KEYS, otherwise=lambda asked: right(asked) + payload(bytes(NBYTES)))
        )
        ns = kv.namespace(NAMESPACE)
        for index in (0, 1, 2):
            assert bytes(kv.get(ns, KEYS[index : index + 1])[0]) == payload_of(KEYS[index], NBYTES)

    def test_an_answer_after_the_deadline_is_never_another_ones(self, serve: Serve) -> None:
        late = threading.Event()

        def slow(asked: Asked) -> bytes:
            if key_of(asked) == KEYS[0]:
                late.wait(20.0)
            return right(asked)

        kv, puppet = serve(daemon_of(KEYS, otherwise=slow))
        ns = kv.namespace(NAMESPACE)
        assert kv.get(ns, KEYS[:1], timeout_s=0.1).reason == "deadline"
        late.set()
        assert bytes(kv.get(ns, KEYS[1:2])[0]) == payload_of(KEYS[1], NBYTES)
        assert len(puppet.connections) == 2

    def test_they_are_bounded(self) -> None:
        """However many threads there are."""
        together = threading.Barrier(CONNECTIONS_MAX)

        def slow(asked: Asked) -> bytes:
            together.wait(20.0)
            return right(asked)

        with HttpPuppet(daemon_of(KEYS, otherwise=slow)) as puppet:
            with connect("threads", puppet.url, timeout_s=20.0) as kv:
                ns = kv.namespace(NAMESPACE)
                threads = [
                    threading.Thread(target=lambda: kv.get(ns, KEYS[:1]).release())
                    for _ in range(4 * CONNECTIONS_MAX)
                ]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            assert len(puppet.connections) == CONNECTIONS_MAX


class TestPayloads:
    def test_a_get_copies_no_more_than_it_may(
        self, serve: Serve, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(http_reading, "COPIES_BYTES_MAX", 2 * NBYTES)
        kv, _ = serve(daemon_of(KEYS, otherwise=right))
        ns = kv.namespace(NAMESPACE)
        with kv.get(ns, KEYS) as lease:
            assert (len(lease), lease.reason) == (2, "no_room")
        buffers = [bytearray(NBYTES) for _ in KEYS]
        assert kv.get_into(ns, KEYS, buffers) == 4
        assert buffers == payloads_of(KEYS, NBYTES)

    def test_room_that_is_held_by_those_beside_it_is_waited_for(self, serve: Serve) -> None:
        """As by payloads that are under way at the same time."""
        refused: set[bytes] = set()

        def tight(asked: Asked) -> bytes:
            key = key_of(asked)
            if key == KEYS[2] and key not in refused:
                refused.add(key)
                return failed(404, "miss", reason="no_room")
            return right(asked)

        kv, _ = serve(daemon_of(KEYS, otherwise=tight))
        with kv.get(kv.namespace(NAMESPACE), KEYS) as lease:
            assert [bytes(view) for view in lease] == payloads_of(KEYS, NBYTES)
        assert refused

    def test_room_that_never_comes_ends_it(self, serve: Serve) -> None:
        full = failed(404, "miss", reason="no_room")
        kv, puppet = serve(daemon_of(KEYS, otherwise=lambda asked: full))
        lease = kv.get(kv.namespace(NAMESPACE), KEYS)
        assert (len(lease), lease.reason) == (0, "no_room")
        assert len([path for path in puppet.paths() if "/blobs/" in path]) <= 8

    def test_those_for_a_device_land_beside_it_first(
        self, serve: Serve, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        loaded: list[tuple[int, bytes]] = []

        class Device:
            nbytes = NBYTES

            def load(self, start: int, source: Any) -> None:
                loaded.append((start, source.tobytes()))

        devices = [Device() for _ in KEYS]
        monkeypatch.setattr(http_reading, "buffers_for", lambda *_, **options: devices)
        kv, _ = serve(daemon_of(KEYS, otherwise=right))
        assert kv.get_into(kv.namespace(NAMESPACE), KEYS, None) == 4
        assert loaded == [(0, payload) for payload in payloads_of(KEYS, NBYTES)]

    def test_what_is_held_is_sent_only_to_be_kept_longer(self, serve: Serve) -> None:
        facts = [
            {"tiers": ["dram"], "retention": "volatile",
             "digest": digest_of(memoryview(payload_of(key, NBYTES))).hex()}
            for key in KEYS
        ]  # fmt: skip

        def holding(asked: Asked) -> bytes:
            if asked.path.endswith("/stat"):
                return ok({"blobs": facts})
            if asked.path == "/v1/namespaces":
                return ok({"id": NAMESPACE.id.hex()})
            return answer(200, b'{"result":"exists"}') if asked.method == "PUT" else right(asked)

        kv, puppet = serve(holding)
        ns, contents = kv.namespace(NAMESPACE), payloads_of(KEYS, NBYTES)
        assert kv.put_from(ns, KEYS, contents, retention="volatile") == ["exists"] * 4
        others = [bytes(NBYTES), *contents[1:]]
        results = kv.put_from(ns, KEYS, others, retention="volatile")
        assert results == ["divergent"] + ["exists"] * 3
        with kv.put(ns, KEYS) as writer:
            assert writer.results == ["exists"] * 4
        assert (writer.results, writer.reasons) == (["exists"] * 4, [""] * 4)
        assert not [path for path in puppet.paths() if path.startswith("PUT")]
        with kv.put(ns, KEYS, retention="durable") as writer:
            pass
        assert writer.results == ["exists"] * 4
        sent = [asked.body for asked in puppet.asked if asked.method == "PUT"]
        assert sent == contents

    def test_what_was_held_and_is_gone_when_it_is_sealed_is_refused(self, serve: Serve) -> None:
        known = {"tiers": ["ssd"], "retention": "durable", "digest": "00" * 16}
        answers = [[known] * 4, [{}] * 4]

        def forgetting(asked: Asked) -> bytes:
            if asked.path == "/v1/namespaces":
                return ok({"id": NAMESPACE.id.hex()})
            return ok({"blobs": answers.pop(0)})

        kv, _ = serve(forgetting)
        with kv.put(kv.namespace(NAMESPACE), KEYS) as writer:
            assert writer.results == ["exists"] * 4
        assert (writer.results, writer.reasons) == (["refused"] * 4, ["gone"] * 4)

    @pytest.mark.parametrize(
        ("options", "why"),
        [
            ({"retention": "forever"}, "'forever'.*durable"),
            ({"parent": KEYS[1]}, "twice"),
            ({"parent": b"short"}, "parent is a key"),
        ],
    )
    def test_a_put_that_cannot_be_meant_is_the_callers_mistake(
        self, serve: Serve, options: dict[str, Any], why: str
    ) -> None:
        kv, _ = serve(daemon_of(KEYS))
        ns = kv.namespace(NAMESPACE)
        for put in (kv.put, lambda *args, **more: kv.put_from(*args, [bytes(NBYTES)] * 4, **more)):
            with pytest.raises(InvalidRequest, match=why):
                put(ns, KEYS, **options)

    def test_ranks_put_together_only_in_place(self, serve: Serve) -> None:
        layout = KVLayout((LayerGroup.attention(layers=1, heads=2, head_size=8),), head_groups=2)
        kv, _ = serve(daemon_of(KEYS))
        ns = kv.namespace(Namespace("m", layout, tokens_per_blob=4), Shard(0, 2))
        with pytest.raises(InvalidRequest, match="whole"):
            kv.put(ns, KEYS, group=WriterGroup("engine", 1))

    def test_parts_are_not_there_before_the_whole_is(self, serve: Serve) -> None:
        kv, _ = serve(daemon_of(KEYS, otherwise=lambda asked: failed(507, "full")))
        writer = kv.put(kv.namespace(NAMESPACE), KEYS)
        with pytest.raises(InvalidRequest, match="nothing was written"):
            writer.seal_parts(0, [0])
        writer[0][0] = 1
        assert writer.seal_parts(0, [0]) is False
        writer.abort()
        assert writer.reasons == ["aborted"] * 4


class TestRestarts:
    def test_a_namespace_that_the_daemon_forgot_is_declared_again(self, serve: Serve) -> None:
        known: set[str] = set()

        def forgetful(asked: Asked) -> Any:
            if asked.path == "/v1/namespaces":
                known.add("")
                return ok({"id": NAMESPACE.id.hex()})
            if not known:
                return failed(404, "unknown_namespace")
            return answer(201, b'{"result":"stored"}') if asked.method == "PUT" else right(asked)

        kv, _ = serve(forgetful)
        ns = kv.namespace(NAMESPACE)
        known.clear()
        assert kv.get(ns, KEYS[:1]).reason == ""
        known.clear()
        assert kv.get_into(ns, KEYS[:1], bytearray(NBYTES)) == 1

"""The page and its events, over HTTP and without a browser."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from blobstore.http import page
from blobstore.http.loop_lag import LoopLag
from blobstore.http.tokens import Right, Token
from blobstore.latencies import Latencies
from blobstore.settings import StoreSettings
from blobstore.store import Store
from blobstore.units import KIB, MIB
from tests.support.dashboard import TOKEN, Serving
from tests.support.polling import poll_until_async
from tests.support.store_client import StoreClient, chain, content, opaque

NBYTES = 64 * KIB
PATIENCE_S = 10.0
BEARER = {"Authorization": f"Bearer {TOKEN}"}
DOCUMENT = (Path(page.__file__).parent / "dashboard.html").read_text(encoding="utf-8")


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    made = await Store.open(StoreSettings(tmp_path, dram_bytes=4 * MIB, staging_bytes=MIB))
    yield made
    await made.close()


@pytest.fixture
async def serving(store: Store) -> AsyncIterator[Serving]:
    made = Serving(store, Latencies(), LoopLag())
    made.interval_s = 0.005
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def http(serving: Serving) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(serving.address) as session:
        yield session


async def next_event(answer: aiohttp.ClientResponse) -> dict[str, Any]:
    line = await answer.content.readline()
    assert line.startswith(b"data: ")
    assert await answer.content.readline() == b"\n"
    body: dict[str, Any] = json.loads(line[6:])
    return body


class TestPage:
    async def test_it_is_open_to_all_and_holds_no_data(self, http: aiohttp.ClientSession) -> None:
        async with http.get("/") as answer:
            assert answer.status == 200
            assert answer.content_type == "text/html"
            assert await answer.text() == DOCUMENT

    async def test_a_browser_that_has_it_is_told_so(self, http: aiohttp.ClientSession) -> None:
        async with http.get("/") as answer:
            etag = answer.headers["ETag"]
        async with http.get("/", headers={"If-None-Match": etag}) as answer:
            assert answer.status == 304
            assert await answer.read() == b""

    async def test_its_policy_allows_its_own_script_and_style_alone(
        self, http: aiohttp.ClientSession
    ) -> None:
        async with http.get("/") as answer:
            sent = answer.headers["Content-Security-Policy"]
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            assert answer.headers["Referrer-Policy"] == "no-referrer"
        rules = dict(rule.strip().split(" ", 1) for rule in sent.split(";"))
        assert rules["default-src"] == "'none'"
        assert rules["connect-src"] == "'self'"
        assert rules["frame-ancestors"] == "'none'"
        assert "unsafe" not in sent
        for kind in ("script", "style"):
            (text,) = re.findall(f"<{kind}>(.*?)</{kind}>", DOCUMENT, re.DOTALL)
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            assert rules[f"{kind}-src"] == f"'sha256-{digest}'"

    def test_it_needs_nothing_from_elsewhere(self) -> None:
        assert re.findall(r"(?:src|href)=\"(?!metrics|data:)", DOCUMENT) == []
        urls = set(re.findall(r"https?://[\w./]+", DOCUMENT))
        assert urls == {"http://www.w3.org/2000/svg"}  # a name, not an address

    def test_texts_from_outside_are_never_taken_for_markup(self) -> None:
        assert re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write", DOCUMENT) == []
        assert re.findall(r"\son\w+=|\sstyle=", DOCUMENT) == []


class TestEvents:
    @pytest.mark.parametrize("sent", [{}, {"Authorization": "Bearer wrong"}])
    async def test_they_need_a_token(
        self, http: aiohttp.ClientSession, sent: dict[str, str]
    ) -> None:
        async with http.get("/v1/events", headers=sent) as answer:
            assert answer.status == 401
            assert answer.headers["WWW-Authenticate"] == "Bearer"

    async def test_they_tell_the_same_numbers_as_the_store(
        self, http: aiohttp.ClientSession, serving: Serving, store: Store
    ) -> None:
        ns = opaque(NBYTES, "a model")
        await store.declare(ns.encode())
        client = StoreClient(store)
        await client.put(ns, chain(3), [content(n, NBYTES) for n in range(3)])
        (await client.get(ns, chain(5))).release()
        store.uses.drain(most_s=PATIENCE_S)
        started_s = serving.latencies.clock()
        serving.latencies.note("http", "get", started_s, "busy")
        async with http.get("/v1/events", headers=BEARER) as answer:
            assert answer.status == 200
            assert answer.content_type == "text/event-stream"
            assert answer.headers["Cache-Control"] == "no-store"
            event = await next_event(answer)
        wanted = store.stats()
        assert event["boot"] == f"{wanted.pop('boot_id'):016x}"
        told = event["stats"]
        assert 0 <= told.pop("uptime_s") <= wanted.pop("uptime_s")
        assert told.pop("plan").keys() == wanted.pop("plan").keys()  # its ages go on
        assert told == wanted
        assert told["counters"]["hit_blobs"] == {"dram": 3}
        assert told["counters"]["missed_blobs"] == {"absent": 2}
        assert [(o["door"], o["verb"], sum(o["counts"])) for o in event["operations"]] == [
            ("http", "get", 1)
        ]
        assert event["failures"] == [{"door": "http", "verb": "get", "error": "busy", "count": 1}]
        assert [slow["verb"] for slow in event["slowest"]] == ["get"]
        assert event["lag"] == {"last_s": 0.0, "max_s": 0.0, "p99_s": 0.0}
        (listed,) = event["listed"]["namespaces"]
        assert (listed["model"], listed["blobs"]) == ("a model", 3)
        assert listed["dram_bytes"] == 3 * NBYTES

    async def test_they_go_on(self, http: aiohttp.ClientSession, store: Store) -> None:
        async with http.get("/v1/events", headers=BEARER) as answer:
            events = [await next_event(answer) for _ in range(2 * page.LISTS_EVERY)]
        uptimes = [event["stats"]["uptime_s"] for event in events]
        assert uptimes == sorted(set(uptimes))
        with_namespaces = [n for n, event in enumerate(events) if event["listed"] is not None]
        assert with_namespaces == [0, page.LISTS_EVERY]

    async def test_a_token_is_told_of_the_namespaces_that_it_may_read(
        self, http: aiohttp.ClientSession, serving: Serving, store: Store
    ) -> None:
        for model in ("secret", "open"):
            await store.declare(opaque(NBYTES, model).encode())
        serving.tokens["narrow"] = Token("narrow", Right.READ, ("open",))
        headers = {"Authorization": "Bearer narrow"}
        async with http.get("/v1/events", headers=headers) as answer:
            line = await answer.content.readline()
        assert b"secret" not in line
        names = [ns["model"] for ns in json.loads(line[6:])["listed"]["namespaces"]]
        assert names == ["open"]

    async def test_clients_are_listed_for_tokens_that_see_everything(
        self, http: aiohttp.ClientSession, serving: Serving, store: Store
    ) -> None:
        ns = opaque(NBYTES, "open")
        await store.declare(ns.encode())
        client, _ = StoreClient(store, "writer"), StoreClient(store, "idle")
        writing = await client.reserve(ns, chain(1))
        async with http.get("/v1/events", headers=BEARER) as answer:
            clients = (await next_event(answer))["listed"]["clients"]
        assert [(c["name"], c["reservations"], c["lent_bytes"]) for c in clients] == [
            ("writer", 1, NBYTES),
            ("idle", 0, 0),
        ]
        serving.tokens["narrow"] = Token("narrow", Right.READ, ("open",))
        async with http.get("/v1/events", headers={"Authorization": "Bearer narrow"}) as answer:
            assert (await next_event(answer))["listed"]["clients"] is None
        writing.abort()

    async def test_of_many_namespaces_the_largest_are_told(
        self,
        http: aiohttp.ClientSession,
        serving: Serving,
        store: Store,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(page, "NAMESPACES_SEEN_MAX", 30)
        spaces = [opaque(NBYTES, f"model {n}") for n in range(40)]
        for ns in spaces:
            await store.declare(ns.encode())
        client = StoreClient(store)
        await client.put(spaces[25], chain(1), [content(1, NBYTES)])
        async with http.get("/v1/events", headers=BEARER) as answer:
            listed = (await next_event(answer))["listed"]
        assert listed["seen"] == 30
        assert len(listed["namespaces"]) == page.NAMESPACES_SHOWN
        assert listed["namespaces"][0]["model"] == "model 25"

    async def test_they_end_when_the_token_does(
        self, http: aiohttp.ClientSession, serving: Serving
    ) -> None:
        async with http.get("/v1/events", headers=BEARER) as answer:
            await next_event(answer)
            serving.tokens.clear()
            await asyncio.wait_for(answer.content.read(), 10.0)
            assert answer.content.at_eof()

    async def test_they_end_at_once_when_the_door_closes(
        self, store: Store, serving: Serving
    ) -> None:
        await serving.stop()
        serving.interval_s = 3600.0
        await serving.start()
        async with (
            aiohttp.ClientSession(serving.address) as http,
            http.get("/v1/events", headers=BEARER) as answer,
        ):
            await next_event(answer)
            await asyncio.wait_for(serving.stop(), 4.0)
            assert await asyncio.wait_for(answer.content.read(), 10.0) == b""

    async def test_too_many_viewers_are_refused_and_those_who_leave_make_room(
        self, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(page, "VIEWERS_MAX", 1)
        first = await http.get("/v1/events", headers=BEARER)
        await next_event(first)
        async with http.get("/v1/events", headers=BEARER) as refused:
            assert refused.status == 503
        first.close()

        async def served() -> bool:
            async with http.get("/v1/events", headers=BEARER) as answer:
                return answer.status == 200

        async with asyncio.timeout(10.0):
            while not await served():
                pass

    async def test_a_viewer_that_reads_nothing_is_cut_off(
        self,
        serving: Serving,
        store: Store,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(page, "WRITE_TIMEOUT_S", 0.05)
        filler = {"filler": "x" * MIB}
        monkeypatch.setattr(page.Snapshots, "now", lambda *_, **__: filler)
        host, port = serving.address.removeprefix("http://").strip("/").split(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1 << 16)
        writer.write(f"GET /v1/events HTTP/1.1\r\nHost: {host}\r\n".encode())
        writer.write(f"Authorization: Bearer {TOKEN}\r\n\r\n".encode())
        await poll_until_async(lambda: serving.n_served == 1, 10.0, "the stream was cut off")
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()

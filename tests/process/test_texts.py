"""Texts in a real daemon: over restarts and crashes, and erased from every file."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from blobstore.clients import Client, Namespace, Terms
from blobstore.text_entry import TextEntry
from blobstore.text_shelf import DIRECTORY, KEYS_NAME, Shelf
from blobstore.units import MIB
from tests.support.blobs import TOKENS, opaque, payloads_of
from tests.support.daemon import Daemon, daemon
from tests.support.http_daemon import HttpDaemon, http_daemon, key, put
from tests.support.polling import poll_until, wait_s
from tests.support.texts import found_in
from tests.support.tmpfs import tmpfs

NBYTES = 70_000
KV = opaque(NBYTES)
SECRET = "what nobody may read"
AT_REST_S = 10.0
"""An order of magnitude beyond what it takes."""
LONG_TEXT = 60_000
"""Bytes that nothing compresses."""
LOST_S = 1.0
"""What a crash may lose at most."""


def ids_of(seed: int, n: int) -> list[int]:
    """Token ids of a context of `n` blobs."""
    rng = random.Random(seed)
    return [1_000_000 + seed, *(rng.randrange(50_000) for _ in range(n * TOKENS - 1))]


def tell(kv: Client, seed: int, n: int, namespace: Namespace = KV) -> list[bytes]:
    """Put a context with its tokens and a text; its keys."""
    ids = ids_of(seed, n)
    ns = kv.namespace(namespace)
    keys = ns.keys(ids)
    kv.put_from(ns, keys, payloads_of(keys, NBYTES), token_ids=ids, text=f"{SECRET} {seed}")
    return list(keys)


def at_rest(kv: Client) -> int:
    """Wait until none is on its way; how many are kept."""
    poll_until(lambda: kv.stats()["texts"]["pending"] == 0, AT_REST_S, "texts are at rest")
    kept: int = kv.stats()["texts"]["entries"]
    return kept


@contextmanager
def shelf(run: Daemon) -> Iterator[Shelf]:
    """The texts of a daemon that has ended."""
    found = Shelf.open(run.data, quota_bytes=1 << 30, retention_s=1e9, wall_clock=lambda: 1.0)
    try:
        yield found
    finally:
        found.close()


def read(run: Daemon, keys: list[bytes]) -> list[TextEntry | None]:
    with shelf(run) as found:
        entries, damaged = found.read(KV.id, keys)
    assert not damaged
    return entries


def right(entries: list[TextEntry | None], seed: int) -> list[bool]:
    """Which are there; AssertionError if one is not what was told."""
    ids = ids_of(seed, len(entries))
    for at, entry in enumerate(entries):
        if entry is not None:
            wanted = ids[at * TOKENS : (at + 1) * TOKENS]
            assert [*memoryview(entry.tokens).cast("I")] == wanted
            assert (entry.position, entry.nbytes) == (at * TOKENS, NBYTES)
    return [entry is not None for entry in entries]


@pytest.fixture
def start(tmp_path: Path) -> Callable[[], Daemon]:
    def start() -> Daemon:
        environ = {"BLOBSTORE__REBUILD__TEXT": "text", "BLOBSTORE__LOG__LEVEL": "debug"}
        run = Daemon(tmp_path, environ=environ)
        run.wait_ready()
        return run

    return start


def test_texts_and_terms_outlast_a_restart(start: Callable[[], Daemon]) -> None:
    run = start()
    with Client(run.address, timeout_s=20.0) as kv:
        keys = tell(kv, 1, 20)
        ns = kv.namespace(KV, terms=Terms(text="off"))
        assert kv.drop(ns, keys[:1]) == 20
    run.process.terminate()
    assert run.wait() == 0
    assert right(read(run, keys), 1) == [True] * 20
    run = start()
    with Client(run.address, timeout_s=20.0) as kv:
        ns = kv.namespace(KV)
        assert kv.match(ns, keys).blobs == 0
        assert at_rest(kv) == 20
        tell(kv, 2, 3)
        assert at_rest(kv) == 20, "it was told to keep none"
        assert kv.forget(ns, keys[5:6]) == 15
    run.kill()
    entries = read(run, keys)
    assert right(entries, 1) == [True] * 5 + [False] * 15
    assert entries[0] is not None
    assert entries[0].text == f"{SECRET} 1"


@pytest.mark.parametrize("seed", range(2))
def test_a_crash_loses_what_came_last_and_damages_nothing(
    start: Callable[[], Daemon], seed: int
) -> None:
    rng = random.Random(seed)
    run = start()
    known: dict[int, list[bytes]] = {}
    for crash in range(3):
        with Client(run.address, timeout_s=20.0) as kv:
            for number in range(4):
                context = 10 * crash + number
                known[context] = tell(kv, context, 8)
            wait_s(LOST_S)
            last = 10 * crash + 9
            known[last] = tell(kv, last, 8)
            run.kill_after(rng.uniform(0.0, LOST_S))
        for context, keys in known.items():
            found = right(read(run, keys), context)
            assert all(found) or context % 10 == 9, (seed, crash, context)
        run = start()
    run.kill()


def test_nothing_of_what_was_forgotten_is_left(start: Callable[[], Daemon], tmp_path: Path) -> None:
    run = start()
    texts = run.data / DIRECTORY
    with Client(run.address, timeout_s=20.0) as kv:
        keys = tell(kv, 1, 6)
        assert at_rest(kv) == 6
        before = (texts / KEYS_NAME).read_bytes()[4096:]
        secrets = [before[at : at + 32] for at in range(0, 6 * 32, 32)]
        assert found_in(run.data, *secrets) == set(secrets)
        shutil.copytree(texts, tmp_path / "before")
        assert kv.forget(kv.namespace(KV), keys[2:]) == 4
        left = found_in(run.data, *secrets)
        assert len(left) == 2
    run.kill()
    assert found_in(run.data, *secrets) == left
    assert right(read(run, keys), 1) == [True] * 2 + [False] * 4
    # Whoever has kept the database has nothing to read it with.
    shutil.copy(tmp_path / "before" / "data.mdb", texts)
    with shelf(run) as found:
        entries, damaged = found.read(KV.id, keys)
    assert (right(entries, 1), damaged) == ([True] * 2 + [False] * 4, keys[2:])


def test_no_file_and_no_log_tells_tokens(start: Callable[[], Daemon], tmp_path: Path) -> None:
    run = start()
    with Client(run.address, timeout_s=20.0) as kv:
        keys = tell(kv, 1, 6)
        kv.put_from(kv.namespace(KV), keys, payloads_of(keys, NBYTES), token_ids=range(6 * TOKENS))
        assert at_rest(kv) == 6
    packed = b"".join(number.to_bytes(4, "little") for number in ids_of(1, 6))
    sought = [SECRET.encode(), b"1000001", *(packed[at : at + 12] for at in range(0, 96, 12))]
    assert not found_in(tmp_path, *sought)
    run.process.terminate()
    assert run.wait() == 0
    assert not found_in(tmp_path, *sought)


@pytest.mark.root
def test_a_full_disk_under_texts_holds_up_no_put_and_no_forget(tmp_path: Path) -> None:
    texts = tmp_path / "data" / DIRECTORY
    told: dict[int, list[bytes]] = {}

    def tell_more(kv: Client, n: int) -> int:
        """Put contexts with long texts; how many are on their way to disk after a while."""
        for seed in range(len(told), len(told) + n):
            ids, ns = ids_of(seed, 1), kv.namespace(KV)
            told[seed] = list(keys := ns.keys(ids))
            text = random.Random(seed).randbytes(LONG_TEXT).hex()
            payloads = payloads_of(keys, NBYTES)
            assert kv.put_from(ns, keys, payloads, token_ids=ids, text=text) == ["stored"]
        wait_s(LOST_S)
        pending: int = kv.stats()["texts"]["pending"]
        return pending

    environ = {"BLOBSTORE__REBUILD__TEXT": "text"}
    with tmpfs(texts, 4 * MIB):
        with daemon(tmp_path, environ=environ) as run, Client(run.address, timeout_s=20.0) as kv:
            while not (pending := tell_more(kv, 8)):
                assert len(told) < 100
            assert pending <= 8
            assert run.said.count("texts cannot be kept now") == 1
            first = told[0]
            assert kv.forget(kv.namespace(KV), first) == 1
            assert kv.match(kv.namespace(KV), first).blobs == 0
            run.process.terminate()
            assert run.wait() == 0
        with daemon(tmp_path, environ=environ) as run, Client(run.address, timeout_s=20.0) as kv:
            assert tell_more(kv, 12) > 0, "full again, after a restart too"
            subprocess.run(["mount", "-o", f"remount,size={64 * MIB}", texts], check=True)
            known = at_rest(kv)
            assert known >= len(told) - 1 - pending, "what waited when it stopped may be lost"
            run.process.terminate()
            assert run.wait() == 0
        assert read(run, first) == [None]
        del told[0]
        kept = [seed for seed, keys in told.items() if right(read(run, keys), seed) == [True]]
        assert len(kept) == known


def test_without_a_disk_they_are_kept_in_memory(tmp_path: Path) -> None:
    with daemon(tmp_path, "--ssd", "off") as run, Client(run.address, timeout_s=20.0) as kv:
        keys = tell(kv, 1, 6)
        assert at_rest(kv) == 6
        assert kv.forget(kv.namespace(KV), keys[1:]) == 5
        assert at_rest(kv) == 1
        assert not (run.data / DIRECTORY).exists()


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpDaemon]:
    with http_daemon(tmp_path_factory.mktemp("texts")) as running:
        yield running


class TestOverHttp:
    def test_tokens_are_told_of_blobs_that_are_held(self, door: HttpDaemon) -> None:
        declared = {"model": "m", "opaque_bytes": 8, "tokens_per_blob": 2, "hash_scheme": "own"}
        ns = f"/v1/namespaces/{door.post('/v1/namespaces', declared).json['id']}"
        put(door, f"{ns}/blobs/{key(1)}", bytes(8))
        put(door, f"{ns}/blobs/{key(2)}?parent={key(1)}", bytes(8))
        keys = [key(1), key(2), key(3)]
        told = door.post(f"{ns}/texts", {"keys": keys, "token_ids": [1, 2, 3, 4, 5], "text": "x"})
        assert told.json == {"count": 2}
        assert door.post(f"{ns}/forget", {"keys": keys[:1]}).json == {"count": 2}

    def test_what_does_not_fit_is_refused(self, door: HttpDaemon) -> None:
        ns = door.declare(8, "strict", tokens_per_blob=2)
        put(door, f"{ns}/blobs/{key(1)}", bytes(8))
        wrong_key = door.post(f"{ns}/texts", {"keys": [key(1)], "token_ids": [1, 2]})
        assert (wrong_key.status, wrong_key.error) == (400, "invalid_request")
        assert "not those of blob" in wrong_key.json["message"]
        for ids in ([1], [1, 2, 3], [], [-1, 2], [1 << 32, 2], ["a", "b"], [1.5, 2]):
            asked = {"keys": [key(1)], "token_ids": ids}
            assert door.post(f"{ns}/texts", asked).status == 400, ids
        long = {"keys": [key(1)], "token_ids": [1, 2], "text": "x" * ((1 << 20) + 1)}
        assert door.post(f"{ns}/texts", long).status == 400

    def test_terms_are_told_with_a_declaration(self, door: HttpDaemon) -> None:
        body = {"model": "terms", "opaque_bytes": 8}
        for terms in ({"text": "off"}, {"recall": "both", "divergence": "report"}, {}):
            assert door.post("/v1/namespaces", body | {"terms": terms}).status == 200
        for wrong in ({"text": "always"}, {"texts": "off"}):
            assert door.post("/v1/namespaces", body | {"terms": wrong}).status == 400
        assert door.post("/v1/namespaces?recall=fetch", body).status == 200
        assert door.post("/v1/namespaces?recall=soon", body).status == 400
        assert door.post("/v1/namespaces?tokens=7", body).status == 400

    def test_metrics_count_them(self, door: HttpDaemon) -> None:
        text = door.ask("GET", "/metrics", token=None).body.decode()
        assert "blobstore_text_entries " in text
        assert "blobstore_text_refused_total " in text

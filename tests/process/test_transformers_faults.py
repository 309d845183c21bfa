"""A daemon that is gone, frozen or dying is a miss with a reason that is said once."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from blobstore.clients import Client
from blobstore.clients.transformers import StoredCache
from tests.support.daemon import Daemon, daemon
from tests.support.http_daemon import http_daemon
from tests.support.tiny_models import answer, prompt, tiny

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

STEP = 8
ANSWER = 8
LOGGER = "blobstore.clients.transformers.stored_cache"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Daemon]:
    with daemon(tmp_path) as run:
        yield run


class Fragile(Client):
    """A client during whose calls something may happen."""

    meanwhile: Callable[[], None] | None = None

    def get(self, *args: Any, **options: Any) -> Any:
        return self._then(super().get(*args, **options))

    def put(self, *args: Any, **options: Any) -> Any:
        return self._then(super().put(*args, **options))

    def _then(self, given: Any) -> Any:
        if self.meanwhile is not None:
            self.meanwhile()
        return given


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message.partition(": ")[2] for record in caplog.records if record.name == LOGGER]


def turn(cache: StoredCache, model: Any, ids: Any) -> tuple[Any, int, int]:
    past, n = cache.restore(ids, timeout_s=5.0)
    out = answer(model, ids, ANSWER, past)
    return out, n, cache.store(out, past, timeout_s=5.0)


@pytest.mark.parametrize("kind", ["grouped", "sliding and full"])
def test_a_daemon_that_is_killed_and_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    model = tiny(kind)
    ids = prompt(60, 1)
    plain = answer(model, ids, ANSWER)
    with daemon(tmp_path) as run, Client(run.address, timeout_s=20.0) as kv:
        cache = StoredCache(kv, model, tokens_per_blob=STEP, retention="durable")
        out, n, new = turn(cache, model, ids)
        assert (n, new) == (0, 8)
        run.kill()
        for _ in range(2):
            out, n, new = turn(cache, model, ids)
            assert (n, new) == (0, 0)
            assert torch.equal(out, plain)
        assert said(caplog) == ["restore is a miss: unavailable", "store is a miss: unavailable"]
        caplog.clear()
        with daemon(tmp_path) as again:
            assert again.address == run.address
            out, n, new = turn(cache, model, ids)  # read from SSD
            assert (n, new) == (56, 0)
            assert torch.equal(out, plain)
            assert said(caplog) == ["restore works again", "store works again"]


def test_a_frozen_daemon(run: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny("grouped")
    ids = prompt(60, 1)
    with Client(run.address, timeout_s=20.0) as kv:
        cache = StoredCache(kv, model, tokens_per_blob=STEP)
        out, _, _ = turn(cache, model, ids)
        run.process.send_signal(signal.SIGSTOP)
        past, n = cache.restore(ids, timeout_s=0.1)
        assert n == 0
        assert torch.equal(answer(model, ids, ANSWER, past), out)
        assert cache.store(out, past, timeout_s=0.1) == 0
        assert said(caplog) == ["restore is a miss: deadline", "store is a miss: deadline"]
        run.process.send_signal(signal.SIGCONT)
        assert turn(cache, model, ids)[1:] == (56, 0)


@pytest.mark.parametrize("kind", ["grouped", "sliding"])
def test_a_daemon_that_dies_while_it_is_read_or_written(run: Daemon, kind: str) -> None:
    model = tiny(kind)
    ids = prompt(60, 1)
    plain = answer(model, ids, ANSWER)
    with Fragile(run.address, timeout_s=20.0) as kv:
        cache = StoredCache(kv, model, tokens_per_blob=STEP)
        turn(cache, model, ids)
        kv.meanwhile = run.kill
        past, n = cache.restore(ids)
        assert n == 56  # leased memory outlives the daemon
        assert torch.equal(answer(model, ids, ANSWER, past), plain)


def test_a_daemon_that_dies_while_it_is_written(
    run: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny("grouped")
    ids = prompt(60, 1)
    with Fragile(run.address, timeout_s=20.0) as kv:
        cache = StoredCache(kv, model, tokens_per_blob=STEP, retention="durable")
        kv.meanwhile = run.kill
        out, n, new = turn(cache, model, ids)
        assert (n, new) == (0, 0)
        assert torch.equal(out, answer(model, ids, ANSWER))
        assert said(caplog) == ["store is a miss: unavailable"]


def test_blobs_that_go_between_two_calls(run: Daemon) -> None:
    model = tiny("sliding and full")
    ids = prompt(90, 1)
    plain = answer(model, ids, ANSWER)
    with Fragile(run.address, timeout_s=20.0) as kv:
        cache = StoredCache(kv, model, tokens_per_blob=STEP)
        turn(cache, model, ids)
        keys = cache.ns.keys(ids[0])
        held = len(keys)

        def drop_one() -> None:
            nonlocal held
            held -= 3
            kv.drop(cache.ns, keys[held:])

        match = kv.match

        def matched(*args: Any, **options: Any) -> Any:
            hit = match(*args, **options)
            drop_one()
            return hit

        kv.match = matched  # type: ignore[method-assign]
        past, n = cache.restore(ids)
        assert n == 8 * STEP
        assert torch.equal(answer(model, ids, ANSWER, past), plain)
        assert cache.store(ids, past) == 0  # orphans: what they continue has gone again


def test_a_daemon_elsewhere(tmp_path: Path) -> None:
    model = tiny("sliding and full")
    ids = prompt(60, 1)
    with (
        http_daemon(tmp_path) as door,
        Client(door.url, timeout_s=20.0, token=door.token) as kv,
    ):
        cache = StoredCache(kv, model, tokens_per_blob=STEP)
        out, n, new = turn(cache, model, ids)
        assert (n, new) == (0, 8)
        assert turn(cache, model, ids)[1:] == (56, 0)
        session = kv.session("conversation 7")
        past, n = cache.restore(out, session=session)
        longer = answer(model, out, ANSWER, past)
        assert (n, cache.store(longer, past, session=session)) == (64, 1)
        assert torch.equal(longer, answer(model, out, ANSWER))

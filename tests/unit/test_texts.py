from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from blobstore import texts as module
from blobstore.errors import SetupError, StorageFailed
from blobstore.index import NamespaceState
from blobstore.settings import RebuildSettings
from blobstore.terms import Terms
from blobstore.text_entry import TextEntry
from blobstore.text_shelf import DIRECTORY, Kept, Shelf
from blobstore.texts import Texts
from tests.support.clock import FakeClock
from tests.support.polling import poll_until_async
from tests.support.texts import NAMESPACE, NBYTES, found_in, run_of, texts_of

CHAIN = run_of(8)
KEYS = list(CHAIN)
TEXT = RebuildSettings(text="text")

Open = Callable[..., Awaitable[Texts]]


@pytest.fixture(params=["disk", "memory"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path if request.param == "disk" else None


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def reach(
    directory: Path | None, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Open]:
    """Opens texts, which are closed in the end; nothing waits for others."""
    monkeypatch.setattr(module, "COMMIT_S", 0.0)
    opened: list[Texts] = []

    async def reach(settings: RebuildSettings = TEXT) -> Texts:
        texts = await Texts.open(
            settings,
            directory,
            threads=lambda n, name: ThreadPoolExecutor(n, name),
            clock=clock,
            wall_clock=clock,
        )
        opened.append(texts)
        return texts

    yield reach
    for texts in opened:
        await texts.close()


@pytest.fixture
async def texts(reach: Open) -> Texts:
    return await reach()


@pytest.fixture
def ns() -> NamespaceState:
    return NamespaceState(NAMESPACE)


async def at_rest(texts: Texts) -> None:
    await poll_until_async(lambda: texts.stats()["pending"] == 0, what="all is at rest")


async def held(texts: Texts, ns: NamespaceState) -> list[int]:
    return [at for at, entry in enumerate(await texts.chain(ns, KEYS)) if entry is not None]


def hold_up(monkeypatch: pytest.MonkeyPatch, name: str) -> threading.Event:
    """Calls of a shelf's method go on once the event is set."""
    go, method = threading.Event(), getattr(Shelf, name)

    def held_up(self: Shelf, *args: object) -> object:
        assert go.wait(20.0)
        return method(self, *args)

    monkeypatch.setattr(Shelf, name, held_up)
    return go


class TestNotes:
    async def test_they_are_read_before_and_after_they_are_at_rest(
        self, texts: Texts, ns: NamespaceState
    ) -> None:
        texts.note(ns, CHAIN)
        assert await texts.chain(ns, KEYS) == list(CHAIN.values())
        assert await texts.known(ns, KEYS) == 8
        await at_rest(texts)
        assert await texts.chain(ns, KEYS) == list(CHAIN.values())
        assert await texts.known(ns, [*KEYS[:3], bytes(32), KEYS[4]]) == 3
        assert texts.stats()["entries"] == 8

    async def test_and_while_they_are_written(
        self, texts: Texts, ns: NamespaceState, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        go = hold_up(monkeypatch, "keep")
        texts.note(ns, dict(list(CHAIN.items())[:4]))
        await poll_until_async(lambda: not texts._pending.waiting)
        texts.note(ns, dict(list(CHAIN.items())[4:]))
        assert await texts.known(ns, KEYS) == 8
        assert await texts.chain(ns, KEYS) == list(CHAIN.values())
        go.set()
        await at_rest(texts)
        assert await texts.known(ns, KEYS) == 8

    async def test_what_is_unknown_is_none(self, texts: Texts, ns: NamespaceState) -> None:
        assert await texts.chain(ns, KEYS) == [None] * 8
        assert await texts.known(ns, KEYS) == 0
        assert await texts.ancestors(ns, KEYS[3]) == []
        assert await texts.forget(ns, KEYS) == set()
        assert await texts.chain(ns, []) == []

    async def test_tokens_of_another_key_are_never_given(
        self, texts: Texts, ns: NamespaceState
    ) -> None:
        texts.note(ns, {KEYS[0]: CHAIN[KEYS[1]], KEYS[2]: CHAIN[KEYS[2]]})
        assert await texts.chain(ns, KEYS[:3]) == [None, None, CHAIN[KEYS[2]]]
        await at_rest(texts)
        assert await held(texts, ns) == [2]
        assert texts.stats()["refused"] == 1

    async def test_only_new_ones_if_so_asked(self, texts: Texts, ns: NamespaceState) -> None:
        texts.note(ns, CHAIN)
        await at_rest(texts)
        other = {KEYS[0]: replace(CHAIN[KEYS[0]], digest=b"another digest..")}
        texts.note(ns, other, only_new=True)
        await at_rest(texts)
        assert await texts.chain(ns, KEYS[:1]) == [CHAIN[KEYS[0]]]
        texts.note(ns, other)
        await at_rest(texts)
        assert await texts.chain(ns, KEYS[:1]) == list(other.values())

    async def test_a_chain_is_walked_up_through_what_is_pending(
        self, texts: Texts, ns: NamespaceState
    ) -> None:
        pairs = list(CHAIN.items())
        texts.note(ns, dict(pairs[:3]))
        await at_rest(texts)
        texts._backoff.fault()  # nothing more comes to rest
        texts.note(ns, dict(pairs[3:5]))
        assert await texts.ancestors(ns, KEYS[4]) == pairs[4::-1]
        assert await texts.ancestors(ns, KEYS[4], 3) == pairs[4:1:-1]
        assert await texts.ancestors(ns, KEYS[6]) == []


class TestTerms:
    async def test_the_configuration_says_what_holds(self, reach: Open, ns: NamespaceState) -> None:
        texts = await reach(RebuildSettings(text="off", recall="never", divergence="reject"))
        assert texts.terms(ns) == Terms("off", "never", "reject")
        await texts.tell(ns, Terms(recall="both"))
        await texts.tell(ns, Terms(divergence="report"))
        assert texts.terms(ns) == Terms("off", "both", "report")
        assert texts.terms(NamespaceState(replace(NAMESPACE, salt="s"))).recall == "never"

    @pytest.mark.parametrize(
        ("allowed", "kept"), [("off", None), ("tokens", ""), ("text", "what was said")]
    )
    async def test_they_say_what_is_kept(
        self, texts: Texts, ns: NamespaceState, allowed: str, kept: str | None
    ) -> None:
        await texts.tell(ns, Terms(text=allowed))
        texts.note(ns, texts_of(range(16), text="what was said"))
        await at_rest(texts)
        (entry,) = await texts.chain(ns, list(texts_of(range(16))))
        assert (entry.text if entry is not None else None) == kept

    async def test_a_disk_that_refuses_them_changes_nothing(
        self,
        texts: Texts,
        ns: NamespaceState,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        def refuse(self: Shelf, *args: object) -> None:
            raise StorageFailed(5, "the disk refuses")

        monkeypatch.setattr(Shelf, "set_terms", refuse)
        await texts.tell(ns, Terms(recall="both"))
        assert texts.terms(ns).recall == "both"
        assert "the disk refuses" in caplog.text


class TestForgetting:
    async def test_what_is_at_rest_and_what_is_pending_goes(
        self, texts: Texts, ns: NamespaceState
    ) -> None:
        pairs = list(CHAIN.items())
        texts.note(ns, dict(pairs[:3] + pairs[5:7]))
        await at_rest(texts)
        texts._backoff.fault()
        texts.note(ns, dict(pairs[3:5] + pairs[7:]))
        assert await held(texts, ns) == list(range(8))
        assert await texts.forget(ns, [KEYS[2]]) == set(KEYS[2:])
        assert await held(texts, ns) == [0, 1]
        assert texts.stats()["forgotten"] == 6

    async def test_and_what_is_being_written(
        self, texts: Texts, ns: NamespaceState, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        go = hold_up(monkeypatch, "keep")
        texts.note(ns, CHAIN)
        await poll_until_async(lambda: not texts._pending.waiting)
        forgetting = asyncio.ensure_future(texts.forget(ns, [KEYS[3]]))
        await asyncio.sleep(0)
        assert not forgetting.done()
        go.set()
        assert await forgetting == set(KEYS[3:])
        await at_rest(texts)
        assert await held(texts, ns) == [0, 1, 2]

    async def test_a_disk_that_refuses_is_told_of(
        self, texts: Texts, ns: NamespaceState, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        texts.note(ns, CHAIN)
        await at_rest(texts)

        def refuse(self: Shelf, *args: object) -> None:
            raise StorageFailed(5, "the disk refuses")

        monkeypatch.setattr(Shelf, "forget", refuse)
        with pytest.raises(StorageFailed):
            await texts.forget(ns, KEYS)


class TestFaults:
    async def test_what_could_not_be_kept_is_tried_again(
        self,
        texts: Texts,
        ns: NamespaceState,
        clock: FakeClock,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        keep, faults = Shelf.keep, iter([True, True])

        def refuse_twice(self: Shelf, batch: object) -> Kept:
            if next(faults, False):
                raise StorageFailed(28, "no space")
            return keep(self, batch)  # type: ignore[arg-type]

        monkeypatch.setattr(Shelf, "keep", refuse_twice)
        texts.note(ns, CHAIN)
        for _ in range(2):
            await poll_until_async(lambda: texts._backoff.active)
            assert await texts.chain(ns, KEYS) == list(CHAIN.values()), (
                "it can be read all the same"
            )
            assert texts.stats()["entries"] == 0
            clock.advance(10.0)
            texts.tick()
        await at_rest(texts)
        assert texts.stats()["entries"] == 8
        assert caplog.text.count("cannot be kept") == 1

    async def test_beyond_what_may_wait_nothing_is_kept(
        self, reach: Open, ns: NamespaceState, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "PENDING_BYTES_MAX", 2000)
        texts = await reach()
        texts._backoff.fault()
        texts.note(ns, CHAIN)
        stats = texts.stats()
        assert stats["pending"] + stats["not_kept"] == 8
        assert 0 < stats["not_kept"] < 8

    async def test_what_cannot_be_read_is_a_miss(
        self, texts: Texts, ns: NamespaceState, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        texts.note(ns, CHAIN)
        await at_rest(texts)

        def refuse(self: Shelf, *args: object) -> None:
            raise StorageFailed(5, "the disk refuses")

        for name in ("read", "known", "ancestors"):
            monkeypatch.setattr(Shelf, name, refuse)
        assert await texts.chain(ns, KEYS) == [None] * 8
        assert await texts.known(ns, KEYS) == 0
        assert await texts.ancestors(ns, KEYS[7]) == []
        assert texts.stats()["damaged"] == 8

    async def test_what_is_damaged_is_counted_and_may_be_noted_anew(
        self, texts: Texts, ns: NamespaceState
    ) -> None:
        texts.note(ns, CHAIN)
        await at_rest(texts)
        shelf = texts._shelf
        assert shelf is not None
        shelf._keys.wipe([2])
        found = await texts.chain(ns, KEYS)
        assert found.count(None) == 1
        assert texts.stats()["damaged"] == 1
        texts.note(ns, CHAIN, only_new=True)
        await at_rest(texts)
        assert await texts.chain(ns, KEYS) == list(CHAIN.values())

    async def test_old_ones_expire(
        self, texts: Texts, ns: NamespaceState, clock: FakeClock
    ) -> None:
        texts.note(ns, CHAIN)
        await at_rest(texts)
        clock.advance(TEXT.text_retention_days * 86400 + 1)
        texts.tick()
        await poll_until_async(lambda: texts.stats()["evicted"] == 8)
        assert await held(texts, ns) == []
        assert texts.stats()["bytes"] == 0


class TestOnDisk:
    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        return tmp_path

    async def test_all_outlasts_a_restart(self, reach: Open, ns: NamespaceState) -> None:
        texts = await reach()
        texts.note(ns, CHAIN)
        await texts.tell(ns, Terms(recall="both"))
        await texts.close()
        texts = await reach()
        assert await texts.chain(ns, KEYS) == list(CHAIN.values())
        assert texts.terms(ns).recall == "both"
        assert texts.stats()["kv_bytes"] == 8 * NBYTES

    async def test_without_texts_there_are_no_files(self, reach: Open, tmp_path: Path) -> None:
        texts = await reach()
        await texts.close()
        assert not (tmp_path / DIRECTORY).exists()

    async def test_what_holds_no_texts_is_refused_and_nothing_left_open(
        self, reach: Open, ns: NamespaceState, tmp_path: Path
    ) -> None:
        texts = await reach()
        texts.note(ns, CHAIN)
        await texts.close()
        (tmp_path / DIRECTORY / "text.keys").write_bytes(b"something else")
        with pytest.raises(SetupError, match="keys of texts"):
            await reach()

    async def test_nothing_of_them_is_logged(
        self, reach: Open, ns: NamespaceState, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG)
        texts = await reach()
        texts.note(ns, {KEYS[0]: CHAIN[KEYS[1]]} | texts_of(range(70_000, 70_016), text="secret"))
        await texts.close()
        assert "secret" not in caplog.text
        assert "70000" not in caplog.text
        assert not found_in(tmp_path, b"secret")


def test_a_listing_of_notes_tells_no_tokens() -> None:
    entry = TextEntry(b"", 0, b"\1\0\0\0", 1, b"", "secret")
    assert "secret" not in repr([entry])

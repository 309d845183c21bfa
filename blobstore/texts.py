"""What is known of the tokens of blobs, and the terms of namespaces: the front on the loop.

What is noted can be read at once, and is at rest (text_shelf.py) within a second: in
batches, by one worker thread, while another one reads. Used on the event loop only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from blobstore.backoff import Backoff
from blobstore.errors import BlobStoreError
from blobstore.index import NamespaceState
from blobstore.protocol import KEYS_MAX
from blobstore.settings import RebuildSettings
from blobstore.terms import Terms
from blobstore.text_entry import Noted, TextEntry
from blobstore.text_pending import PendingTexts
from blobstore.text_shelf import DIRECTORY, Shelf
from blobstore.text_tables import Totals

COMMIT_S = 0.5
"""How long a text waits for others."""
BATCH_MAX = 1000
BATCH_BYTES_MAX = 16 << 20
PENDING_BYTES_MAX = 64 << 20
"""Of texts that wait for a slow or full disk: what comes beyond is not kept."""
EXPIRE_S = 60.0
_DAY_S = 86400.0

log = logging.getLogger(__name__)
T = TypeVar("T")


class Texts:
    """All texts of the store; made by `open`."""

    def __init__(
        self,
        settings: RebuildSettings,
        directory: Path | None,
        threads: Callable[[int, str], Executor],
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._directory = directory
        self._clock = clock
        self._wall_clock = wall_clock
        self._writer = threads(1, "texts")
        self._reader = threads(1, "texts-read")
        self._shelf: Shelf | None = None
        """Made with the first text that is kept: many stores have none."""
        self._told: dict[bytes, Terms] = {}
        self._resolved: dict[bytes, Terms] = {}
        self._pending = PendingTexts(PENDING_BYTES_MAX)
        self._round: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._backoff = Backoff(clock)
        self._expire_at_s = clock() + EXPIRE_S
        self._expiring: asyncio.Task[None] | None = None
        self._totals = Totals()
        self._counts = {"refused": 0, "damaged": 0, "evicted": 0, "not_kept": 0, "forgotten": 0}

    @classmethod
    async def open(
        cls,
        settings: RebuildSettings,
        directory: Path | None,
        *,
        threads: Callable[[int, str], Executor],
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> Texts:
        """The texts of a data directory, or (None) of this run alone.

        Raises SetupError or StorageFailed if what is there cannot be read.
        """
        texts = cls(settings, directory, threads, clock, wall_clock)
        try:
            if directory is not None and (directory / DIRECTORY).exists():
                await texts._load()
        except BaseException:
            await texts._shut()
            raise
        return texts

    async def close(self) -> None:
        """Keep what is pending, unless the disk refuses, and close."""
        self._closing.set()
        self._backoff.ask_again()
        self._begin()
        for task in (self._round, self._expiring):
            if task is not None:
                await asyncio.wait({task})
        await self._shut()

    def terms(self, ns: NamespaceState) -> Terms:
        """What holds for a namespace; none of its fields is None."""
        return self._resolved.get(ns.id, self._settings.terms)

    async def tell(self, ns: NamespaceState, terms: Terms) -> None:
        """Change what holds for a namespace, for good if the disk takes it."""
        before = self._told.get(ns.id, Terms())
        told = terms.over(before)
        if told == before:
            return
        self._learn(ns.id, told)
        packed = msgspec.msgpack.encode(told.as_dict())
        try:
            await self._write(lambda: self._opened().set_terms(ns.id, packed))
        except BlobStoreError as error:
            log.warning("terms of a namespace are not on disk: %s", error)

    def note(
        self, ns: NamespaceState, entry_of_key: Mapping[bytes, TextEntry], *, only_new: bool = False
    ) -> None:
        """Keep texts, as the namespace's terms allow; with `only_new` those that are not known.

        Tokens that are not those of their key are found out and refused later, on a thread.
        """
        allowed = self.terms(ns).text
        if allowed == "off":
            return
        for key, entry in entry_of_key.items():
            kept = entry if allowed == "text" else replace(entry, text="")
            if not self._pending.add(Noted(ns.namespace, key, kept, only_new)):
                self._counts["not_kept"] += 1
        self._begin()

    async def chain(self, ns: NamespaceState, keys: Sequence[bytes]) -> list[TextEntry | None]:
        """The texts of `keys`; None where none is known, or it is damaged."""
        noted = {key: item for key in keys if (item := self._pending.get(ns.id, key))}
        rest = [key for key in keys if key not in noted]
        shelf = self._shelf

        def read() -> tuple[dict[bytes, TextEntry | None], list[bytes]]:
            found: dict[bytes, TextEntry | None] = {
                key: item.entry if item.entry.belongs_to(item.namespace, key) else None
                for key, item in noted.items()
            }
            if not rest or shelf is None:
                return found, []
            entries, damaged = shelf.read(ns.id, rest)
            return found | dict(zip(rest, entries, strict=True)), damaged

        try:
            entry_of, damaged = await self._read(read)
        except BlobStoreError as error:
            self._counts["damaged"] += len(rest)
            log.warning("texts cannot be read: %s", error)
            return [None] * len(keys)
        if damaged:
            await self._discard(ns.id, damaged)
        return [entry_of.get(key) for key in keys]

    async def known(self, ns: NamespaceState, keys: Sequence[bytes]) -> int:
        """How many leading keys have a text, without a look into it."""
        noted = {key for key in keys if self._pending.get(ns.id, key) is not None}
        shelf = self._shelf
        if shelf is None:
            return next((at for at, key in enumerate(keys) if key not in noted), len(keys))
        try:
            return await self._read(lambda: shelf.known(ns.id, keys, noted))
        except BlobStoreError as error:
            log.warning("texts cannot be read: %s", error)
            return 0

    async def ancestors(
        self, ns: NamespaceState, key: bytes, most: int = KEYS_MAX
    ) -> list[tuple[bytes, TextEntry]]:
        """The text of a blob and of those that it continues, as far as they are known.

        With their keys, `key` first, at most `most`.
        """
        found: list[tuple[bytes, TextEntry]] = []
        while key and len(found) < most:
            noted = self._pending.get(ns.id, key)
            if noted is not None:
                above = [(key, noted.entry)] if noted.entry.belongs_to(ns.namespace, key) else []
            else:
                above = await self._above(ns, key, most - len(found))
            if not above:
                break
            found += above
            key = above[-1][1].parent
        return found

    async def forget(self, ns: NamespaceState, keys: Collection[bytes]) -> Set[bytes]:
        """Erase the texts of `keys` and of all that is known to continue them; whose those were.

        When this returns nothing on disk can tell them. Raises Full, StorageFailed.
        """
        forgotten: set[bytes] = set()
        seeds = set(keys)
        while seeds:
            dropped = self._pending.drop(ns.id, seeds)
            # After what is being written now, which may be some of it.
            erased = await self._erase(ns.id, seeds | dropped)
            seeds = self._pending.drop(ns.id, erased)
            forgotten |= dropped | erased | seeds
        self._counts["forgotten"] += len(forgotten)
        return forgotten

    def tick(self) -> None:
        """What is due by the clock: what could not be kept is tried again, old texts expire."""
        self._begin()
        now_s = self._clock()
        if self._shelf is not None and now_s >= self._expire_at_s:
            self._expire_at_s = now_s + EXPIRE_S
            if self._expiring is None or self._expiring.done():
                self._expiring = asyncio.get_running_loop().create_task(self._expire(self._shelf))

    def stats(self) -> dict[str, Any]:
        """For the store's gauges; `ratio` is of payloads to their texts."""
        totals = self._totals
        return {
            "entries": totals.rows,
            "bytes": totals.nbytes,
            "kv_bytes": totals.kv_nbytes,
            "ratio": totals.kv_nbytes / totals.nbytes if totals.nbytes else 0.0,
            "quota_bytes": self._settings.text_quota,
            "disk_bytes": self._shelf.disk_bytes if self._shelf is not None else 0,
            "pending": len(self._pending),
            **self._counts,
        }

    def _begin(self) -> None:
        """Let what is pending come to rest."""
        if self._pending.waiting and not self._backoff.active and not self._busy:
            self._round = asyncio.get_running_loop().create_task(self._rest())

    @property
    def _busy(self) -> bool:
        return self._round is not None and not self._round.done()

    async def _rest(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(COMMIT_S):
                await self._closing.wait()
        while self._pending.waiting and await self._commit():
            pass

    async def _commit(self) -> bool:
        """Bring a batch of what is pending to rest; False if the disk refuses."""
        batch = self._pending.take(BATCH_MAX, BATCH_BYTES_MAX)
        try:
            kept = await self._write(lambda: self._opened().keep(batch))
        except BlobStoreError as error:
            if not self._backoff.pause_s:
                log.warning("texts cannot be kept now: %s", error)
            self._backoff.fault()
            self._pending.put_back()
            return False
        self._backoff.success()
        self._pending.taken()
        self._totals = kept.totals
        self._counts["refused"] += kept.refused
        self._counts["evicted"] += kept.evicted
        self._counts["not_kept"] += kept.no_room
        return True

    async def _above(
        self, ns: NamespaceState, key: bytes, most: int
    ) -> list[tuple[bytes, TextEntry]]:
        """As `ancestors`, of what is at rest."""
        shelf = self._shelf
        if shelf is None:
            return []
        try:
            keys = await self._read(lambda: shelf.ancestors(ns.id, key, most))
        except BlobStoreError as error:
            log.warning("texts cannot be read: %s", error)
            return []
        entries = takewhile(lambda entry: entry is not None, await self.chain(ns, keys))
        return [(key, entry) for key, entry in zip(keys, entries, strict=False) if entry]

    async def _erase(self, namespace_id: bytes, keys: Set[bytes]) -> set[bytes]:
        if self._shelf is None and not self._busy:
            return set()
        erased, self._totals = await self._write(lambda: self._opened().forget(namespace_id, keys))
        return erased

    async def _discard(self, namespace_id: bytes, damaged: Sequence[bytes]) -> None:
        """Another put may note them anew."""
        self._counts["damaged"] += len(damaged)
        try:
            self._totals = await self._write(lambda: self._opened().discard(namespace_id, damaged))
        except BlobStoreError as error:
            log.warning("damaged texts cannot be removed: %s", error)

    async def _expire(self, shelf: Shelf) -> None:
        gone = 1
        try:
            while gone:
                gone, self._totals = await self._write(shelf.expire)
                self._counts["evicted"] += gone
        except BlobStoreError as error:
            log.warning("old texts cannot be removed: %s", error)

    def _learn(self, namespace_id: bytes, told: Terms) -> None:
        self._told[namespace_id] = told
        self._resolved[namespace_id] = told.over(self._settings.terms)

    def _opened(self) -> Shelf:
        """The shelf, made if need be: work of the writer, so that there is one."""
        if self._shelf is None:
            self._shelf = Shelf.open(
                self._directory,
                quota_bytes=self._settings.text_quota,
                retention_s=self._settings.text_retention_days * _DAY_S,
                wall_clock=self._wall_clock,
            )
        return self._shelf

    def _read_all_told(self) -> tuple[dict[bytes, bytes], Totals]:
        shelf = self._opened()
        return shelf.terms(), shelf.totals()

    async def _load(self) -> None:
        told, self._totals = await self._write(self._read_all_told)
        for namespace_id, packed in told.items():
            try:
                terms = Terms.from_dict(msgspec.msgpack.decode(packed, type=dict[str, str]))
            except (msgspec.MsgspecError, BlobStoreError) as error:
                log.warning("terms of namespace %s are lost: %s", namespace_id.hex()[:12], error)
            else:
                self._learn(namespace_id, terms)

    async def _shut(self) -> None:
        loop = asyncio.get_running_loop()
        if self._shelf is not None:
            shelf, self._shelf = self._shelf, None
            await loop.run_in_executor(self._reader, lambda: None)  # the last read has ended
            await loop.run_in_executor(self._writer, shelf.close)
        for pool in (self._writer, self._reader):
            await loop.run_in_executor(None, pool.shutdown)

    async def _write(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._writer, work)

    async def _read(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._reader, work)

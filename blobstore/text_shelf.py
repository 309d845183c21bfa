"""Texts at rest: encrypted rows (text_rows.py), their keys, and which of them stay (text_room.py).

Every text is encrypted under a key of its own, so that wiping the key is forgetting it.
Calls block, and belong on worker threads: any may read while one writes.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import zstandard

from blobstore.errors import StorageFailed
from blobstore.protocol import TEXT_BYTES_MAX
from blobstore.text_entry import Noted, TextEntry
from blobstore.text_keys import KeyFile, MemoryKeys, TextKeys
from blobstore.text_room import TextRoom, counted, without
from blobstore.text_rows import Row, key_in, name_of, parse, seal
from blobstore.text_tables import LmdbTables, MemoryTables, Reading, Tables, Totals, Writing
from blobstore.units import MIB

DIRECTORY = "texts"
KEYS_NAME = "text.keys"


@dataclass(frozen=True, slots=True)
class Kept:
    """What became of a batch."""

    refused: int
    """Tokens that are not those of their keys."""
    evicted: int
    no_room: int
    totals: Totals


class Shelf:
    """All texts of one data directory, or of one run if there is none."""

    def __init__(
        self,
        tables: Tables,
        keys: TextKeys,
        *,
        quota_bytes: int,
        retention_s: float,
        wall_clock: Callable[[], float],
    ) -> None:
        self._tables = tables
        self._keys = keys
        self._room = TextRoom(quota_bytes, retention_s, wall_clock)
        self._wall_clock = wall_clock
        self._compressor = zstandard.ZstdCompressor(level=3)
        self._settled = False

    @classmethod
    def open(
        cls,
        directory: Path | None,
        *,
        quota_bytes: int,
        retention_s: float,
        wall_clock: Callable[[], float],
    ) -> Shelf:
        """The texts in a data directory, or (None) in memory.

        On disk they take the quota, and as much again for what LMDB has not reused yet. Raises
        SetupError for files that are damaged as a whole, StorageFailed for a failing disk.
        """
        tables: Tables
        keys: TextKeys
        if directory is None:
            tables, keys = MemoryTables(), MemoryKeys()
        else:
            tables = LmdbTables(directory / DIRECTORY, 2 * quota_bytes + 8 * MIB)
            try:
                keys = KeyFile(directory / DIRECTORY / KEYS_NAME)
            except OSError as error:
                tables.close()
                raise _failed(error) from error
            except BaseException:
                tables.close()
                raise
        return cls(
            tables, keys, quota_bytes=quota_bytes, retention_s=retention_s, wall_clock=wall_clock
        )

    @property
    def disk_bytes(self) -> int:
        """What the rows take on the disk, free pages among them."""
        return self._tables.disk_bytes

    def totals(self) -> Totals:
        """Over all that is kept. Raises StorageFailed."""
        with self._tables.reading() as txn:
            return txn.totals()

    def terms(self) -> dict[bytes, bytes]:
        """What was told of namespaces, by id. Raises StorageFailed."""
        with self._tables.reading() as txn:
            return txn.terms()

    def set_terms(self, namespace_id: bytes, terms: bytes) -> None:
        """Remember durably what was told. Raises Full, StorageFailed."""
        self._tables.write(lambda txn: txn.set_terms(namespace_id, terms))

    def known(self, namespace_id: bytes, keys: Sequence[bytes], noted: Container[bytes]) -> int:
        """How many leading keys have a text, or are in `noted`. Raises StorageFailed."""
        with self._tables.reading() as txn:
            for at, key in enumerate(keys):
                if key not in noted and txn.seq_of(name_of(namespace_id, key)) is None:
                    return at
        return len(keys)

    def read(
        self, namespace_id: bytes, keys: Sequence[bytes]
    ) -> tuple[list[TextEntry | None], list[bytes]]:
        """The texts of `keys`, and the keys of those that are damaged. Raises StorageFailed.

        The callers' texts are left out if they are more than one may be: a job tells no more.
        """
        with self._tables.reading() as txn:
            rows = [_row_of(txn, name_of(namespace_id, key)) for key in keys]
        entries: list[TextEntry | None] = []
        damaged: list[bytes] = []
        chars = 0
        for key, row in zip(keys, rows, strict=True):
            entry = self._opened(namespace_id, row)
            if entry is None and row is not None:
                entry, bad = self._read_again(namespace_id, key, row)
                damaged += [key] if bad else []
            if entry is not None and entry.text:
                if chars <= TEXT_BYTES_MAX < chars + len(entry.text):
                    entries = [each and replace(each, text="") for each in entries]
                chars += len(entry.text)
                entry = replace(entry, text="") if chars > TEXT_BYTES_MAX else entry
            entries.append(entry)
        return entries, damaged

    def ancestors(self, namespace_id: bytes, key: bytes, most: int) -> list[bytes]:
        """`key` and the keys of what it continues, as far as texts are there, at most `most`."""
        found: list[bytes] = []
        name = name_of(namespace_id, key)
        with self._tables.reading() as txn:
            while name and len(found) < most and (row := _row_of(txn, name)) is not None:
                found.append(key_in(name))
                name = row.parent
        return found

    def keep(self, batch: Iterable[Noted]) -> Kept:
        """Keep texts durably; what is older leaves for them. Raises Full, StorageFailed."""
        self._settle()
        wanted, refused = self._wanted(batch)
        taken: list[int] = []
        try:
            rows = [self._sealed(noted, taken) for noted in wanted]
            self._keys.sync()
            added = self._tables.write(lambda txn: self._room.add(txn, rows))
        except BaseException as error:
            with suppress(StorageFailed):
                self._wipe(taken)
            if isinstance(error, OSError) and not isinstance(error, StorageFailed):
                raise _failed(error) from error
            raise
        self._wipe(added.gone)
        return Kept(refused, added.evicted, added.no_room, added.totals)

    def forget(self, namespace_id: bytes, keys: Iterable[bytes]) -> tuple[set[bytes], Totals]:
        """Erase the texts of `keys` and of all that continue them; which keys those were.

        When this returns no file holds what could decrypt them. Raises StorageFailed.
        """

        def with_all_that_continue(txn: Writing) -> list[bytes]:
            found = {name_of(namespace_id, key): None for key in keys}
            waiting = list(found)
            while waiting:
                for child in txn.children(waiting.pop()):
                    if child not in found:
                        found[child] = None
                        waiting.append(child)
            return list(found)

        return self._erase(with_all_that_continue)

    def discard(self, namespace_id: bytes, keys: Iterable[bytes]) -> Totals:
        """Erase the texts of `keys` alone, which are damaged. Raises StorageFailed."""
        names = [name_of(namespace_id, key) for key in keys]
        return self._erase(lambda txn: names)[1]

    def expire(self) -> tuple[int, Totals]:
        """Erase some of what is older or more than may be kept; how many. Raises StorageFailed."""
        self._settle()
        with self._tables.reading() as txn:
            if not self._room.is_wanted(txn):
                return 0, txn.totals()
        gone, totals = self._tables.write(self._room.expire, deletes_only=True)
        self._wipe(gone)
        return len(gone), totals

    def close(self) -> None:
        """Close the files; no other call may be in flight."""
        self._keys.close()
        self._tables.close()

    def _settle(self) -> None:
        """Before the first change: what a crash left behind is undone."""
        if self._settled:
            return
        with self._tables.reading() as txn:
            totals, slots = counted(txn)
            counted_before = txn.totals() == totals
        try:
            self._keys.keep_only(slots)
        except OSError as error:
            raise _failed(error) from error
        if not counted_before:  # damaged rows were removed
            self._tables.write(lambda txn: txn.set_totals(totals))
        self._settled = True

    def _wanted(self, batch: Iterable[Noted]) -> tuple[list[Noted], int]:
        """What is to be written of a batch, each as it will be; how many are refused."""
        wanted: list[Noted] = []
        refused = 0
        with self._tables.reading() as txn:
            for noted in batch:
                if not noted.entry.belongs_to(noted.namespace, noted.key):
                    refused += 1
                    continue
                row = _row_of(txn, name_of(noted.namespace.id, noted.key))
                wanted += [noted] if row is None else self._news(noted, row)
        # What continues others is older than they: it goes first.
        return sorted(wanted, key=lambda noted: -noted.entry.position), refused

    def _news(self, noted: Noted, row: Row) -> list[Noted]:
        """What is to be written over a row: nothing if it says the same, and not long since."""
        fresh = self._room.is_fresh(row)
        if fresh and noted.only_new:
            return []
        before = self._opened(noted.namespace.id, row)
        if before is not None and not noted.entry.text and before.tokens == noted.entry.tokens:
            noted = replace(noted, entry=replace(noted.entry, text=before.text))
        return [] if fresh and noted.entry == before else [noted]

    def _sealed(self, noted: Noted, taken: list[int]) -> Row:
        slot, secret = self._keys.take()
        taken.append(slot)
        return seal(noted, slot, secret, self._wall_clock(), self._compressor)

    def _opened(self, namespace_id: bytes, row: Row | None) -> TextEntry | None:
        """What is in a row; None if that cannot be told."""
        if row is None or row.slot < 0:
            return None
        try:
            secret = self._keys.get(row.slot)
        except OSError:
            return None
        return row.open(secret, namespace_id) if secret is not None else None

    def _read_again(
        self, namespace_id: bytes, key: bytes, row: Row
    ) -> tuple[TextEntry | None, bool]:
        """The key of a row may have gone after the row was read: what is there now, or damage."""
        with self._tables.reading() as txn:
            now = _row_of(txn, name_of(namespace_id, key))
        entry = self._opened(namespace_id, now)
        return entry, entry is None and now == row

    def _erase(self, named: Callable[[Writing], Sequence[bytes]]) -> tuple[set[bytes], Totals]:
        self._settle()

        def change(txn: Writing) -> tuple[set[bytes], list[int], Totals]:
            totals, gone, erased = txn.totals(), [], set()
            for name in named(txn):
                totals, slots = without(txn, totals, name)
                gone += slots
                if slots:
                    erased.add(key_in(name))
            txn.set_totals(totals)
            return erased, gone, totals

        erased, gone, totals = self._tables.write(change, deletes_only=True)
        self._wipe(gone)
        return erased, totals

    def _wipe(self, slots: Iterable[int]) -> None:
        try:
            self._keys.wipe(slot for slot in slots if slot >= 0)
        except OSError as error:
            self._settled = False  # what is left is wiped before the next change
            raise _failed(error) from error


def _row_of(txn: Reading, name: bytes) -> Row | None:
    seq = txn.seq_of(name)
    stored = txn.row(seq) if seq is not None else None
    return parse(stored) if stored is not None else None


def _failed(error: OSError) -> StorageFailed:
    return StorageFailed(error.errno or 5, f"the keys of texts: {error.strerror}")

"""Texts at rest: encrypted rows, their keys, and which of them stay.

Every text is encrypted (AES-256-GCM) under a key of its own, so that wiping the key is
forgetting it. The oldest go first when the quota is full or their time is over, whole, and
not before all that continue them: what is left of a chain begins at its root. Calls
block, and belong on worker threads: any may read while one writes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import zstandard
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from xxhash import xxh3_64_intdigest

from blobstore.errors import StorageFailed
from blobstore.namespace import Namespace
from blobstore.protocol import TEXT_BYTES_MAX
from blobstore.text_entry import TextEntry, decode, encode
from blobstore.text_keys import KeyFile, MemoryKeys, TextKeys
from blobstore.text_tables import LmdbTables, MemoryTables, Reading, Tables, Totals, Writing
from blobstore.units import MIB

DIRECTORY = "texts"
KEYS_NAME = "text.keys"

_NAMESPACE_BYTES = 16
"""Of a namespace's id, before a blob's key: what is encrypted is bound to all of it."""
_ROW_BYTES = 200
"""What a row takes beside its own bytes: its key, its names in the tables, parts of pages."""
_MOVES_MAX = 4096
"""Rows that one transaction moves behind what continues them."""
_EXPIRED_MAX = 4096
_FRESH_SHARE = 1 / 8
"""Of the retention: what was noted this lately is not noted again for the time alone."""
_NONCE = bytes(12)
"""A key is used once."""
_CHECKSUM = struct.Struct("<Q")
"""Of what is not encrypted: a wrong slot would have another text's key wiped."""
# slot of the key, payload bytes, when noted (wall), flags, bytes of key and parent
_HEAD = struct.Struct("<QQdBBB")
_NAME_START = _CHECKSUM.size + _HEAD.size
_HAS_TEXT = 1


@dataclass(frozen=True, slots=True)
class Noted:
    """A text to be kept."""

    namespace: Namespace
    key: bytes
    entry: TextEntry
    only_new: bool
    """Nothing is to be done if one is known."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What became of a batch."""

    refused: int
    """Tokens that are not those of their keys."""
    evicted: int
    no_room: int
    totals: Totals


class _Row(NamedTuple):
    """A stored row, taken apart; of a damaged one nothing but the bytes is known."""

    slot: int
    """Below 0 if it is damaged."""
    nbytes: int
    noted_wall_s: float
    name: bytes
    parent: bytes
    """Name of the blob that it continues; b"" at the root."""
    bound: bytes
    """All of it that is not encrypted."""
    sealed: bytes
    size: int
    """Of the row and all that belongs to it."""


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
        self._quota_bytes = quota_bytes
        self._retention_s = retention_s
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
                if key not in noted and txn.seq_of(_name(namespace_id, key)) is None:
                    return at
        return len(keys)

    def read(
        self, namespace_id: bytes, keys: Sequence[bytes]
    ) -> tuple[list[TextEntry | None], list[bytes]]:
        """The texts of `keys`, and the keys of those that are damaged. Raises StorageFailed.

        The callers' texts are left out if they are more than one may be: a job tells no more.
        """
        with self._tables.reading() as txn:
            rows = [_row_of(txn, _name(namespace_id, key)) for key in keys]
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
        name = _name(namespace_id, key)
        with self._tables.reading() as txn:
            while name and len(found) < most and (row := _row_of(txn, name)) is not None:
                found.append(name[_NAMESPACE_BYTES:])
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
            evicted, no_room, gone, totals = self._tables.write(lambda txn: self._add(txn, rows))
        except BaseException as error:
            with suppress(StorageFailed):
                self._wipe(taken)
            if isinstance(error, OSError) and not isinstance(error, StorageFailed):
                raise _failed(error) from error
            raise
        self._wipe(gone)
        return Kept(refused, evicted, no_room, totals)

    def forget(self, namespace_id: bytes, keys: Iterable[bytes]) -> tuple[set[bytes], Totals]:
        """Erase the texts of `keys` and of all that continue them; which keys those were.

        When this returns no file holds what could decrypt them. Raises StorageFailed.
        """

        def with_all_that_continue(txn: Writing) -> list[bytes]:
            found = {_name(namespace_id, key): None for key in keys}
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
        names = [_name(namespace_id, key) for key in keys]
        return self._erase(lambda txn: names)[1]

    def expire(self) -> tuple[int, Totals]:
        """Erase some of what is older or more than may be kept; how many. Raises StorageFailed."""
        self._settle()

        def change(txn: Writing) -> tuple[list[int], Totals]:
            gone, totals = self._evict(txn, txn.totals(), 0)
            txn.set_totals(totals)
            return gone, totals

        with self._tables.reading() as txn:  # nearly always there is nothing to be done
            oldest, totals = txn.oldest(), txn.totals()
            if oldest is None or not (
                totals.nbytes > self._quota_bytes or self._overdue(_parsed(oldest[1]))
            ):
                return 0, totals
        gone, totals = self._tables.write(change, deletes_only=True)
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
            totals, slots = _counted(txn)
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
                row = _row_of(txn, _name(noted.namespace.id, noted.key))
                wanted += [noted] if row is None else self._news(noted, row)
        # What continues others is older than they: it goes first.
        return sorted(wanted, key=lambda noted: -noted.entry.position), refused

    def _news(self, noted: Noted, row: _Row) -> list[Noted]:
        """What is to be written over a row: nothing if it says the same, and not long since."""
        fresh = self._wall_clock() - row.noted_wall_s < _FRESH_SHARE * self._retention_s
        if fresh and noted.only_new:
            return []
        before = self._opened(noted.namespace.id, row)
        if before is not None and not noted.entry.text and before.tokens == noted.entry.tokens:
            noted = replace(noted, entry=replace(noted.entry, text=before.text))
        return [] if fresh and noted.entry == before else [noted]

    def _sealed(self, noted: Noted, taken: list[int]) -> _Row:
        entry = noted.entry
        slot, secret = self._keys.take()
        taken.append(slot)
        prefix = noted.namespace.id[:_NAMESPACE_BYTES]
        head = _HEAD.pack(
            slot, entry.nbytes, self._wall_clock(), _HAS_TEXT if entry.text else 0,
            len(noted.key), len(entry.parent),
        )  # fmt: skip
        bound = head + prefix + noted.key + entry.parent
        body = encode(entry, self._compressor)
        sealed = AESGCM(secret).encrypt(_NONCE, body, noted.namespace.id + bound)
        return _parsed(_checksum(bound) + bound + sealed)

    def _opened(self, namespace_id: bytes, row: _Row | None) -> TextEntry | None:
        """What is in a row; None if that cannot be told."""
        if row is None or row.slot < 0:
            return None
        try:
            secret = self._keys.get(row.slot)
            if secret is None:
                return None
            body = AESGCM(secret).decrypt(_NONCE, row.sealed, namespace_id + row.bound)
            return decode(body, row.parent[_NAMESPACE_BYTES:], row.nbytes)
        except (InvalidTag, ValueError, OSError):
            return None

    def _read_again(
        self, namespace_id: bytes, key: bytes, row: _Row
    ) -> tuple[TextEntry | None, bool]:
        """The key of a row may have gone after the row was read: what is there now, or damage."""
        with self._tables.reading() as txn:
            now = _row_of(txn, _name(namespace_id, key))
        entry = self._opened(namespace_id, now)
        return entry, entry is None and now == row

    def _add(self, txn: Writing, rows: Sequence[_Row]) -> tuple[int, int, list[int], Totals]:
        """Add rows in a transaction: how many were evicted, and found no room; slots to wipe."""
        totals, gone = txn.totals(), []
        for row in rows:
            totals, replaced = _without(txn, totals, row.name)
            gone += replaced
        wanted_bytes = sum(row.size for row in rows)
        evicted, totals = self._evict(txn, totals, wanted_bytes, {row.parent for row in rows})
        gone += evicted
        no_room = 0
        for row in rows:
            if totals.nbytes + row.size > self._quota_bytes:
                no_room += 1
                gone.append(row.slot)
                continue
            totals = _put(txn, totals, row)
        txn.set_totals(totals)
        return len(evicted), no_room, gone, totals

    def _evict(
        self,
        txn: Writing,
        totals: Totals,
        wanted_bytes: int,
        parents: Container[bytes] = (),
    ) -> tuple[list[int], Totals]:
        """Make room for more, and remove what is overdue; slots to wipe.

        What is to be added continues `parents`.
        """
        gone: list[int] = []
        moves = 0
        while len(gone) < _EXPIRED_MAX + wanted_bytes // _ROW_BYTES:
            oldest = txn.oldest()
            if oldest is None:
                break
            seq, stored = oldest
            row = _parsed(stored)
            full = totals.nbytes + wanted_bytes > self._quota_bytes
            if not full and (moves == _MOVES_MAX or not self._overdue(row)):
                break
            if row.name and moves == _MOVES_MAX:
                cut, totals = self._cut(txn, totals, row.name, wanted_bytes)
                gone += cut
                continue
            txn.remove(seq, row.name, row.parent)
            totals = _less(totals, row)
            above = row.name in parents or next(iter(txn.children(row.name)), None) is not None
            if row.name and above:
                totals = _put(txn, totals, row)  # behind what continues it
                moves += 1
            else:
                gone.append(row.slot)
        return gone, totals

    def _cut(
        self, txn: Writing, totals: Totals, name: bytes, wanted_bytes: int
    ) -> tuple[list[int], Totals]:
        """Make room with a chain that begins at `name`, from its end up; slots to wipe."""
        gone: list[int] = []
        path = {name: None}
        while name:
            name = next((child for child in txn.children(name) if child not in path), b"")
            path |= {name: None} if name else {}
        for name in reversed(path):
            full = totals.nbytes + wanted_bytes > self._quota_bytes
            if gone and (not full or next(iter(txn.children(name)), None) is not None):
                break
            totals, slots = _without(txn, totals, name)
            gone += slots
        return gone, totals

    def _overdue(self, row: _Row) -> bool:
        return self._wall_clock() - row.noted_wall_s > self._retention_s

    def _erase(self, named: Callable[[Writing], Sequence[bytes]]) -> tuple[set[bytes], Totals]:
        self._settle()

        def change(txn: Writing) -> tuple[set[bytes], list[int], Totals]:
            totals, gone, erased = txn.totals(), [], set()
            for name in named(txn):
                totals, slots = _without(txn, totals, name)
                gone += slots
                if slots:
                    erased.add(name[_NAMESPACE_BYTES:])
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


def _name(namespace_id: bytes, key: bytes) -> bytes:
    return namespace_id[:_NAMESPACE_BYTES] + key


def _row_of(txn: Reading, name: bytes) -> _Row | None:
    seq = txn.seq_of(name)
    stored = txn.row(seq) if seq is not None else None
    return _parsed(stored) if stored is not None else None


def _checksum(bound: bytes) -> bytes:
    return _CHECKSUM.pack(xxh3_64_intdigest(bound))


def _parsed(stored: bytes) -> _Row:
    size = len(stored) + _ROW_BYTES
    damaged = _Row(-1, 0, 0.0, b"", b"", b"", b"", size)
    if len(stored) < _NAME_START:
        return damaged
    slot, nbytes, noted, _, n_key, n_parent = _HEAD.unpack_from(stored, _CHECKSUM.size)
    middle = _NAME_START + _NAMESPACE_BYTES
    end = middle + n_key + n_parent
    bound = stored[_CHECKSUM.size : end]
    if stored[: _CHECKSUM.size] != _checksum(bound):
        return damaged
    prefix = stored[_NAME_START:middle]
    parent = prefix + stored[middle + n_key : end] if n_parent else b""
    name = stored[_NAME_START : middle + n_key]
    return _Row(slot, nbytes, noted, name, parent, bound, stored[end:], size)


def _counted(txn: Reading) -> tuple[Totals, list[int]]:
    """Totals over all rows that are there, and the slots of their keys."""
    n = nbytes = kv_nbytes = 0
    slots = []
    for row in map(_parsed, txn.rows()):
        n, nbytes, kv_nbytes = n + 1, nbytes + row.size, kv_nbytes + row.nbytes
        slots += [row.slot] if row.slot >= 0 else []
    return Totals(txn.totals().next_seq, n, nbytes, kv_nbytes), slots


def _put(txn: Writing, totals: Totals, row: _Row) -> Totals:
    stored = _checksum(row.bound) + row.bound + row.sealed
    txn.put(totals.next_seq, row.name, row.parent, stored)
    return Totals(
        totals.next_seq + 1,
        totals.rows + 1,
        totals.nbytes + row.size,
        totals.kv_nbytes + row.nbytes,
    )


def _less(totals: Totals, row: _Row) -> Totals:
    return replace(
        totals,
        rows=totals.rows - 1,
        nbytes=totals.nbytes - row.size,
        kv_nbytes=max(0, totals.kv_nbytes - row.nbytes),
    )


def _without(txn: Writing, totals: Totals, name: bytes) -> tuple[Totals, list[int]]:
    """Remove the row of a blob, if there is one; the slot to wipe."""
    seq = txn.seq_of(name)
    stored = txn.row(seq) if seq is not None else None
    if seq is None or stored is None:
        return totals, []
    row = _parsed(stored)
    txn.remove(seq, name, row.parent)
    return _less(totals, row), [row.slot]


def _failed(error: OSError) -> StorageFailed:
    return StorageFailed(error.errno or 5, f"the keys of texts: {error.strerror}")

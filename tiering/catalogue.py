"""What is on SSD: the rows of all blobs, small payloads, and namespaces, in LMDB.

One transaction makes a batch durable and visible. Layout: docs/FORMAT.md, "On
disk". Room and growth are the environment's affair, segment files somebody
else's.
"""

from __future__ import annotations

import struct
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

import lmdb
from xxhash import xxh3_64_intdigest

from blobstore.errors import Full, NewerFormat, StorageFailed, UnknownNamespace
from blobstore.tiering.disk import Disk
from blobstore.tiering.environment import Environment
from blobstore.tiering.row import Row, decode_row, encode_row, with_last_use

FORMAT_VERSION = 1

_META, _NAMESPACES, _BLOBS, _INLINE = b"meta", b"namespaces", b"blobs", b"inline"
_NUMBER = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_ROWS_PER_READ = 4096
"""A scan ends its snapshot this often, so that it never holds back the reuse of pages for long."""

Added = tuple[Row, memoryview | None]
Named = tuple[bytes, bytes]
Touched = tuple[bytes, bytes, float]
T = TypeVar("T")


class Catalogue:
    """The open catalogue of one data directory.

    Any thread may call; calls block on the disk. Blobs are named by the
    namespace's id and their key, or by both packed into a *row key*.
    """

    def __init__(self, directory: Path, disk: Disk, reserve_bytes: int) -> None:
        """Open or make the catalogue in `directory`.

        Raises NewerFormat, NotEnough, or SetupError for a file that is damaged.
        """
        self._directory = directory
        self._env = Environment(
            directory, (_META, _NAMESPACES, _BLOBS, _INLINE), disk, reserve_bytes
        )
        self._numbers: dict[bytes, bytes] = {}  # by id, packed
        self._ids: dict[bytes, bytes] = {}
        self._canonical: dict[bytes, bytes] = {}
        self._declaring = threading.Lock()
        self._next_number = 1
        self._undo: set[bytes] = set()
        self.damaged_namespaces = 0
        self.store_id = b""
        self.boots = 0
        try:
            self._env.write(self._introduce, deletes_only=True)
            self._load_namespaces()
        except BaseException:
            self._env.close()
            raise

    @property
    def granted_bytes(self) -> int:
        """What the catalogue takes on the disk, whether filled or not."""
        return self._env.granted_bytes

    @property
    def live_bytes(self) -> int:
        """What rows and payloads take of that."""
        return self._env.live_bytes

    def share_room(self, claim: Callable[[int], bool], make_room: Callable[[], None]) -> None:
        """From now on ask `claim` before growing, and call `make_room` when the disk is full."""
        self._env.claim = claim
        self._env.make_room = make_room

    def namespaces(self) -> dict[bytes, bytes]:
        """The declared namespaces: id → canonical encoding."""
        return dict(self._canonical)

    def declare(self, namespace: bytes, canonical: bytes) -> None:
        """Remember a namespace for good; again is free. Raises Full, StorageFailed."""
        if namespace in self._numbers:
            return
        with self._declaring:
            if namespace in self._numbers:
                return
            # A number is never given twice, even if the first commit is in doubt
            # or its record gets damaged: rows would change their namespace.
            number = _NUMBER.pack(self._next_number)
            self._next_number += 1
            following = _U64.pack(self._next_number)
            body = number + canonical
            record = _U64.pack(xxh3_64_intdigest(namespace + body)) + body

            def insert(txn: lmdb.Transaction) -> None:
                txn.put(namespace, record, db=self._env.table(_NAMESPACES))
                txn.put(b"next_number", following, db=self._env.table(_META))

            self._env.write(insert)
            self._remember(namespace, number, canonical)

    def row_key(self, namespace: bytes, key: bytes) -> bytes:
        """Where the row of a blob is; UnknownNamespace if that was not declared."""
        try:
            return self._numbers[namespace] + key
        except KeyError:
            raise UnknownNamespace(f"namespace {namespace.hex()[:12]} is not declared") from None

    def apply(
        self, add: Sequence[Added], remove: Sequence[Named], touch: Sequence[Touched] = ()
    ) -> None:
        """Make one batch durable: removals, then additions, then times of last use.

        Raises Full or StorageFailed, with none of the additions visible. The
        removals may have been made all the same; they can be repeated. Times
        alone never fail for want of room: they are given up.
        """
        gone = [self.row_key(*name) for name in remove]
        new = []
        for row, payload in add:
            row_key = self.row_key(row.namespace, row.key)
            new.append((row_key, encode_row(row, row_key), payload))
        hollow = [self.row_key(row.namespace, row.key) for row, _ in add if row.is_hole]
        used = [(self.row_key(namespace, key), at) for namespace, key, at in touch]
        try:
            self._apply(gone, new, used, hollow)
        except Full:
            self.discard(gone)
            if new:
                self._apply([], new, [], hollow)

    def discard(self, row_keys: Sequence[bytes]) -> None:
        """Remove rows and inline payloads, even where only the reserve is left.

        In one transaction if that fits, else in several.
        """
        if not row_keys:
            return
        try:
            self._apply(row_keys, [], [])
        except Full:
            if len(row_keys) == 1:
                raise
            half = len(row_keys) // 2
            self.discard(row_keys[:half])
            self.discard(row_keys[half:])

    def read_inline(self, namespace: bytes, key: bytes, into: memoryview) -> None:
        """Copy a payload that lies in the catalogue; StorageFailed if it is not there whole."""
        row_key = self.row_key(namespace, key)
        with self._env.reading() as txn:
            found = txn.get(row_key, db=self._env.table(_INLINE))
            if found is not None and len(found) == into.nbytes:
                into.cast("B")[:] = found
                return
        raise StorageFailed(
            f"payload of {key.hex()[:12]}: wanted {into.nbytes} bytes in the catalogue, "
            f"found {'none' if found is None else len(found)}"
        )

    def records(self) -> Iterator[tuple[bytes, bytes]]:
        """All rows as stored, by row key, in a few short snapshots."""
        return self._scan(_BLOBS)

    def inline_sizes(self) -> Iterator[tuple[bytes, int]]:
        """Row key and size of every payload in the catalogue."""

        def sizes(rows: Iterator[tuple[Any, Any]]) -> list[tuple[bytes, int]]:
            return [(bytes(key), len(value)) for key, value in rows]

        return chain.from_iterable(self._batches(_INLINE, sizes, copies=False))

    def rows(self, now_wall_s: float) -> Iterator[Row]:
        """The sound rows of known namespaces; times in the future become `now_wall_s`."""
        ids = self._ids
        for row_key, record in self.records():
            row = decode_row(row_key, record, ids, now_wall_s)
            if row is not None:
                yield row

    def namespace_of(self, row_key: bytes) -> bytes | None:
        """The id of the namespace that a row belongs to, or None if it is unknown."""
        return self._ids.get(row_key[: _NUMBER.size])

    def forget_pages(self) -> None:
        """Give back the memory that a scan of all rows has taken."""
        self._env.forget_pages()

    def clear_dead_readers(self) -> int:
        """Free what processes that died in a read still hold back; how many there were."""
        return self._env.clear_dead_readers()

    @property
    def n_readers(self) -> int:
        """Reader slots taken at the last commit."""
        return self._env.n_readers

    def close(self) -> None:
        """Close the files; waits for reads in flight."""
        self._env.close()

    def _introduce(self, txn: lmdb.Transaction) -> None:
        """Check or write the format, and count this opening."""
        meta = self._env.table(_META)
        version = txn.get(b"format", db=meta)
        found = FORMAT_VERSION if version is None else _U64.unpack(version)[0]
        if found > FORMAT_VERSION:
            raise NewerFormat(
                f"the catalogue {self._directory} has format {found}, this program knows up to "
                f"{FORMAT_VERSION}: use the newer program, or another data directory"
            )
        self.store_id = bytes(txn.get(b"store", db=meta) or uuid.uuid4().bytes)
        self.boots = 1 + _U64.unpack(txn.get(b"boots", db=meta, default=bytes(8)))[0]
        first = _U64.pack(1)
        self._next_number = _U64.unpack(txn.get(b"next_number", db=meta, default=first))[0]
        txn.put(b"format", _U64.pack(FORMAT_VERSION), db=meta)
        txn.put(b"store", self.store_id, db=meta)
        txn.put(b"boots", _U64.pack(self.boots), db=meta)

    def _load_namespaces(self) -> None:
        for namespace, record in self._scan(_NAMESPACES):
            body = record[_U64.size :]
            if len(body) < _NUMBER.size or _U64.unpack_from(record)[0] != xxh3_64_intdigest(
                namespace + body
            ):
                self.damaged_namespaces += 1
            else:
                self._remember(namespace, body[: _NUMBER.size], body[_NUMBER.size :])

    def _remember(self, namespace: bytes, number: bytes, canonical: bytes) -> None:
        self._ids[number] = namespace
        self._canonical[namespace] = canonical
        self._numbers[namespace] = number

    def _apply(
        self,
        gone: Sequence[bytes],
        new: Sequence[tuple[bytes, bytes, memoryview | None]],
        used: Sequence[tuple[bytes, float]],
        hollow: Sequence[bytes] = (),
    ) -> None:
        undo = set(self._undo)
        fresh: set[bytes] = set()

        def change(txn: lmdb.Transaction) -> None:
            blobs, inline = self._env.table(_BLOBS), self._env.table(_INLINE)
            for row_key in (*undo, *gone):
                txn.delete(row_key, db=blobs)
                txn.delete(row_key, db=inline)
            for row_key in hollow:
                txn.delete(row_key, db=inline)
            fresh.clear()
            for row_key, record, payload in new:
                if txn.put(row_key, record, db=blobs, overwrite=False):
                    fresh.add(row_key)
                else:
                    txn.put(row_key, record, db=blobs)
                if payload is not None:
                    txn.put(row_key, payload, db=inline)
            for row_key, at in used:
                found = bytes(txn.get(row_key, b"", db=blobs))
                renewed = with_last_use(row_key, found, at)
                if renewed is not None:
                    txn.put(row_key, renewed, db=blobs)

        try:
            self._env.write(change, deletes_only=not (new or used))
        except StorageFailed:
            # Whether a failed sync reached the disk is unknown: the next one settles it.
            # A row that was there before stays, in one version or the other.
            self._undo |= fresh
            raise
        self._undo -= undo

    def _scan(self, name: bytes) -> Iterator[tuple[bytes, bytes]]:
        return chain.from_iterable(self._batches(name, list, copies=True))

    def _batches(
        self, name: bytes, collect: Callable[[Iterator[tuple[Any, Any]]], list[T]], *, copies: bool
    ) -> Iterator[list[T]]:
        last = b""
        while True:
            with (
                self._env.reading(copies=copies) as txn,
                txn.cursor(self._env.table(name)) as cursor,
            ):
                if not cursor.set_range(last):
                    return
                rows = cursor.iternext()
                if last and bytes(cursor.key()) == last:
                    next(rows)
                batch = collect(islice(rows, _ROWS_PER_READ))
                last = bytes(cursor.key())
            yield batch
            if len(batch) < _ROWS_PER_READ:
                return

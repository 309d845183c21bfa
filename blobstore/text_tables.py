"""Where the rows of texts lie: an LMDB environment, or memory where there is no disk.

Rows are kept in the order in which they came, so that the oldest lie together, and are
found by the name of their blob. Names of blobs that continue another are kept under
that one's. What is in a row is its owner's affair.
"""

from __future__ import annotations

import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from blobstore.errors import NewerFormat
from blobstore.tiering.disk import PosixDisk
from blobstore.tiering.environment import Environment
from blobstore.units import MIB

FORMAT_VERSION = 1

_META, _ROWS, _NAMES, _CHILDREN, _TERMS = b"meta", b"rows", b"names", b"children", b"terms"
_SEQ = struct.Struct(">Q")
_VERSION = struct.Struct("<I")
_TOTALS = struct.Struct("<QQQQ")
_RESERVE_BYTES = MIB

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Totals:
    """Over all rows."""

    next_seq: int = 1
    rows: int = 0
    nbytes: int = 0
    """Of the rows and all that belongs to them."""
    kv_nbytes: int = 0
    """Of the payloads that they stand for."""


class Reading(Protocol):
    """A snapshot. Names are bytes, rows are numbered in the order in which they came."""

    def seq_of(self, name: bytes) -> int | None:
        """The number of a blob's row."""
        ...

    def row(self, seq: int) -> bytes | None:
        """The row with that number."""
        ...

    def oldest(self) -> tuple[int, bytes] | None:
        """The first row and its number."""
        ...

    def rows(self) -> Iterator[bytes]:
        """All rows, from the oldest on."""
        ...

    def children(self, name: bytes) -> Iterator[bytes]:
        """Names of blobs that continue one."""
        ...

    def totals(self) -> Totals:
        """As `set_totals` left them."""
        ...

    def terms(self) -> dict[bytes, bytes]:
        """What was told of namespaces, by id."""
        ...


class Writing(Reading, Protocol):
    """A transaction."""

    def put(self, seq: int, name: bytes, parent: bytes, row: bytes) -> None:
        """Add a row; `parent` is the name of the blob that it continues, or b""."""
        ...

    def remove(self, seq: int, name: bytes, parent: bytes) -> None:
        """Undo `put`; a name that is not known (b"") is left without a row."""
        ...

    def set_totals(self, totals: Totals) -> None:
        """Remember them."""
        ...

    def set_terms(self, namespace_id: bytes, terms: bytes) -> None:
        """Remember them."""
        ...


class Tables(Protocol):
    """One writes at a time, any thread may read."""

    def reading(self) -> AbstractContextManager[Reading]:
        """A snapshot, for a moment. Raises StorageFailed."""
        ...

    def write(self, change: Callable[[Writing], T], *, deletes_only: bool = False) -> T:
        """Run `change`, perhaps more than once, in one durable transaction.

        Raises Full or StorageFailed with nothing of it visible.
        """
        ...

    @property
    def disk_bytes(self) -> int:
        """What they take on the disk."""
        ...

    def close(self) -> None:
        """No other call may be in flight."""
        ...


class LmdbTables:
    """Tables on disk."""

    def __init__(self, directory: Path, most_bytes: int) -> None:
        """Open or make them; they grow while no more than `most_bytes` are in use.

        Raises NewerFormat, NotEnough, or SetupError for files that are damaged.
        """
        directory.mkdir(mode=0o700, exist_ok=True)
        names = (_META, _ROWS, _NAMES, _CHILDREN, _TERMS)
        self._env = Environment(directory, names, PosixDisk(), _RESERVE_BYTES)
        # Not what is granted: of that a lowered bound would leave nothing to delete with.
        self._env.claim = lambda nbytes: self._env.live_bytes + nbytes <= most_bytes
        try:
            self._env.write(lambda txn: self._introduce(txn, directory), deletes_only=True)
        except BaseException:
            self._env.close()
            raise

    @contextmanager
    def reading(self) -> Iterator[Reading]:
        """As Tables.reading."""
        with self._env.reading(copies=True) as txn:
            yield _LmdbTransaction(self._env, txn)

    def write(self, change: Callable[[Writing], T], *, deletes_only: bool = False) -> T:
        """As Tables.write."""
        return self._env.write(
            lambda txn: change(_LmdbTransaction(self._env, txn)), deletes_only=deletes_only
        )

    @property
    def disk_bytes(self) -> int:
        """As Tables.disk_bytes."""
        return self._env.granted_bytes

    def close(self) -> None:
        """As Tables.close."""
        self._env.close()

    def _introduce(self, txn: Any, directory: Path) -> None:
        meta = self._env.table(_META)
        found = txn.get(b"version", db=meta)
        if found is None:
            txn.put(b"version", _VERSION.pack(FORMAT_VERSION), db=meta)
        elif _VERSION.unpack(found)[0] > FORMAT_VERSION:
            raise NewerFormat(
                f"{directory} is of version {_VERSION.unpack(found)[0]}, this program reads up to "
                f"{FORMAT_VERSION}: upgrade it"
            )


class _LmdbTransaction:
    """Implements Writing; of a snapshot only what reads may be called."""

    def __init__(self, env: Environment, txn: Any) -> None:
        self._table = env.table
        self._txn = txn

    def seq_of(self, name: bytes) -> int | None:
        packed = self._txn.get(name, db=self._table(_NAMES))
        return None if packed is None else _SEQ.unpack(packed)[0]

    def row(self, seq: int) -> bytes | None:
        found: bytes | None = self._txn.get(_SEQ.pack(seq), db=self._table(_ROWS))
        return found

    def oldest(self) -> tuple[int, bytes] | None:
        cursor = self._txn.cursor(self._table(_ROWS))
        return (_SEQ.unpack(cursor.key())[0], cursor.value()) if cursor.first() else None

    def rows(self) -> Iterator[bytes]:
        cursor = self._txn.cursor(self._table(_ROWS))
        return iter(cursor.iternext(keys=False, values=True))

    def children(self, name: bytes) -> Iterator[bytes]:
        cursor = self._txn.cursor(self._table(_CHILDREN))
        prefix = _above(name)
        if cursor.set_range(prefix):
            for found in cursor.iternext(keys=True, values=False):
                if not found.startswith(prefix):
                    return
                yield found[len(prefix) :]

    def totals(self) -> Totals:
        packed = self._txn.get(b"totals", db=self._table(_META))
        return Totals() if packed is None else Totals(*_TOTALS.unpack(packed))

    def terms(self) -> dict[bytes, bytes]:
        return dict(self._txn.cursor(self._table(_TERMS)).iternext())

    def put(self, seq: int, name: bytes, parent: bytes, row: bytes) -> None:
        packed = _SEQ.pack(seq)
        self._txn.put(packed, row, db=self._table(_ROWS), append=True)
        self._txn.put(name, packed, db=self._table(_NAMES))
        if parent:
            self._txn.put(_above(parent) + name, b"", db=self._table(_CHILDREN))

    def remove(self, seq: int, name: bytes, parent: bytes) -> None:
        self._txn.delete(_SEQ.pack(seq), db=self._table(_ROWS))
        if name:
            self._txn.delete(name, db=self._table(_NAMES))
        if parent:
            self._txn.delete(_above(parent) + name, db=self._table(_CHILDREN))

    def set_totals(self, totals: Totals) -> None:
        packed = _TOTALS.pack(totals.next_seq, totals.rows, totals.nbytes, totals.kv_nbytes)
        self._txn.put(b"totals", packed, db=self._table(_META))

    def set_terms(self, namespace_id: bytes, terms: bytes) -> None:
        self._txn.put(namespace_id, terms, db=self._table(_TERMS))


def _above(name: bytes) -> bytes:
    """What names of blobs that continue `name` begin with: no name is the start of another."""
    return bytes([len(name)]) + name


class MemoryTables:
    """Tables that no restart survives. Implements Writing, too: one transaction at a time."""

    disk_bytes = 0

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: OrderedDict[int, bytes] = OrderedDict()
        self._names: dict[bytes, int] = {}
        self._children: dict[bytes, dict[bytes, None]] = {}
        self._totals = Totals()
        self._terms: dict[bytes, bytes] = {}

    @contextmanager
    def reading(self) -> Iterator[Reading]:
        """As Tables.reading."""
        with self._lock:
            yield self

    def write(self, change: Callable[[Writing], T], *, deletes_only: bool = False) -> T:
        """As Tables.write."""
        with self._lock:
            return change(self)

    def close(self) -> None:
        """As Tables.close."""

    def seq_of(self, name: bytes) -> int | None:
        """As Reading.seq_of."""
        return self._names.get(name)

    def row(self, seq: int) -> bytes | None:
        """As Reading.row."""
        return self._rows.get(seq)

    def oldest(self) -> tuple[int, bytes] | None:
        """As Reading.oldest."""
        return next(iter(self._rows.items()), None)

    def rows(self) -> Iterator[bytes]:
        """As Reading.rows."""
        return iter(self._rows.values())

    def children(self, name: bytes) -> Iterator[bytes]:
        """As Reading.children."""
        return iter(self._children.get(name, ()))

    def totals(self) -> Totals:
        """As Reading.totals."""
        return self._totals

    def terms(self) -> dict[bytes, bytes]:
        """As Reading.terms."""
        return dict(self._terms)

    def put(self, seq: int, name: bytes, parent: bytes, row: bytes) -> None:
        """As Writing.put."""
        self._rows[seq] = row
        self._names[name] = seq
        if parent:
            self._children.setdefault(parent, {})[name] = None

    def remove(self, seq: int, name: bytes, parent: bytes) -> None:
        """As Writing.remove."""
        del self._rows[seq]
        self._names.pop(name, None)
        if parent:
            siblings = self._children[parent]
            del siblings[name]
            if not siblings:
                del self._children[parent]

    def set_totals(self, totals: Totals) -> None:
        """As Writing.set_totals."""
        self._totals = totals

    def set_terms(self, namespace_id: bytes, terms: bytes) -> None:
        """As Writing.set_terms."""
        self._terms[namespace_id] = terms

"""One LMDB environment that neither outgrows its room nor fails to delete.

Owns the files of one catalogue directory. The map is exactly as large as the
room it was granted, and every byte of it is allocated on the disk, with a
reserve behind it that only deletions may use: a transaction can run out of map,
but never out of disk in the middle. When it runs out of map, the map grows
under a fence that waits for our own readers, as LMDB demands.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import lmdb

from blobstore.errors import Full, NotEnough, SetupError, StorageFailed
from blobstore.tiering.disk import Disk
from blobstore.units import MIB, format_size

READERS_MAX = 512
"""Slots for read transactions; ours are as many as there are threads in a read."""

_TURN = b"turn"
_PAGE_BYTES = 4096
_FIRST_MAP_BYTES = MIB
_STEP_BYTES_MIN, _STEP_BYTES_MAX = MIB, 64 * MIB
_OTHER_FILES_BYTES = 64 * 1024
"""Lock table and directories."""

T = TypeVar("T")


class _Fence:
    """Lets many read, or one be alone."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers = 0
        self._closed = False

    @contextmanager
    def reading(self) -> Iterator[None]:
        with self._changed:
            while self._closed:
                self._changed.wait()
            self._readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                if not self._readers:
                    self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._changed:
            self._closed = True
            while self._readers:
                self._changed.wait()
        try:
            yield
        finally:
            with self._changed:
                self._closed = False
                self._changed.notify_all()


class Environment:
    """An open environment. Any thread may call; all calls may block on the disk.

    `claim` is asked for more room before the map grows (a negative number gives
    it back); `make_room` is called when the disk has none, and may free some.
    """

    def __init__(self, directory: Path, names: tuple[bytes, ...], disk: Disk, reserve: int) -> None:
        self.claim: Callable[[int], bool] = lambda _: True
        self.make_room: Callable[[], None] = lambda: None
        self._directory = directory
        self._file = directory / "data.mdb"
        self._names = names
        self._disk = disk
        self._fence = _Fence()
        self._writer = threading.Lock()
        self._reserve_wanted_bytes = reserve
        self._reserve_bytes = 0
        self._map_bytes = 0
        self._suspect = False
        self.live_bytes = 0
        """Pages in use after the last write; the rest of the map is free, though in pieces."""
        self.n_readers = 0
        """Reader slots in use or kept for reuse at the last write, of all processes."""
        self._tables: dict[bytes, Any] = {}
        self._env: lmdb.Environment = self._open()
        try:
            self._settle_in()
        except BaseException:
            self._env.close()
            raise

    @property
    def granted_bytes(self) -> int:
        """What the catalogue takes on the disk, whether filled or not."""
        return self._map_bytes + self._reserve_bytes + _OTHER_FILES_BYTES

    def table(self, name: bytes) -> Any:
        """The handle of one of the tables; valid within the current transaction."""
        return self._tables[name]

    @contextmanager
    def reading(self, *, copies: bool = False) -> Iterator[Any]:
        """A snapshot, for a moment: it holds back the reuse of pages and the map's growth.

        Keys and values are views that end with it, unless `copies` are asked
        for. Raises StorageFailed.
        """
        with self._fence.reading():
            try:
                with self._env.begin() if copies else self._env.begin(buffers=True) as txn:
                    yield txn
            except lmdb.Error as error:
                raise self._failed(error, "read") from error

    def write(self, change: Callable[[lmdb.Transaction], T], *, deletes_only: bool = False) -> T:
        """Run `change` in one transaction, durable when this returns.

        `change` may run more than once. Raises Full where there is no room for
        what it adds, StorageFailed where the disk refuses; nothing of it is
        then visible, save that a failed sync may leave it in doubt.
        """
        with self._writer:
            if self._suspect:
                self._reopen()
            if not deletes_only:
                self._restore_reserve()
            turned = False
            while True:
                try:
                    return self._transact(change)
                except lmdb.MapFullError as error:
                    # Pages that a dead reader holds back are room, too.
                    if self._env.reader_check() or self._grow(deletes_only):
                        continue
                    if turned or not self._turn_over():
                        raise Full(
                            f"ssd: the catalogue has {format_size(self._map_bytes)} and there is "
                            "no room for more: free some blobs"
                        ) from error
                    turned = True
                except (lmdb.Error, OSError) as error:
                    self._suspect = True
                    raise self._failed(error, "write") from error

    def clear_dead_readers(self) -> int:
        """Free the slots of processes that died in a read; they would keep pages for ever."""
        with self._fence.reading():
            return int(self._env.reader_check())

    def forget_pages(self) -> None:
        """Unmap what a scan of everything brought into memory; what is needed comes back."""
        with self._writer:
            self._resize(self._map_bytes)

    def close(self) -> None:
        """Wait for our readers, then close the files."""
        with self._writer, self._fence.alone():
            self._env.close()

    def _transact(self, change: Callable[[lmdb.Transaction], T]) -> T:
        txn = self._env.begin(write=True)
        try:
            result = change(txn)
            live_bytes = self._used_pages(txn) * _PAGE_BYTES
            self._disk.before_commit()
            txn.commit()
        except BaseException:
            txn.abort()
            raise
        self.live_bytes = live_bytes
        self.n_readers = self._env.info()["num_readers"]
        self._disk.after_commit()
        return result

    def _used_pages(self, txn: lmdb.Transaction) -> int:
        found = [txn.stat(table) for table in self._tables.values()]
        return sum(s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"] for s in found)

    def _turn_over(self) -> bool:
        """A transaction for its own sake: pages serve again only in the second after theirs."""
        try:
            self._transact(lambda txn: txn.put(_TURN, struct.pack("<Q", txn.id())))
        except lmdb.MapFullError:
            return False
        return True

    def _open(self) -> lmdb.Environment:
        size = self._file.stat().st_size if self._file.exists() else 0
        map_bytes = self._map_bytes or max(_FIRST_MAP_BYTES, size - self._reserve_wanted_bytes)
        try:
            env = lmdb.open(
                str(self._directory),
                map_size=map_bytes // _PAGE_BYTES * _PAGE_BYTES,
                max_dbs=len(self._names),
                max_readers=READERS_MAX,
                mode=0o600,
            )
        except lmdb.Error as error:
            raise SetupError(
                f"the catalogue {self._file} cannot be opened: {error}; "
                "restore it, or move it and the segments away to start empty"
            ) from error
        # A page beyond the end of the file would be a SIGBUS, not an error.
        wanted = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
        if size and wanted > size:
            env.close()
            raise SetupError(
                f"the catalogue {self._file} was cut: {size} bytes, wanted {wanted}; "
                "restore it, or move it and the segments away to start empty"
            )
        self._map_bytes = env.info()["map_size"]
        return env

    def _settle_in(self) -> None:
        """Allocate the map and the reserve, and open the tables."""
        wanted = self._map_bytes + self._reserve_wanted_bytes
        if self._allocate(wanted):
            self._reserve_bytes = self._reserve_wanted_bytes
        elif not self._allocate(self._map_bytes):
            raise NotEnough(
                f"the catalogue needs {format_size(wanted)} in {self._directory}, "
                f"free are {format_size(self._disk.free_bytes(self._directory))}"
            )
        else:
            self._reserve_bytes = max(0, self._file.stat().st_size - self._map_bytes)
        self._open_tables()
        self._disk.sync_dir(self._directory)  # LMDB syncs its files, not their names

    def _open_tables(self) -> None:
        self._tables = {name: self._env.open_db(name) for name in self._names}

    def _reopen(self) -> None:
        """After a failed write LMDB may refuse everything until it is opened again."""
        with self._fence.alone():
            self._env.close()
            try:
                self._env = self._open()
                self._open_tables()
            except (SetupError, OSError, lmdb.Error) as error:
                raise self._failed(error, "reopen") from error
        self._suspect = False

    def _grow(self, deletes_only: bool) -> bool:
        step = min(max(self._map_bytes // 4, _STEP_BYTES_MIN), _STEP_BYTES_MAX)
        for nbytes in (step // _PAGE_BYTES * _PAGE_BYTES, _STEP_BYTES_MIN):
            if self._extend(nbytes):
                self._resize(self._map_bytes + nbytes)
                return True
        if deletes_only and self._reserve_bytes:
            reserve, self._reserve_bytes = self._reserve_bytes, 0
            self._resize(self._map_bytes + reserve)
            return True
        return False

    def _restore_reserve(self) -> None:
        missing = self._reserve_wanted_bytes - self._reserve_bytes
        if not missing:
            return
        if not self._extend(missing):
            raise Full("ssd: the catalogue's head-room is used up: free some blobs")
        self._reserve_bytes += missing

    def _extend(self, nbytes: int) -> bool:
        """Have `nbytes` more on the disk behind map and reserve."""
        if not self.claim(nbytes):
            return False
        if self._allocate(self._map_bytes + self._reserve_bytes + nbytes):
            return True
        self.claim(-nbytes)
        return False

    def _allocate(self, nbytes: int) -> bool:
        """Give the file's first `nbytes` blocks; False if the disk has not that many."""
        fd = os.open(self._file, os.O_RDWR | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            for last in (False, True):
                try:
                    os.posix_fallocate(fd, 0, nbytes)
                except OSError as error:
                    os.ftruncate(fd, size)
                    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                        raise self._failed(error, "allocate") from error
                    if not last:
                        self.make_room()
                else:
                    return True
        finally:
            os.close(fd)
        return False

    def _resize(self, nbytes: int) -> None:
        with self._fence.alone():
            self._env.set_mapsize(nbytes)
        self._map_bytes = nbytes

    def _failed(self, error: Exception, doing: str) -> StorageFailed:
        code = getattr(error, "errno", None) or errno.EIO
        if isinstance(error, lmdb.DiskError):
            code = errno.ENOSPC
        return StorageFailed(code, f"cannot {doing} the catalogue {self._file}: {error}")

"""A real disk that hangs when told."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from blobstore.tiering.disk import Handle, PosixDisk

OPERATIONS = ("read", "write", "sync", "commit")
HANG_MAX_S = 60.0
"""A test that forgot to let go fails rather than hangs."""


class HangingDisk(PosixDisk):
    """While it is `hung`, whatever reads, writes, syncs or commits waits."""

    def __init__(self) -> None:
        self._hung: tuple[str, ...] = ()
        self._goes_on = threading.Event()
        self._goes_on.set()
        self._lock = threading.Lock()
        self.hanging: list[str] = []
        """The operations that wait now."""

    @contextmanager
    def hung(self, *operations: str) -> Iterator[None]:
        """These operations, or all, hang until the end of the block."""
        self._hung = operations or OPERATIONS
        self._goes_on.clear()
        try:
            yield
        finally:
            self._goes_on.set()

    def pwritev(self, handle: Handle, views: Sequence[memoryview], offset: int) -> None:
        self._pass("write")
        super().pwritev(handle, views, offset)

    def preadv(self, handle: Handle, views: Sequence[memoryview], offset: int) -> None:
        self._pass("read")
        super().preadv(handle, views, offset)

    def sync(self, handle: Handle) -> None:
        self._pass("sync")
        super().sync(handle)

    def before_commit(self) -> None:
        self._pass("commit")

    def _pass(self, operation: str) -> None:
        if self._goes_on.is_set() or operation not in self._hung:
            return
        with self._lock:
            self.hanging.append(operation)
        assert self._goes_on.wait(HANG_MAX_S), f"a {operation} hung for {HANG_MAX_S} s"
        with self._lock:
            self.hanging.remove(operation)

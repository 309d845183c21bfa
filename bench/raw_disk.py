"""The limit of the disk: plain O_DIRECT reads and writes, several in flight."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from blobstore.bench.pairs import timed
from blobstore.bench.raw_copy import Bytes
from blobstore.errors import SetupError

IN_FLIGHT = 4


class RawFile:
    """A nameless file in `directory` that bypasses the page cache; gone when closed.

    Buffers are page-aligned and of equal size, a multiple of a page. Raises
    SetupError where the file system has no O_DIRECT.
    """

    def __init__(self, directory: Path) -> None:
        with tempfile.NamedTemporaryFile(dir=directory, prefix="bench-") as file:
            try:
                self._fd = os.open(file.name, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
            except OSError as error:
                raise SetupError(
                    f"{directory} does not take O_DIRECT ({error.strerror}): "
                    "name a directory on a disk with --data"
                ) from error
        self._threads = ThreadPoolExecutor(IN_FLIGHT)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._threads.shutdown()
        os.close(self._fd)

    def write(self, buffers: Sequence[Bytes]) -> float:
        """Write `buffers` one after the other, each followed by fdatasync; the seconds taken."""

        def one(numbered: tuple[int, Bytes]) -> None:
            number, buffer = numbered
            _whole(os.pwrite, self._fd, buffer, number * buffer.nbytes)
            os.fdatasync(self._fd)

        return self._run(one, buffers)

    def read(self, buffers: Sequence[Bytes], *, first: int = 0) -> float:
        """Fill `buffers` with what was written from buffer number `first` on; the seconds taken."""

        def one(numbered: tuple[int, Bytes]) -> None:
            number, buffer = numbered
            _whole(_pread_into, self._fd, buffer, (first + number) * buffer.nbytes)

        return self._run(one, buffers)

    def truncate(self) -> None:
        """Give the space back, so that the next write takes new space again."""
        os.ftruncate(self._fd, 0)
        os.fsync(self._fd)

    def _run(self, one: Callable[[tuple[int, Bytes]], None], buffers: Sequence[Bytes]) -> float:
        return timed(lambda: list(self._threads.map(one, enumerate(buffers))))


def _pread_into(fd: int, view: memoryview, offset: int) -> int:
    return os.preadv(fd, [view], offset)


def _whole(
    step: Callable[[int, memoryview, int], int], fd: int, buffer: Bytes, offset: int
) -> None:
    view, done = buffer.data, 0
    while done < view.nbytes:
        moved = step(fd, view[done:], offset + done)
        if moved == 0:
            raise SetupError(f"the raw file ends at {offset + done}, before the buffer is full")
        done += moved

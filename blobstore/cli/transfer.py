"""Bytes between files and blobs, in steps that a bar can show."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from blobstore.errors import BlobStoreError, InvalidRequest, StorageFailed
from blobstore.units import MIB, format_size

if TYPE_CHECKING:
    from blobstore.clients import Client

STANDARD = "-"
"""In place of a file's name: standard input or output."""

STEP_BYTES = 4 * MIB
BAR_BYTES = 64 * MIB
"""Less is done before a bar could be read."""

Advance = Callable[[int], None]

_SILENT = logging.NullHandler()


def client(path: Path, timeout_s: float) -> Client:
    """A client whose faults show in its results alone: a command says one line about them."""
    from blobstore.clients import Client  # here: most commands need none of its libraries

    logging.getLogger("blobstore.clients").addHandler(_SILENT)
    return Client(f"unix:{path}", timeout_s=timeout_s)


@contextmanager
def progress(label: str, nbytes: int) -> Iterator[Advance]:
    """A bar on standard error, if that is a terminal and there is enough to move."""
    if nbytes < BAR_BYTES or not sys.stderr.isatty():
        yield lambda step: None
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True),
        _Speed(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=nbytes)
        yield lambda step: bar.advance(task, step)


@contextmanager
def source(name: str, most: int) -> Iterator[tuple[BinaryIO, int]]:
    """A file that can be read twice, at its start, and how many bytes are in it: `most` at most.

    What comes through a pipe is put into a temporary file first: its length must be known.
    """
    with ExitStack() as stack:
        try:
            file = sys.stdin.buffer
            if name != STANDARD:
                file = stack.enter_context(Path(name).open("rb"))
            regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            if not regular or file.tell():
                file = _spool(file, stack.enter_context(tempfile.TemporaryFile()), most)
            nbytes = file.seek(0, os.SEEK_END)
            file.seek(0)
        except OSError as error:
            raise _unreadable(name, error) from error
        if nbytes > most:
            raise BlobStoreError(
                f"{name} has more than {most:,} bytes, the most that the daemon lends to a process "
                "(local.lent_max)"
            )
        yield file, nbytes


def sha256(file: BinaryIO, nbytes: int, before: bytes) -> bytes:
    """Of `before` and then all that is in `file`, which is at its start again afterwards."""
    state, room = hashlib.sha256(before), memoryview(bytearray(min(STEP_BYTES, nbytes)))
    with progress("hashing", nbytes) as advance:
        for part in _parts(room, nbytes):
            _fill(file, part)
            state.update(part)
            advance(part.nbytes)
    file.seek(0)
    return state.digest()


def load(file: BinaryIO, payload: memoryview) -> None:
    """Fill `payload` from `file`."""
    with progress("writing", payload.nbytes) as advance:
        for start in range(0, payload.nbytes, STEP_BYTES):
            with payload[start : start + STEP_BYTES] as part:
                _fill(file, part)
                advance(part.nbytes)


def save(payload: memoryview, file: BinaryIO) -> None:
    """Write all of `payload` to `file`."""
    with progress("reading", payload.nbytes) as advance:
        for start in range(0, payload.nbytes, STEP_BYTES):
            with payload[start : start + STEP_BYTES] as part:
                file.write(part)
                advance(part.nbytes)
    file.flush()


@contextmanager
def target(name: str) -> Iterator[BinaryIO]:
    """A file to write to; one by name is there once all of it is, or stays as it was."""
    if name == STANDARD:
        yield sys.stdout.buffer
        return
    path = Path(name).resolve()
    try:
        if path.exists() and not path.is_file():  # a device, a pipe
            with path.open("wb") as file:
                yield file
        else:
            with _replaced(path) as file:
                yield file
    except BlobStoreError:  # some of which are OSErrors
        raise
    except OSError as error:
        raise StorageFailed(f"cannot write {name}: {error.strerror or error}") from error


def pace(nbytes: int, seconds: float) -> str:
    """How much in what time, and how fast, for people."""
    rate = f" ({format_size(nbytes / seconds)}/s)" if nbytes and seconds > 0 else ""
    return f"{format_size(nbytes)} in {seconds:.2g} s{rate}"


class _Speed(ProgressColumn):
    """In the units of all other output; rich's own are decimal."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{format_size(speed)}/s" if speed else "", "progress.data.speed")


def _spool(pipe: BinaryIO, spool: BinaryIO, most: int) -> BinaryIO:
    """`spool`, with all that comes through the pipe; no more than shows that it is too much."""
    while spool.tell() <= most and (data := pipe.read(STEP_BYTES)):
        spool.write(data)
    return spool


def _parts(room: memoryview, nbytes: int) -> Iterator[memoryview]:
    """`room` again and again, `nbytes` in all."""
    while nbytes > 0:
        part = room[: min(room.nbytes, nbytes)]
        yield part
        nbytes -= part.nbytes


def _fill(file: BinaryIO, part: memoryview) -> None:
    filled = 0
    while filled < part.nbytes:
        try:
            got = file.readinto(part[filled:])  # type: ignore[attr-defined]
        except OSError as error:
            raise _unreadable(getattr(file, "name", STANDARD), error) from error
        if not got:
            raise InvalidRequest("the file became shorter while it was read: put it again")
        filled += got


def _unreadable(name: object, error: OSError) -> StorageFailed:
    return StorageFailed(f"cannot read {name}: {error.strerror or error}")


@contextmanager
def _replaced(path: Path) -> Iterator[BinaryIO]:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("xb") as file:
            yield file
        if path.exists():
            shutil.copymode(path, beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)

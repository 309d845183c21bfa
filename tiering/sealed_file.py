"""Small files that are replaced as a whole, and known to be whole when they are read.

Layout: kind (8 bytes), version (u32), length of the body (u64), xxh3-128 of all that and
the body, the body. What the body means is its owner's affair.
"""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from pathlib import Path

from xxhash import xxh3_128_digest

_HEAD = struct.Struct("<8sIQ")
_DIGEST_BYTES = 16
_START = _HEAD.size + _DIGEST_BYTES

BODY_BYTES_MAX = 64 << 20
"""Nothing that is kept this way comes near it: a longer file is not ours."""


class Unusable(Exception):
    """The file is not there, or not what was asked for; the message is a reason to show."""


def write_sealed(path: Path, kind: bytes, version: int, body: bytes) -> None:
    """Replace the file at `path`; it holds the old or the new body, whatever happens.

    Blocks until the new one would survive a loss of power. Raises OSError; the old file
    then stays.
    """
    assert len(kind) == 8
    assert len(body) <= BODY_BYTES_MAX
    head = _HEAD.pack(kind, version, len(body))
    fresh = path.with_name(f"{path.name}.new")
    try:
        _write(fresh, head + xxh3_128_digest(head + body) + body)
        fresh.replace(path)
    except OSError:
        with suppress(OSError):
            fresh.unlink()
        raise
    _sync_directory(path.parent)


def read_sealed(path: Path, kind: bytes, version: int) -> bytes:
    """The body of the file at `path`. Raises Unusable unless it is whole, and of this version."""
    try:
        with path.open("rb") as file:
            found = file.read(_START + BODY_BYTES_MAX + 1)
    except FileNotFoundError:
        raise Unusable("there is no file yet") from None
    except OSError as error:
        raise Unusable(f"the file cannot be read: {error.strerror}") from error
    if len(found) < _START:
        raise Unusable("the file is damaged: it is cut short")
    found_kind, found_version, n_body = _HEAD.unpack_from(found)
    body = found[_START:]
    if found_kind != kind:
        raise Unusable("the file is damaged: it is of another kind")
    if n_body != len(body):
        raise Unusable("the file is damaged: its length is wrong")
    if found[_HEAD.size : _START] != xxh3_128_digest(found[: _HEAD.size] + body):
        raise Unusable("the file is damaged: its checksum is wrong")
    if found_version != version:
        raise Unusable(f"the file is of version {found_version}, this program's is {version}")
    return body


def _write(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

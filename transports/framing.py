"""Frames on a stream socket: a fixed header, then a body.

    magic "BSF1" | request id u32 | boot id u64 | body length u64 | body

Little-endian. A request and its reply carry the same request id; id 0 asks for
no reply. The boot id is the daemon's; 0 in a client's first frame. Any breach
of the format leaves the position in the stream unknown, so the connection must
be closed. Test vectors: docs/FORMAT.md.
"""

from __future__ import annotations

import struct
from typing import NoReturn

from blobstore.errors import FrameTooLarge, ProtocolError

MAGIC = b"BSF1"
_HEADER = struct.Struct("<4sIQQ")
HEADER_BYTES = _HEADER.size
MAX_BODY_BYTES = 8 << 20
"""Room for 100,000 keys of 64 bytes; blobs never travel in control frames."""

Frame = tuple[int, int, memoryview]
"""Request id, boot id, body."""


def pack(request_id: int, boot_id: int, body: bytes) -> bytes:
    """One whole frame."""
    return _HEADER.pack(MAGIC, request_id, boot_id, len(body)) + body


def pack_header(frame: bytearray, request_id: int, boot_id: int) -> None:
    """Complete a frame whose body was written from HEADER_BYTES on: no copy, unlike `pack`."""
    _HEADER.pack_into(frame, 0, MAGIC, request_id, boot_id, len(frame) - HEADER_BYTES)


def unpack_header(header: bytes | memoryview, start: int = 0) -> tuple[int, int, int]:
    """Request id, boot id and body length; ProtocolError unless it is a header at `start`."""
    if len(header) - start < HEADER_BYTES:
        raise ProtocolError(f"a header has {HEADER_BYTES} bytes, found {len(header) - start}")
    magic, request_id, boot_id, length = _HEADER.unpack_from(header, start)
    if magic != MAGIC:
        raise ProtocolError(f"not a blobstore frame: starts with {bytes(magic)!r}")
    return request_id, boot_id, length


class FrameReader:
    """Cuts a byte stream into frames; keeps what is incomplete for the next call."""

    def __init__(self, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._max_body_bytes = max_body_bytes
        self._kept = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that `data` completes, in order.

        Bodies are views of memory that nobody writes again. Raises
        FrameTooLarge before anything is allocated for the body, and
        ProtocolError; after either the reader is of no further use.
        """
        if self._kept:
            self._kept += data
            if not self._holds_a_frame():
                return []
            data, self._kept = bytes(self._kept), bytearray()
        frames = []
        view, start, size = memoryview(data), 0, len(data)
        while size - start >= HEADER_BYTES:
            request_id, boot_id, length = unpack_header(data, start)
            if length > self._max_body_bytes:
                self._refuse(length)
            end = start + HEADER_BYTES + length
            if end > size:
                break
            frames.append((request_id, boot_id, view[start + HEADER_BYTES : end]))
            start = end
        if start < size:
            self._kept += view[start:]
        return frames

    def _holds_a_frame(self) -> bool:
        if len(self._kept) < HEADER_BYTES:
            return False
        _, _, length = unpack_header(bytes(self._kept[:HEADER_BYTES]))
        if length > self._max_body_bytes:
            self._refuse(length)
        return len(self._kept) >= HEADER_BYTES + length

    def _refuse(self, length: int) -> NoReturn:
        raise FrameTooLarge(f"frame of {length} bytes exceeds the limit of {self._max_body_bytes}")

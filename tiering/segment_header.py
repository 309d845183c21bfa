"""The first block of a segment file: whose it is. Layout: docs/FORMAT.md, "On disk".

The catalogue alone says what lies in a segment. The header keeps a file that
was brought in from another store from being taken for one of ours.
"""

from __future__ import annotations

import struct
from enum import Enum

from xxhash import xxh3_64_intdigest

from blobstore.errors import NewerFormat

SEGMENT_VERSION = 1

_MAGIC = b"BLOBSEG\0"
_HEADER = struct.Struct("<8sIIQ16s")  # magic, version, number, size, store id
_CHECKSUM = struct.Struct("<Q")
HEADER_USED_BYTES = _HEADER.size + _CHECKSUM.size


class Owner(Enum):
    """What a header says."""

    OURS = "ours"
    FOREIGN = "foreign"
    DAMAGED = "damaged"


def encode_header(number: int, nbytes: int, store_id: bytes) -> bytes:
    """The used part of the first block; zeros follow."""
    head = _HEADER.pack(_MAGIC, SEGMENT_VERSION, number, nbytes, store_id)
    return head + _CHECKSUM.pack(xxh3_64_intdigest(head))


def owner_of(block: bytes, number: int, store_id: bytes) -> Owner:
    """Whether the segment that starts with `block` is `number` of the store `store_id`.

    Raises NewerFormat for a sound header of a later version.
    """
    head = block[: _HEADER.size]
    magic, version, found_number, _, found_id = _HEADER.unpack(head)
    (checksum,) = _CHECKSUM.unpack(block[_HEADER.size : HEADER_USED_BYTES])
    if magic != _MAGIC or checksum != xxh3_64_intdigest(head):
        return Owner.DAMAGED
    if version > SEGMENT_VERSION:
        raise NewerFormat(
            f"segment {number} has format {version}, this program knows up to {SEGMENT_VERSION}: "
            "use the newer program, or another data directory"
        )
    return Owner.OURS if (found_number, found_id) == (number, store_id) else Owner.FOREIGN

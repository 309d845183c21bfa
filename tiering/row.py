"""One blob's line in the catalogue, and its bytes. Layout: docs/FORMAT.md, "On disk"."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from blobstore.errors import InvalidRequest
from blobstore.tiering.tier import Extent

RETENTIONS = ("volatile", "standard", "durable")
"""By their numbers on disk."""

ROW_KEY_BYTES = 4
"""The namespace's number, big-endian, before the blob's key."""

_CHECKSUM = struct.Struct("<Q")
# last use, payload bytes, segment, offset, tokens, retention, length of the parent's key, digest
_HEAD = struct.Struct("<dQIQIBB16s")
_LAST_USE = struct.Struct("<d")
_START = _CHECKSUM.size
_VARIABLE = _START + _HEAD.size


@dataclass(frozen=True, slots=True)
class Row:
    """One blob on SSD."""

    namespace: bytes
    """The namespace's id."""
    key: bytes
    parent: bytes
    """Key of the blob that this one continues; empty at the root."""
    tokens: int
    nbytes: int
    digest: bytes
    pieces: bytes
    """Digests of all pieces."""
    extent: Extent | None
    """Where the payload lies; None: inside the catalogue."""
    retention: str
    last_used_wall_s: float


def encode_row(row: Row, row_key: bytes) -> bytes:
    """The stored bytes of `row`, whose own key in the catalogue is `row_key`.

    Raises InvalidRequest for what the format cannot hold.
    """
    extent = row.extent or Extent(0, 0, 0)
    try:
        head = _HEAD.pack(
            row.last_used_wall_s,
            row.nbytes,
            extent.place,
            extent.offset,
            row.tokens,
            RETENTIONS.index(row.retention),
            len(row.parent),
            row.digest,
        )
    except (struct.error, ValueError) as error:
        raise InvalidRequest(f"a row cannot hold {row}: {error}") from error
    return seal_row(row_key, head + row.parent + row.pieces)


def seal_row(row_key: bytes, body: bytes) -> bytes:
    """Put before `body` its checksum, which covers the row's key too."""
    return _CHECKSUM.pack(xxh3_64_intdigest(row_key + body)) + body


def is_sound(row_key: bytes, record: bytes) -> bool:
    """Whether `record` is what was stored under `row_key`."""
    if len(record) < _VARIABLE:
        return False
    checksum: int = _CHECKSUM.unpack_from(record)[0]
    return checksum == xxh3_64_intdigest(row_key + record[_START:])


def decode_row(row_key: bytes, record: bytes, namespace: bytes, now_wall_s: float) -> Row:
    """The row in a sound record; a last use in the future becomes `now_wall_s`."""
    used, nbytes, place, offset, tokens, retention, n_parent, digest = _HEAD.unpack_from(
        record, _START
    )
    pieces_start = _VARIABLE + n_parent
    return Row(
        namespace,
        row_key[ROW_KEY_BYTES:],
        record[_VARIABLE:pieces_start],
        tokens,
        nbytes,
        digest,
        record[pieces_start:],
        Extent(place, offset, nbytes) if place else None,
        RETENTIONS[retention],
        used if used <= now_wall_s else now_wall_s,
    )


def with_last_use(row_key: bytes, record: bytes, last_used_wall_s: float) -> bytes:
    """The record with another time of last use."""
    body = _LAST_USE.pack(last_used_wall_s) + record[_START + _LAST_USE.size :]
    return seal_row(row_key, body)


def place_of(row_key: bytes, record: bytes) -> tuple[Extent | None, int, bytes]:
    """What recovery needs: extent, payload bytes, and the parent's row key (empty at the root)."""
    _, nbytes, place, offset, _, _, n_parent, _ = _HEAD.unpack_from(record, _START)
    parent = record[_VARIABLE : _VARIABLE + n_parent]
    return (
        Extent(place, offset, nbytes) if place else None,
        nbytes,
        row_key[:ROW_KEY_BYTES] + parent if n_parent else b"",
    )

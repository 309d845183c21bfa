"""One blob's line in the catalogue, and its bytes. Layout: docs/FORMAT.md, "On disk"."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from blobstore.digest import DIGEST_BYTES
from blobstore.errors import InvalidRequest
from blobstore.tiering.tier import Extent

HOLE = "hole"
"""Stands for the retention of a row without payload, kept for the blobs that continue it."""

RETENTIONS = ("volatile", "standard", "durable", HOLE)
"""By their numbers on disk."""

HOLE_PLACE = -1

ROW_KEY_BYTES = 4
"""The namespace's number as u32, before the blob's key."""

_CHECKSUM = struct.Struct("<Q")
# last use, payload bytes, segment, offset, tokens, retention, length of the parent's key, digest
_HEAD = struct.Struct("<dQIQIBB16s")
_RECORD = struct.Struct(_CHECKSUM.format + _HEAD.format[1:])
_LAST_USE = struct.Struct("<d")
_START = _CHECKSUM.size
_VARIABLE = _START + _HEAD.size


class Row(NamedTuple):
    """One blob on SSD. A tuple, since a start makes one of each there is."""

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
    """Where the payload lies; None: inside the catalogue, or nowhere if this is a hole."""
    retention: str
    last_used_wall_s: float

    @property
    def is_hole(self) -> bool:
        """The payload was lost."""
        return self.retention == HOLE


def encode_row(row: Row, row_key: bytes) -> bytes:
    """The stored bytes of `row`, whose own key in the catalogue is `row_key`.

    Raises InvalidRequest for what the format cannot hold.
    """
    extent = row.extent or Extent(0, 0, 0)
    if len(row.digest) != DIGEST_BYTES:
        raise InvalidRequest(f"a row cannot hold a digest of {len(row.digest)} bytes")
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


def decode_row(
    row_key: bytes, record: bytes, ids: Mapping[bytes, bytes], now_wall_s: float
) -> Row | None:
    """The row that was stored under `row_key`; a last use in the future becomes `now_wall_s`.

    `ids` gives the namespaces by their packed numbers. None for a record that
    fails its checksum or whose namespace is unknown.
    """
    namespace = ids.get(row_key[:ROW_KEY_BYTES])
    if namespace is None or len(record) < _VARIABLE:
        return None
    checksum, used, nbytes, place, offset, tokens, retention, n_parent, digest = (
        _RECORD.unpack_from(record)
    )
    if checksum != xxh3_64_intdigest(row_key + record[_START:]):
        return None
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


def with_last_use(row_key: bytes, record: bytes, last_used_wall_s: float) -> bytes | None:
    """The record with another time of last use; None if it fails its checksum."""
    if survey_row(row_key, record) is None:
        return None
    body = _LAST_USE.pack(last_used_wall_s) + record[_START + _LAST_USE.size :]
    return seal_row(row_key, body)


def survey_row(row_key: bytes, record: bytes) -> tuple[int, int, int, bytes] | None:
    """What recovery needs of a row: place, offset, payload bytes, and the parent's row key.

    The place is 0 for a payload in the catalogue, HOLE_PLACE for a hole; the parent's key
    is empty at the root. None if the record is not what was stored under `row_key`.
    """
    if len(record) < _VARIABLE:
        return None
    checksum, _, nbytes, place, offset, _, retention, n_parent, _ = _RECORD.unpack_from(record)
    if checksum != xxh3_64_intdigest(row_key + record[_START:]):
        return None
    if RETENTIONS[retention] == HOLE:
        place = HOLE_PLACE
    if not n_parent:
        return place, offset, nbytes, b""
    return place, offset, nbytes, row_key[:ROW_KEY_BYTES] + record[_VARIABLE : _VARIABLE + n_parent]

"""Blobs in an SSD tier, written and read as the service does it."""

from __future__ import annotations

from blobstore.digest import payload_digest, piece_digests
from blobstore.errors import StorageFailed
from blobstore.tiering.ssd import INLINE_BYTES_MAX, Row, SsdTier
from blobstore.tiering.tier import Extent

NAMESPACE = bytes(range(32))
CANONICAL = b"canonical"

Added = tuple[Row, memoryview | None]


def row_of(
    key: bytes,
    payload: bytes,
    extent: Extent | None = None,
    *,
    parent: bytes = b"",
    last_used_wall_s: float = 5.0,
) -> Row:
    """The row that belongs to a payload."""
    pieces = piece_digests(memoryview(payload))
    digest = payload_digest(len(payload), pieces)
    return Row(
        NAMESPACE, key, parent, 256, len(payload), digest, pieces, extent, "standard",
        last_used_wall_s,
    )  # fmt: skip


def write_blob(tier: SsdTier, key: bytes, payload: bytes, parent: bytes = b"") -> Added:
    """Everything before the commit: what to pass to it. Frees the extent on a fault."""
    data = memoryview(payload)
    if data.nbytes <= INLINE_BYTES_MAX:
        return row_of(key, payload, parent=parent), data
    extent = tier.allocate(data.nbytes)
    try:
        tier.write(extent, 0, data)
    except StorageFailed:
        tier.free(extent)
        raise
    return row_of(key, payload, extent, parent=parent), None


def put_blob(tier: SsdTier, key: bytes, payload: bytes, parent: bytes = b"") -> Row:
    """Write and commit one blob; frees the extent on a fault."""
    added = write_blob(tier, key, payload, parent)
    try:
        tier.commit([added])
    except BaseException:
        if added[0].extent is not None:
            tier.free(added[0].extent)
        raise
    return added[0]


def drop_blob(tier: SsdTier, row: Row) -> None:
    """Commit the removal of one blob, then free its extent."""
    tier.commit([], [(row.namespace, row.key)])
    if row.extent is not None:
        tier.free(row.extent)


def payload_of(tier: SsdTier, row: Row) -> bytes:
    """The bytes as the tier gives them, unchecked."""
    into = bytearray(row.nbytes)
    if row.extent is None:
        tier.read_inline(row.namespace, row.key, memoryview(into))
    else:
        tier.read(row.extent, 0, memoryview(into))
    return bytes(into)


def contents(tier: SsdTier) -> dict[bytes, bytes]:
    """Every committed blob: key → payload."""
    return {row.key: payload_of(tier, row) for row in tier.rows()}

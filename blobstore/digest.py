"""Digests of payloads: xxh3-128 of each 1 MiB piece, and one over all of them.

A tree of depth one: pieces are checked as they arrive, in any order, and the
payload's digest follows from theirs without reading the bytes again. It finds
faults, not forgers. Bytes and test vectors: docs/FORMAT.md.
"""

from __future__ import annotations

import struct

from xxhash import xxh3_128_digest

PIECE_BYTES = 1 << 20
"""Transfer and checksum unit; the last piece of a payload is shorter."""

DIGEST_BYTES = 16


def n_pieces(nbytes: int) -> int:
    """How many pieces a payload of `nbytes` has; an empty payload has none."""
    return -(-nbytes // PIECE_BYTES)


def piece_digests(payload: memoryview) -> bytes:
    """The digests of all pieces of `payload` (a contiguous byte view), concatenated.

    Releases the GIL for a piece at a time.
    """
    return b"".join(
        xxh3_128_digest(payload[start : start + PIECE_BYTES])
        for start in range(0, payload.nbytes, PIECE_BYTES)
    )


def payload_digest(nbytes: int, pieces: bytes) -> bytes:
    """The digest of a payload of `nbytes` whose pieces have the digests `pieces`."""
    assert len(pieces) == DIGEST_BYTES * n_pieces(nbytes)
    return xxh3_128_digest(struct.pack("<Q", nbytes) + pieces)


def first_bad_piece(data: memoryview, first: int, pieces: bytes) -> int | None:
    """Index of the first piece in `data` that fails its digest, or None.

    `data` starts at piece number `first` of the payload and ends on a piece
    border or at the payload's end; `pieces` are the digests of the whole payload.
    """
    for number, start in enumerate(range(0, data.nbytes, PIECE_BYTES), first):
        expected = pieces[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
        if xxh3_128_digest(data[start : start + PIECE_BYTES]) != expected:
            return number
    return None

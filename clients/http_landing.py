"""Where a payload lands that comes over HTTP, checked against its digest on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xxhash import xxh3_128, xxh3_128_digest

from blobstore.clients.http_exchange import Head
from blobstore.digest import DIGEST_BYTES, PIECE_BYTES, payload_digest
from blobstore.errors import Corrupt, ProtocolError

Place = Callable[[int], Sequence[memoryview]]
"""The memory for a payload of so many bytes: piece after piece."""


class Landing:
    """Takes one payload: `nbytes` and `tier` tell of it afterwards."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._expected = b""
        self._digesting = Digesting()
        self.nbytes = 0
        self.tier = ""

    def place(self, head: Head) -> Sequence[memoryview]:
        """Where the body goes; ProtocolError if it does not say what it is."""
        nbytes = head.content_length
        if nbytes is None:
            raise ProtocolError("a payload does not say how long it is")
        self._expected, self._digesting = _digest_of(head), Digesting()
        self.nbytes, self.tier = nbytes, head.headers.get("x-blobstore-tier", "dram")
        return self._place(nbytes)

    def took(self, view: memoryview) -> None:
        """The next bytes."""
        self._digesting.update(view)

    def finish(self) -> None:
        """Raises Corrupt if the digest is another than the daemon's."""
        if self._digesting.digest() != self._expected:
            raise Corrupt("a payload fails its digest: it was damaged on the way")


class Digesting:
    """The digest of a payload that comes bit by bit, hashed while it is in the CPU's cache."""

    def __init__(self) -> None:
        self._piece = xxh3_128()
        self._in_piece = 0
        self._digests = b""
        self._nbytes = 0

    def update(self, view: memoryview) -> None:
        """The next bytes."""
        self._nbytes += view.nbytes
        while view:
            if not self._in_piece and view.nbytes >= PIECE_BYTES:
                self._digests += xxh3_128_digest(view[:PIECE_BYTES])
                view = view[PIECE_BYTES:]
                continue
            some = view[: PIECE_BYTES - self._in_piece]
            self._piece.update(some)
            self._in_piece += some.nbytes
            view = view[some.nbytes :]
            if self._in_piece == PIECE_BYTES:
                self._end_piece()

    def digest(self) -> bytes:
        """Of all that there was."""
        if self._in_piece:
            self._end_piece()
        return payload_digest(self._nbytes, self._digests)

    def _end_piece(self) -> None:
        self._digests += self._piece.digest()
        self._piece.reset()
        self._in_piece = 0


def _digest_of(head: Head) -> bytes:
    tag = head.headers.get("etag", "").removeprefix("W/").strip('"')
    try:
        digest = bytes.fromhex(tag)
    except ValueError:
        digest = b""
    if len(digest) != DIGEST_BYTES:
        raise ProtocolError(f"a payload comes with the ETag {tag!r}, which is no digest")
    return digest

"""Blobs being written: views of lent extents, or of private memory where nothing was lent.

A writer is always writable, so that an engine's code has one path: keys that are
held already, refused ones and those of a dead daemon get memory of this process.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np

from blobstore.clients.bound import BoundNamespace, Run
from blobstore.clients.buffers import Buffer
from blobstore.clients.link import Link, Ticket
from blobstore.clients.mapping import Bytes
from blobstore.clients.returns import Returns
from blobstore.clients.steps import Operation, Posted, Work, ask, checked, reason
from blobstore.digest import payload_digest, piece_digests
from blobstore.errors import (
    BY_CODE,
    BlobStoreError,
    DeadlineExceeded,
    Full,
    InvalidRequest,
    Retryable,
    StorageFailed,
    Unavailable,
    WrongProcess,
)
from blobstore.keys import Keys
from blobstore.protocol import NO_EXTENT, Done, Reserved, Seal, Sealed, SealParts

DURABLE = "durable"
RETENTIONS = ("volatile", "standard", DURABLE)
"""Each keeps at least as long as those before it."""

_KINDS: dict[str, type[BlobStoreError]] = BY_CODE | {
    "no_room": Full, "lent_bytes": Full, "too_large": Full,
    "expired": DeadlineExceeded,
    "unwritten": InvalidRequest,
    "orphan": Retryable, "gone": Retryable, "aborted": Retryable, "writer_gone": Retryable,
}  # fmt: skip
"""What a durable put raises for a reason; StorageFailed for any other."""
_MEANING = {
    "invalid_request": "the daemon has no SSD tier, or it continues a volatile blob",
    "orphan": "what it continues is not held: put that as well",
    "too_large": "it is more than the daemon lends at once",
    "unwritten": "its memory was never touched",
}


class WriterBase:
    """Writable views of new blobs, sealed together at the end of the `with` block.

    `results[i]` is then "stored", "exists" (held before, or the same bytes), "divergent"
    (other bytes are held, and stay), "partial" (other ranks' parts are missing) or
    "refused", and `reasons[i]` says why; while the writer is open they are "" where
    there is something to write. A blob that was never touched is refused ("unwritten"),
    as are those that continue it. An exception in the block stores nothing.
    """

    def __init__(
        self,
        ns: BoundNamespace,
        keys: Keys,
        numbers: tuple[int, ...],
        retention: str,
        link: Link | None,
        reserved: Reserved,
    ) -> None:
        self.reasons = reserved.reasons
        self.results = [_BEFORE.get(why, "refused") for why in reserved.reasons]
        self._ns = ns
        self._keys = keys
        self._numbers = numbers
        self._durable = retention == DURABLE
        self._link = link
        self._reservation_id = reserved.reservation_id
        self._extents = np.frombuffer(reserved.extents, "<u8").reshape(-1, 2).tolist()
        self._views: dict[int, memoryview] = {}
        self._exporters: dict[int, weakref.ref[Bytes]] = {}
        self._alive: list[int] = []
        """Blobs with views alive when it was sealed."""
        self._ended = ""
        """Why it takes no more; empty while it is open."""
        self._foreign = False
        self._send: Send | None = None
        """Over HTTP, how the blobs travel when they are sealed."""
        self._unfinished: weakref.finalize[..., WriterBase] | None = None
        if link is not None and reserved.reservation_id:
            returns = link.session.returns
            returns.open_writer(self, reserved.reservation_id)
            self._unfinished = weakref.finalize(
                self, _give_up, returns, reserved.reservation_id, self._exporters, self._extents
            )
            self._unfinished.atexit = False

    def __len__(self) -> int:
        return len(self.reasons)

    def __getitem__(self, index: int) -> memoryview:
        """The payload of a blob, to be filled. It ends with the writer.

        With a shard it is all of the blob: other ranks' parts are not to be touched.
        """
        index = range(len(self))[index]
        view = self._views.get(index)
        if view is None:
            self._check_open()
            view = self._views[index] = self._memory(index).data
        return view

    def parts(self, index: int) -> tuple[memoryview, ...]:
        """A blob by layer range and head range, to be filled: with a shard, the rank's parts."""
        view = self[index]
        tokens = self._ns.tokens(self._keys, range(len(self))[index])
        return tuple(
            view[part.offset : part.offset + part.nbytes]
            for part in self._ns.parts(tokens, self._numbers)
        )

    def abort(self) -> None:
        """Store nothing. Does not wait for the daemon. Does nothing once it has ended."""
        if not self._ended:
            self._end("the writer was aborted")
            self.results = ["refused"] * len(self)
            self.reasons = ["aborted"] * len(self)
            self._give_up()

    def disown(self) -> None:
        """In a forked child: this is the parent's writer."""
        self._foreign = True
        self._ended = "the writer is the parent process's: put in this one"
        self._views.clear()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self)} blobs>"

    def _memory(self, index: int) -> Bytes:
        if self.reasons[index] == "" and self._extents[index][1]:
            assert self._link is not None
            array = self._link.session.extent(*self._extents[index])
            if array is not None:
                self._exporters[index] = weakref.ref(array)
                return array
            self.results[index], self.reasons[index] = "refused", Unavailable.code
        # Zeros are mapped when touched, so that what is never written costs nothing.
        nbytes = self._ns.layout.nbytes(self._ns.tokens(self._keys, index))
        return np.zeros(nbytes, np.uint8)

    @property
    def _whole(self) -> bool:
        """Whether this writer writes all bytes of its blobs."""
        return len(self._numbers) == self._ns.layout.n_parts

    def _fill(self, index: int, buffer: Buffer, runs: tuple[Run, ...]) -> None:
        """Write this rank's share, `runs`, from `buffer`, or remember it to compare digests."""
        if self.reasons[index] != "":
            if self.reasons[index] == "exists" and self._whole:
                self._views[index] = buffer.on_host()
            return
        at = 0
        memory = np.frombuffer(self[index], np.uint8)
        for start, end in runs:
            buffer.store(at, memory[start:end])
            at += end - start

    def _seal_parts(self, index: int, parts: Sequence[int]) -> Operation[bool]:
        index = range(len(self))[index]
        self._check_open()
        if self.reasons[index] != "":
            return False
        if index in self._untouched():
            raise InvalidRequest(f"nothing was written to blob {index}: readers would get others'")
        numbers = [self._numbers[part] for part in parts]
        if self._send is not None:
            return False  # readers have them when they are sent
        try:
            yield from ask(SealParts(self._reservation_id, index, numbers), Done)
        except BlobStoreError as error:
            reason(error)
            return False
        return True

    def _seal(self) -> Operation[None]:
        """Seal, unless it has ended: then `results` are final. A refused durable blob raises."""
        if self._ended and not self._foreign:
            return
        if self._send is not None:
            yield from self._send_all(self._send)
        else:
            yield from self._take_in_seal((yield from self._post_seal()))
        if self._durable:
            check_durable(self.results, self.reasons)

    def _send_all(self, send: Send) -> Operation[None]:
        """Seal a writer whose blobs are in this process's memory and go elsewhere."""
        self._check_open()
        # New views of the same memory: those that were given out end now.
        payloads = {index: memoryview(view.obj) for index, view in self._views.items()}
        self._end("the writer was sealed")
        yield from send(self, payloads)

    def _post_seal(self) -> Operation[Ticket | None]:
        """Let the daemon seal, and go on; None if it cannot be asked, or need not be."""
        self._check_open()
        digests: list[bytes] = []
        if self._whole and any(self.reasons[index] == "exists" for index in self._views):
            digests = yield Work(self._digests)
        self._end("the writer was sealed")
        self._alive = _alive(self._exporters)
        if not self._reservation_id:
            return None
        try:
            ticket: Ticket = yield Posted(
                Seal(self._reservation_id, digests, self._alive, self._untouched())
            )
        except BlobStoreError as error:
            self._settle(answered=False)
            self._refuse(reason(error))
            return None
        return ticket

    def _take_in_seal(self, ticket: Ticket | None) -> Operation[None]:
        if ticket is None:
            return
        answered = False
        try:
            sealed = checked((yield ticket), Sealed)
            answered = True
            out_of_reach = [i for i, why in enumerate(self.reasons) if why == Unavailable.code]
            self.results, self.reasons = sealed.results, sealed.reasons
            for index in out_of_reach:
                self.reasons[index] = Unavailable.code
        except BlobStoreError as error:
            self._refuse(reason(error))
        finally:
            self._settle(answered=answered)

    def _untouched(self) -> list[int]:
        """Numbers of lent extents in which others' bytes lie still, or of blobs never touched."""
        if self._send is not None:
            return [index for index in range(len(self)) if index not in self._views]
        return [
            index
            for index, (offset, nbytes) in enumerate(self._extents)
            if offset != NO_EXTENT and nbytes and index not in self._exporters
        ]

    def _refuse(self, why: str) -> None:
        for index, known in enumerate(self.reasons):
            if known == "":
                self.results[index], self.reasons[index] = "refused", why

    def _settle(self, *, answered: bool) -> None:
        """After a Seal: hand back what is still viewed when it no longer is."""
        assert self._link is not None
        assert self._unfinished is not None
        self._unfinished.detach()
        returns = self._link.session.returns
        if not answered:  # it may have been sealed: then this does nothing
            returns.give_up(self._reservation_id, self._alive)
        _hand_back(returns, self._alive, self._exporters, self._extents)
        returns.close_writer(self._reservation_id)

    def _give_up(self) -> None:
        if self._unfinished is not None:
            self._unfinished()

    def _digests(self) -> list[bytes]:
        """Digests of what was written for keys that are held already."""
        return [
            digest_of(self._views[index]) if why == "exists" and index in self._views else b""
            for index, why in enumerate(self.reasons)
        ]

    def _end(self, why: str) -> None:
        """Take the views back: those from which nothing was derived can write no more."""
        self._ended = why
        for view in self._views.values():
            try:
                view.release()
            except BufferError:  # an array was made of it
                continue
        self._views.clear()

    def _check_open(self) -> None:
        if self._ended:
            raise (WrongProcess if self._foreign else InvalidRequest)(self._ended)


Send = Callable[[WriterBase, dict[int, memoryview]], Generator[Any, Any, None]]
"""An operation that sends the payloads that were written, and sets results and reasons."""

NO_PARTS = "no_parts"
"""Why a rank writes nothing: others hold the same bytes, and it is their turn."""

_BEFORE = {"": "", "exists": "exists", NO_PARTS: "partial"}
"""Results of an open writer."""


def digest_of(payload: memoryview) -> bytes:
    """The payload digest."""
    return payload_digest(payload.nbytes, piece_digests(payload))


def _alive(exporters: dict[int, weakref.ref[Bytes]]) -> list[int]:
    return [index for index, exporter in exporters.items() if exporter() is not None]


def _hand_back(
    returns: Returns,
    alive: list[int],
    exporters: dict[int, weakref.ref[Bytes]],
    extents: list[list[int]],
) -> None:
    for index in alive:
        returns.hand_back_after(exporters[index], extents[index][0])


def _give_up(
    returns: Returns,
    reservation_id: int,
    exporters: dict[int, weakref.ref[Bytes]],
    extents: list[list[int]],
) -> None:
    alive = _alive(exporters)
    returns.give_up(reservation_id, alive)
    _hand_back(returns, alive, exporters, extents)
    returns.close_writer(reservation_id)


def check_durable(results: Sequence[str], reasons: Sequence[str]) -> None:
    """Raise for the first blob that was refused, if any: StorageFailed, Full, Unavailable, …"""
    for index, (result, why) in enumerate(zip(results, reasons, strict=True)):
        if result == "refused":
            meaning = f" ({_MEANING[why]})" if why in _MEANING else ""
            raise _KINDS.get(why, StorageFailed)(
                f"blob {index} of a durable put was refused: {why}{meaning}"
            )

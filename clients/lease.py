"""Leased blobs, read in place.

A lease ends when its `with` block has ended and its last view has died: all views
are of one array over the arena, and the lease is released when that array dies,
wherever that happens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any, NoReturn, Self, SupportsIndex, overload

import numpy as np

from blobstore.clients.bound import BoundNamespace
from blobstore.clients.link import Link
from blobstore.clients.steps import Call, Operation, ask, reason
from blobstore.errors import BlobStoreError, InvalidRequest, SizeMismatch, WrongProcess
from blobstore.keys import Keys
from blobstore.layout import Part
from blobstore.protocol import Leased, Wait, Waited

BATCH = 256
"""Views made at a time in an iteration: 50 KB."""

NOTHING = memoryview(b"")
_U64 = np.dtype("<u8")


class LeaseBase(Sequence[memoryview]):
    """The leading blobs of a chain, as many as were held: read-only views, made when asked for.

    `reason` says why it ends where it does ("" if all that was asked for is here), and
    `served` counts its blobs by the tier that they came from. While it streams, bytes
    are right once `wait` has returned True for them, and are refused before.
    Over HTTP the blobs are `copies` in this process's memory, and nothing is held elsewhere.
    """

    __slots__ = (
        "__weakref__", "_ends", "_keys", "_link", "_ns", "_offsets", "_readable", "_starts",
        "_view", "lease_id", "reason", "served",
    )  # fmt: skip

    _starts: Any
    """The offsets, or what refuses to give them: so the fast path has nothing to check."""

    def __init__(
        self,
        ns: BoundNamespace,
        keys: Keys,
        link: Link | None,
        leased: Leased,
        *,
        stream: bool = False,
        copies: memoryview = NOTHING,
    ) -> None:
        self.lease_id = leased.lease_id
        self.reason = leased.reason
        self.served = leased.served
        self._ns = ns
        self._keys = keys
        self._link = link
        self._view = copies
        if leased.lease_id:
            assert link is not None
            self._view = link.session.hold(leased.lease_id, self)
        extents = np.frombuffer(leased.extents, _U64)
        starts = extents[::2]
        self._offsets: list[int] = starts.tolist()
        self._ends: list[int] = (starts + extents[1::2]).tolist()
        self._readable: set[tuple[int, int]] | None = None
        """Blobs and their parts that were waited for; None if all is readable."""
        self._starts = self._offsets
        if stream:
            self._readable = set()
            self._starts = _Awaited(self._offsets, self._readable, self.n_parts)

    def __len__(self) -> int:
        return len(self._offsets)

    @overload
    def __getitem__(self, index: SupportsIndex) -> memoryview: ...
    @overload
    def __getitem__(self, index: slice) -> list[memoryview]: ...
    def __getitem__(self, index: Any) -> Any:
        """The payload of a blob, in place. The view keeps the lease alive."""
        try:
            return self._view[self._starts[index] : self._ends[index]]
        except TypeError:
            if isinstance(index, slice):
                return self._views(index)
            raise

    def __iter__(self) -> Iterator[memoryview]:
        return chain.from_iterable(self._batches())

    def _batches(self) -> Iterator[list[memoryview]]:
        """All views in order. A list at a time, which takes half as long as one at a time."""
        view, starts, ends = self._view, self._starts, self._ends
        step = BATCH if isinstance(starts, list) else 1  # others may refuse from some blob on
        borders = zip(starts, ends, strict=True)
        while batch := [view[start:end] for start, end in islice(borders, step)]:
            yield batch

    def _views(self, which: slice) -> list[memoryview]:
        # Not in __getitem__, where a comprehension would slow every access.
        return [self[index] for index in range(*which.indices(len(self)))]

    @property
    def n_parts(self) -> int:
        """Parts of each blob; with a shard, those of the rank."""
        return len(self._ns.reads)

    def parts(self, index: int) -> Sequence[memoryview]:
        """A blob by layer range and head range, in place; with a shard, the rank's parts only.

        Raises SizeMismatch for a blob of other tokens than the keys say, such as a tail
        whose keys were made a list, which cannot say so.
        """
        index = range(len(self))[index]
        if self._readable is not None:
            return _AwaitedParts(self, index)
        view, start = self._view, self._starts[index]
        parts = self._parts(index)
        return tuple(
            view[start + parts[number].offset : start + parts[number].offset + parts[number].nbytes]
            for number in self._ns.reads
        )

    def part(self, index: int, part: int) -> memoryview:
        """Part number `part` of `parts(index)`."""
        index, part = range(len(self))[index], range(self.n_parts)[part]
        if isinstance(self._starts, _Refusal):
            self._starts.refuse()
        if self._readable is not None and (index, part) not in self._readable:
            raise InvalidRequest(f"part {part} of blob {index} may not be here: wait for it first")
        start, (first, end) = self._offsets[index], self._span(index, part)
        return self._view[start + first : start + end]

    def release(self) -> None:
        """End the lease as far as no view is alive; the last one then ends it. Idempotent."""
        self._starts = _RELEASED
        self._view = NOTHING

    def disown(self) -> None:
        """In a forked child: this is the parent's lease."""
        self._starts = _FOREIGN
        self._view = NOTHING

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    def __repr__(self) -> str:
        ends = f", {self.reason}" if self.reason else ""
        return f"<{type(self).__name__} of {len(self)} blobs{ends}>"

    def _wait(self, call: Call, index: int, part: int | None) -> Operation[bool]:
        if isinstance(self._starts, _Refusal):
            self._starts.refuse()
        index = range(len(self))[index]
        readable = self._readable
        parts = range(self.n_parts) if part is None else (range(self.n_parts)[part],)
        if readable is None or all((index, number) in readable for number in parts):
            return True
        start, end = self._span(index, part)
        if self._link is None:  # copies, all of which are here
            readable.update((index, number) for number in parts)
            return True
        request = Wait(self.lease_id, index, start, end, call.daemon_timeout_s())
        try:
            waited = yield from ask(request, Waited)
        except BlobStoreError as error:
            self.reason = reason(error)
            return False
        if waited.reason:
            self.reason = waited.reason
            return False
        readable.update((index, number) for number in parts)
        return True

    def _span(self, index: int, part: int | None) -> tuple[int, int]:
        """Where in blob `index` the part is, or the whole."""
        if part is None:
            return 0, self._ends[index] - self._offsets[index]
        found = self._parts(index)[self._ns.reads[part]]
        return found.offset, found.offset + found.nbytes

    def _parts(self, index: int) -> tuple[Part, ...]:
        """All parts of blob `index`; SizeMismatch unless they are what is there."""
        tokens = self._ns.tokens(self._keys, index)
        parts = self._ns.layout.parts(tokens)
        nbytes = self._ends[index] - self._offsets[index]
        check_size(index, nbytes, parts[-1].offset + parts[-1].nbytes, tokens)
        return parts


def check_size(index: int, nbytes: int, declared: int, tokens: int) -> None:
    """SizeMismatch unless a blob has the size that the layout declares for its tokens."""
    if nbytes != declared:
        raise SizeMismatch(
            f"blob {index} has {nbytes} bytes, the layout declares {declared} for {tokens} tokens: "
            "a partial last blob is named by Keys with its tail_tokens"
        )


class _AwaitedParts(Sequence[memoryview]):
    """The parts of a blob that streams: refused until they were waited for."""

    def __init__(self, lease: LeaseBase, index: int) -> None:
        self._lease = lease
        self._index = index

    def __len__(self) -> int:
        return self._lease.n_parts

    @overload
    def __getitem__(self, part: SupportsIndex) -> memoryview: ...
    @overload
    def __getitem__(self, part: slice) -> list[memoryview]: ...
    def __getitem__(self, part: Any) -> Any:
        numbers = range(len(self))[part]
        if isinstance(numbers, range):
            return [self._lease.part(self._index, number) for number in numbers]
        return self._lease.part(self._index, numbers)


class _Awaited:
    """The offsets of a lease that streams: refused until the whole blob was waited for."""

    def __init__(self, offsets: list[int], readable: set[tuple[int, int]], n_parts: int) -> None:
        self._offsets = offsets
        self._readable = readable
        self._n_parts = n_parts

    def __getitem__(self, index: SupportsIndex) -> int:
        number = range(len(self._offsets))[index]
        if any((number, part) not in self._readable for part in range(self._n_parts)):
            raise InvalidRequest(f"blob {number} may not be here: wait for it first")
        return self._offsets[number]

    def __iter__(self) -> Iterator[int]:
        return map(self.__getitem__, range(len(self._offsets)))


class _Refusal:
    """In place of the offsets of a lease that must not be used any more."""

    def __init__(self, error: type[BlobStoreError], why: str) -> None:
        self._error = error
        self._why = why

    def refuse(self) -> NoReturn:
        raise self._error(self._why)

    def __getitem__(self, index: object) -> NoReturn:
        self.refuse()

    def __iter__(self) -> NoReturn:
        self.refuse()


_RELEASED = _Refusal(InvalidRequest, "the lease was released: use it inside its with block")
_FOREIGN = _Refusal(WrongProcess, "the lease is the parent process's: get one in this one")

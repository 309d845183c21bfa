"""Getting blobs over HTTP: copies in memory of this process, or straight into the caller's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np

from blobstore.clients.bound import BoundNamespace, Share
from blobstore.clients.buffers import Buffer, HostBuffer, buffers_for
from blobstore.clients.http_answers import error_of
from blobstore.clients.http_exchange import Exchange, HttpOperation, Transfers
from blobstore.clients.http_landing import Landing
from blobstore.clients.http_verbs import blob_path, hint_lines
from blobstore.clients.lease import LeaseBase, check_size
from blobstore.clients.operations import ask_in, declaration, hints_of
from blobstore.clients.reading import NO_ROOM
from blobstore.clients.steps import Call, Work, ask, reason
from blobstore.errors import BlobStoreError, ProtocolError, UnknownNamespace
from blobstore.hint import Hint
from blobstore.keys import Keys
from blobstore.protocol import KEYS_MAX, Declared, Exists, Held, Leased

LANES = 4
"""Payloads under way at a time in one call."""
STAGED = 2 * LANES
"""Payloads that land beside a device before they are copied there."""
COPIES_BYTES_MAX = 4 << 30
"""What one get copies at most: beyond it a lease ends with the reason "no_room"."""

_ABSENT = "absent"

L = TypeVar("L", bound=LeaseBase)


def get(
    call: Call,
    kind: type[L],
    ns: BoundNamespace,
    keys: Keys,
    *,
    stream: bool,
    wait: bool,
    hint: Hint | None = None,
) -> HttpOperation[L]:
    """Copies of the leading blobs; after a fault those before it, with its code as the reason.

    With `stream` too they are all here when it returns. Blobs that are being written are
    not waited for, whatever `wait` says.
    """
    if not keys:
        return kind(ns, keys, None, Leased(0, b"", "", {}), stream=False)
    full = ns.layout.nbytes(ns.tokens_per_blob)
    room = max(1, COPIES_BYTES_MAX // max(full, 1))
    try:
        asked = yield from _worth_asking(ns, keys[:room])
    except BlobStoreError as error:
        return kind(ns, keys, None, Leased(0, b"", reason(error), {}), stream=False)
    memory = np.empty(full * asked, np.uint8).data
    landings = [
        Landing(partial(slot, memory[number * full : (number + 1) * full]))
        for number in range(asked)
    ]
    n, why = yield from fetch(call.daemon_timeout_s(), ns, keys[:asked], landings, hint)
    if not why and n < len(keys):
        why = NO_ROOM if n == room else _ABSENT
    extents = np.array(
        [(number * full, landing.nbytes) for number, landing in enumerate(landings[:n])], "<u8"
    ).tobytes()
    served = dict(Counter(landing.tier for landing in landings[:n]))
    leased = Leased(0, extents, why, served)
    return kind(ns, keys, None, leased, stream=stream and n > 0, copies=memory.toreadonly())


def get_into(
    call: Call,
    ns: BoundNamespace,
    keys: Keys,
    buffers: object,
    lent_bytes_max: int,
    hint: Hint | None = None,
) -> HttpOperation[int]:
    """Leading blobs straight into `buffers`; how many are there, complete."""
    share = Share(ns, keys, ns.reads)
    targets = buffers_for(buffers, share.sizes, writable=True)
    filled = 0
    try:
        asked = yield from _worth_asking(ns, keys)
        full = ns.layout.nbytes(ns.tokens_per_blob)
        window = asked if all(isinstance(target, HostBuffer) for target in targets) else STAGED
        while filled < asked:
            step = range(filled, min(filled + window, asked))
            landings = [_Target(share, index, targets[index], full) for index in step]
            chunk = keys[step.start : step.stop]
            n, why = yield from fetch(
                call.daemon_timeout_s(), ns, chunk, [target.landing for target in landings], hint
            )
            yield from _unload(landings[:n])
            filled += n
            if why:
                break
    except BlobStoreError as error:
        reason(error)
    return filled


def fetch(
    timeout_s: float,
    ns: BoundNamespace,
    keys: Keys,
    landings: Sequence[Landing],
    hint: Hint | None = None,
) -> HttpOperation[tuple[int, str]]:
    """Get payloads to where they land: how many leading ones are there, and why no more."""
    done, lanes, declared = 0, LANES, False
    lines = hint_lines(hints_of(hint))
    while done < len(keys):
        exchanges = [
            _get(timeout_s, ns, key, landing, lines)
            for key, landing in zip(keys[done:], landings[done:], strict=True)
        ]
        yield Transfers(exchanges, lanes, ends=_is_no_payload)
        got = _leading(exchanges)
        done += got
        if got == len(exchanges):
            break
        error = error_of(exchanges[got])
        if isinstance(error, UnknownNamespace) and not declared:
            declared = True
            try:
                yield from ask(declaration(ns), Declared)
            except BlobStoreError as why:
                return done, reason(why)
        elif error.code == NO_ROOM and (got or lanes > 1):
            lanes = 1  # those that were under way beside it had the room
        else:
            return done, reason(error)
    return done, ""


def _worth_asking(ns: BoundNamespace, keys: Keys) -> HttpOperation[int]:
    """How many leading blobs to ask for: those that are held, and one to learn why no more.

    Asked first, so that nothing beyond a gap is on its way when the gap is found.
    """
    if len(keys) <= 1:
        return len(keys)
    for start in range(0, len(keys), KEYS_MAX):
        some = keys[start : start + KEYS_MAX]
        held = (yield from ask_in(ns, Exists(ns.id, some.packed, some.key_bytes), Held)).held
        gap = held.find(0)
        if gap >= 0:
            return start + gap + 1
    return len(keys)


def _get(
    timeout_s: float, ns: BoundNamespace, key: bytes, landing: Landing, header_lines: str
) -> Exchange:
    path = f"{blob_path(ns.id, key)}?timeout_s={timeout_s:.3f}"
    return Exchange("GET", path, header_lines=header_lines, sink=landing)


def _is_no_payload(exchange: Exchange) -> bool:
    return exchange.head is None or exchange.head.status != 200


def _leading(exchanges: Iterable[Exchange]) -> int:
    n = 0
    for exchange in exchanges:
        if _is_no_payload(exchange):
            break
        n += 1
    return n


def slot(memory: memoryview, nbytes: int) -> list[memoryview]:
    """The beginning of `memory`, for a payload of `nbytes`; ProtocolError if it does not fit."""
    _check_fits(nbytes, memory.nbytes)
    return [memory[:nbytes]]


def _check_fits(nbytes: int, full_bytes: int) -> None:
    if nbytes > full_bytes:
        raise ProtocolError(f"a payload has {nbytes} bytes, its namespace at most {full_bytes}")


class _Target:
    """A caller's buffer as the place where the rank's share of one payload lands.

    Bytes of others' parts, and those for a device, land in memory of their own.
    """

    def __init__(self, share: Share, index: int, buffer: Buffer, full_bytes: int) -> None:
        self.landing = Landing(self._place)
        self._share = share
        self._index = index
        self._buffer = buffer
        self._full_bytes = full_bytes
        self._staged: memoryview | None = None

    def unload(self) -> None:
        """Copy to a device what landed beside it."""
        if self._staged is not None:
            self._buffer.load(0, np.frombuffer(self._staged, np.uint8))
            self._staged = None

    @property
    def is_staged(self) -> bool:
        """Whether `unload` has anything to do."""
        return self._staged is not None

    def _place(self, nbytes: int) -> list[memoryview]:
        share, index = self._share, self._index
        _check_fits(nbytes, self._full_bytes)
        check_size(index, nbytes, share.blob_nbytes(index), share.tokens(index))
        if isinstance(self._buffer, HostBuffer):
            own = self._buffer.on_host()
        else:
            own = self._staged = np.empty(self._buffer.nbytes, np.uint8).data
        pieces: list[memoryview] = []
        at = taken = 0
        for start, end in share.runs(index):
            pieces += [_skipped(start - at), own[taken : taken + end - start]]
            at, taken = end, taken + end - start
        return [*pieces, _skipped(nbytes - at)]


def _skipped(nbytes: int) -> memoryview:
    return np.empty(nbytes, np.uint8).data


def _unload(targets: Sequence[_Target]) -> HttpOperation[None]:
    for target in targets:
        if target.is_staged:
            yield Work(target.unload)

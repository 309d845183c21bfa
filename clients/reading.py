"""Getting blobs: leased in place, or copied to the caller's buffers window by window."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TypeVar

import numpy as np

from blobstore.clients.bound import BoundNamespace, Share
from blobstore.clients.buffers import Buffer, buffers_for
from blobstore.clients.lease import LeaseBase, check_size
from blobstore.clients.link import Ticket
from blobstore.clients.operations import ask_in, hints_of
from blobstore.clients.steps import Call, Operation, Posted, Work, checked, reason
from blobstore.clients.windows import windows
from blobstore.errors import BlobStoreError
from blobstore.hint import Hint
from blobstore.keys import Keys
from blobstore.protocol import Get, Leased

NO_ROOM = "no_room"
"""The daemon's reason: the rest cannot be loaded while what is in DRAM is held."""

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
) -> Operation[L]:
    """Lease the leading blobs; after a fault none, with its code as the reason."""
    if not keys:
        return kind(ns, keys, None, _nothing(""), stream=False)
    request = _request(call, ns, keys, hint, stream=stream, wait=wait)
    try:
        leased = yield from ask_in(ns, request, Leased)
    except BlobStoreError as error:
        return kind(ns, keys, None, _nothing(reason(error)), stream=False)
    return kind(ns, keys, call.link, leased, stream=stream)


def get_into(
    call: Call,
    ns: BoundNamespace,
    keys: Keys,
    buffers: object,
    lent_bytes_max: int,
    hint: Hint | None = None,
) -> Operation[int]:
    """Copy leading blobs into `buffers`; how many are there, complete.

    The next window is asked for before this one is copied, so that its loads from SSD
    and the copying overlap.
    """
    share = Share(ns, keys, ns.reads)
    targets = buffers_for(buffers, share.sizes, writable=True)
    filled = 0
    ticket: Ticket | None = None
    waiting = deque(windows(share.blob_sizes, lent_bytes_max))
    while waiting:
        window = waiting.popleft()
        asked = keys[window.start : window.stop]
        try:
            leased = None
            if ticket is not None:
                leased, ticket = checked((yield ticket), Leased), None
                if leased.reason == NO_ROOM:
                    # The window before was held then, and no longer is.
                    LeaseBase(ns, asked, call.link, leased).release()
                    leased = None
            if leased is None:
                leased = yield from ask_in(ns, _request(call, ns, asked, hint), Leased)
            with LeaseBase(ns, asked, call.link, leased) as lease:
                n = len(lease)
                if n == len(window) and waiting:
                    ahead = keys[waiting[0].start : waiting[0].stop]
                    ticket = yield Posted(_request(call, ns, ahead, hint))
                yield Work(partial(_copy_out, lease, window, share, targets))
                filled += n
        except BlobStoreError as error:
            reason(error)
            break
        if n < len(window):
            if leased.reason != NO_ROOM or n == 0:
                break
            # What was just copied makes room for the rest.
            waiting.appendleft(window[n:])
    return filled


def _request(
    call: Call,
    ns: BoundNamespace,
    keys: Keys,
    hint: Hint | None,
    *,
    stream: bool = False,
    wait: bool = False,
) -> Get:
    timeout_s = call.daemon_timeout_s()
    return Get(ns.id, keys.packed, keys.key_bytes, timeout_s, stream, wait, hints_of(hint))


def _nothing(why: str) -> Leased:
    return Leased(0, b"", why, {})


def _copy_out(lease: LeaseBase, window: range, share: Share, targets: list[Buffer]) -> None:
    for index, payload in zip(window, lease, strict=False):
        check_size(index, payload.nbytes, share.blob_nbytes(index), share.tokens(index))
        source, at = np.frombuffer(payload, np.uint8), 0
        for start, end in share.runs(index):
            targets[index].load(at, source[start:end])
            at += end - start

"""One connection of the local socket: requests to the store, replies back.

What can be answered at once is answered inside `data_received`, without a task;
the rest runs as tasks of bounded number. A reply that finds its connection
closed is undone: nobody would ever release it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import re
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, cast, get_args

import msgspec

from blobstore import listing
from blobstore import protocol as p
from blobstore.drafts import Asked, Reservation
from blobstore.errors import (
    BlobStoreError,
    Busy,
    FrameTooLarge,
    InvalidRequest,
    ProtocolError,
    Retryable,
    StaleBoot,
    Unavailable,
)
from blobstore.hint import Hint
from blobstore.holder import Granted, Holder
from blobstore.index import Retention
from blobstore.latencies import Latencies
from blobstore.readers import Found
from blobstore.rebuild_calls import RebuildCalls
from blobstore.store import Store
from blobstore.terms import Terms
from blobstore.transports import framing

REQUESTS_IN_FLIGHT_MAX = 1024
TIMEOUT_MAX_S = 3600.0
PIN_MAX_S = 30 * 86400.0

_ENDING = (p.Ping, p.Wait, p.Release, p.SealParts, p.Seal, p.Abort, p.Stats, p.Holding)
"""Served while the daemon drains: what brings leases and reservations to their end."""

_REST_BYTES = 1 << 16

_WAITING = (p.Get, p.Wait, p.Reserve, p.Verify, p.NextRebuild)
"""Ended with their connection. Seals are not: what a writer sealed is published."""

_VERBS = {
    kind: "_".join(re.findall(r"[A-Z][a-z]*", kind.__name__)).lower()
    for kind in get_args(p.AnyRequest)
}
"""What requests are called in metrics."""

NOT_A_MESSAGE = (msgspec.MsgspecError, RecursionError)
"""What decoding a body raises."""

Answer = p.Reply | Coroutine[Any, Any, p.Reply]

_ids = itertools.count(1)

log = logging.getLogger(__name__)


class Connection(asyncio.Protocol):
    """Serves one client connection on behalf of `holder`."""

    def __init__(
        self,
        store: Store,
        holder: Holder,
        on_lost: Callable[[Connection], None],
        latencies: Latencies | None = None,
    ) -> None:
        self.holder = holder
        self.tasks: set[asyncio.Task[None]] = set()
        self.connection_id = next(_ids)
        self._granted = Granted(self.close)
        self.reservation_ids = self._granted.reservation_ids
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once the connection has ended."""
        self._store = store
        self._boot_id = store.boot_id
        self._on_lost = on_lost
        self._latencies = latencies
        self._rebuilds = RebuildCalls(store.rebuilds, holder.name)
        self._waiting: set[asyncio.Task[None]] = set()
        self._draining = False
        self._frames = framing.FrameReader()
        self._transport: asyncio.Transport | None = None
        self._open = False
        """Replies may still be sent."""
        self._handlers: dict[type[p.Request], Callable[[Any], Answer]] = {
            p.Ping: self._ping,
            p.Declare: self._declare,
            p.Match: self._match,
            p.Get: self._get,
            p.Wait: self._wait,
            p.Release: self._release,
            p.Reserve: self._reserve,
            p.SealParts: self._seal_parts,
            p.Seal: self._seal,
            p.Abort: self._abort,
            p.Exists: self._exists,
            p.Drop: self._drop,
            p.Forget: self._forget,
            p.Pin: self._pin,
            p.Prefetch: self._prefetch,
            p.PrefetchSession: self._prefetch_session,
            p.Supersede: self._supersede,
            p.Stat: self._stat,
            p.Stats: self._stats,
            p.Explain: self._explain,
            p.Verify: self._verify,
            p.Holding: self._holding,
            p.Namespaces: self._namespaces,
            p.List: self._list,
            p.ServeRebuilds: self._rebuilds.serve,
            p.NextRebuild: self._next_rebuild,
            p.RebuildProgress: self._rebuilds.progress,
            p.RebuildEnded: self._rebuilds.ended,
            p.StopRebuilds: self._rebuilds.stop,
        }

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The transport is ready."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own class, of its shape
        self._open = True
        self.holder.granted[self.connection_id] = self._granted

    def connection_lost(self, exc: Exception | None) -> None:
        """The peer left, or `close` was called."""
        self._open = False
        if isinstance(exc, OSError):
            self._take_in_the_rest()
        self._transport = None
        self._rebuilds.close()
        for task in self._waiting:  # what nobody waits for must not stand in others' way
            task.cancel()
        # What the last frames began has its first step before this.
        asyncio.get_running_loop().call_soon(self._ended)

    def _take_in_the_rest(self) -> None:
        """Serve what a peer sent before it left, and what a failed write kept from being read.

        It may be the end of leases, and a goodbye.
        """
        self._draining = True
        assert self._transport is not None
        sock = self._transport.get_extra_info("socket")
        with suppress(OSError):
            while data := os.read(sock.fileno(), _REST_BYTES):
                self.data_received(data)

    def _ended(self) -> None:
        if not (self._granted.lease_ids or self._granted.reservation_ids):
            self.holder.granted.pop(self.connection_id, None)
        self.lost.set_result(None)
        self._on_lost(self)

    def pause_writing(self) -> None:
        """A peer that does not read its replies is not read from either."""
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        """The peer reads again."""
        if self._transport is not None:
            self._transport.resume_reading()

    def drain(self) -> None:
        """Refuse what would begin something; what has begun may go on to its end."""
        self._draining = True
        self._rebuilds.close()  # or runners would wait for jobs until they are asked to leave

    def finish(self) -> None:
        """Send the replies that are there, then close; requests in flight are undone."""
        self._open = False
        if self._transport is not None:
            self._transport.close()

    def close(self) -> None:
        """Close now; requests in flight are undone when they end."""
        self._open = False
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Serve the frames that `data` completes."""
        try:
            for request_id, boot_id, body in self._frames.feed(data):
                self._serve(request_id, boot_id, p.decode_request(body))
        except (ProtocolError, FrameTooLarge) as error:
            self._send(0, _failed(error))
            self.finish()
        except NOT_A_MESSAGE as error:
            self._send(0, _failed(ProtocolError(f"not a message of the protocol: {error}")))
            self.finish()

    def _serve(self, request_id: int, boot_id: int, request: p.Request) -> None:
        started_s = self._latencies.clock() if self._latencies is not None else 0.0
        try:
            if boot_id != self._boot_id:
                raise StaleBoot(
                    "the daemon restarted: leases and reservations from before are void"
                )
            if self._draining and not isinstance(request, _ENDING):
                raise Unavailable("the daemon is stopping")
            if len(self.tasks) >= REQUESTS_IN_FLIGHT_MAX and not isinstance(request, _ENDING):
                raise Busy(f"{REQUESTS_IN_FLIGHT_MAX} requests of this connection are in flight")
            handler = self._handlers.get(type(request))
            if handler is None:
                raise InvalidRequest(f"{type(request).__name__} is not served here")
            answer = handler(request)
            if isinstance(answer, p.Reply):
                self._send(request_id, answer)
                self._note(request, started_s)
            else:
                if self._latencies is not None:
                    answer = self._noted(request, started_s, answer)
                task = self._start(request_id, answer)
                if isinstance(request, _WAITING):
                    self._waiting.add(task)
                    task.add_done_callback(self._waiting.discard)
        except BlobStoreError as error:
            self._send(request_id, _failed(error))
            self._note(request, started_s, error.code)
        except Exception:
            log.exception("a request of %s failed", self.holder.name)
            self._send(request_id, p.Failed("error", "internal error: see the daemon's log"))
            self._note(request, started_s, BlobStoreError.code)

    def _note(self, request: p.Request, started_s: float, error: str = "") -> None:
        if self._latencies is not None and type(request) is not p.NextRebuild:
            self._latencies.note("local", _VERBS[type(request)], started_s, error)

    async def _noted(
        self, request: p.Request, started_s: float, answer: Coroutine[Any, Any, p.Reply]
    ) -> p.Reply:
        try:
            reply = await answer
        except Exception as error:
            code = error.code if isinstance(error, BlobStoreError) else BlobStoreError.code
            self._note(request, started_s, code)
            raise
        self._note(request, started_s)
        return reply

    def _start(self, request_id: int, answer: Coroutine[Any, Any, p.Reply]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._finish(request_id, answer))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def _finish(self, request_id: int, answer: Awaitable[p.Reply]) -> None:
        try:
            reply: p.Reply = await answer
        except BlobStoreError as error:
            reply = _failed(error)
        except Exception:
            log.exception("a request of %s failed", self.holder.name)
            reply = p.Failed("error", "internal error: see the daemon's log")
        if not self._open:
            self._undo(reply)
        self._send(request_id, reply)

    def _undo(self, reply: p.Reply) -> None:
        if isinstance(reply, p.Leased):
            self._store.readers.release(self.holder, [reply.lease_id])
        elif isinstance(reply, p.Reserved):
            self._store.writers.abort(self.holder, reply.reservation_id)
        elif isinstance(reply, p.Rebuild):
            self._rebuilds.untold(reply)

    def _send(self, request_id: int, reply: p.Reply) -> None:
        if self._open and (request_id or isinstance(reply, p.Failed)):
            assert self._transport is not None
            if type(reply) is p.Leased:
                self._granted.lease_ids.add(reply.lease_id)
            body = p.encode(reply)
            if len(body) > framing.MAX_BODY_BYTES:
                self._undo(reply)
                body = p.encode(_failed(_too_large(reply, len(body))))
            self._transport.write(framing.pack(request_id, self._boot_id, body))

    def _ping(self, m: p.Ping) -> Answer:
        return p.Pong(m.payload)

    async def _declare(self, m: p.Declare) -> p.Reply:
        terms = Terms.from_dict(m.terms) if m.terms else None
        return p.Declared(await self._store.declare(m.namespace, terms))

    def _match(self, m: p.Match) -> Answer:
        hint = Hint.from_dict(m.hint) if m.hint else None
        found = self._store.match(m.namespace_id, m.keys, m.key_bytes, hint=hint)
        further = self._store.text_calls.rebuildable(m.namespace_id, m.keys, m.key_bytes, found[0])
        return p.Matched(*found) if further is None else self._matched_later(found, further)

    async def _matched_later(
        self, found: tuple[int, int, float], further: Awaitable[tuple[int, float]]
    ) -> p.Reply:
        return p.Matched(*found, *(await further))

    def _get(self, m: p.Get) -> Answer:
        found = self._store.get(
            self.holder, m.namespace_id, m.keys, m.key_bytes,
            timeout_s=_bounded(m.timeout_s), stream=m.stream, wait_for_writers=m.wait_for_writers,
            hint=Hint.from_dict(m.hint) if m.hint else None, job=m.job,
        )  # fmt: skip
        return _leased(found) if isinstance(found, Found) else self._leased_later(found)

    async def _leased_later(self, found: Awaitable[Found]) -> p.Reply:
        return _leased(await found)

    async def _wait(self, m: p.Wait) -> p.Reply:
        return p.Waited(
            await self._store.readers.wait(
                self.holder, m.lease_id, m.index, m.start, m.end, _bounded(m.timeout_s)
            )
        )

    def _release(self, m: p.Release) -> Answer:
        self._granted.lease_ids.difference_update(m.lease_ids)
        ended = self._store.readers.release(self.holder, m.lease_ids)
        return p.Done(ended + self._store.writers.acknowledge(self.holder, m.extents))

    async def _holding(self, m: p.Holding) -> p.Reply:
        # In a task, so that seals that came before it have begun.
        holder, own = self.holder, self._granted
        for connection_id in m.connection_ids:
            granted = holder.granted.get(connection_id)
            if granted is None:
                continue
            granted.end()
            leases = granted.lease_ids & holder.leases.keys()
            reservations = granted.reservation_ids & holder.reservations.keys()
            self._store.readers.release(holder, list(leases.difference(m.lease_ids)))
            self._store.writers.reclaim(
                holder, reservations.difference(m.reservation_ids), frozenset(m.extents)
            )
            granted.lease_ids.intersection_update(leases, m.lease_ids)
            granted.reservation_ids.intersection_update(reservations, m.reservation_ids)
            if granted is not own:
                del holder.granted[connection_id]
                own.lease_ids |= granted.lease_ids
                own.reservation_ids |= granted.reservation_ids
        return p.Done()

    async def _reserve(self, m: p.Reserve) -> p.Reply:
        state = self._store.state(m.namespace_id)
        keys = self._store.split(m.namespace_id, m.keys, m.key_bytes)
        asked = Asked(
            m.parent, m.tail_tokens, Retention.parse(m.retention), _bounded(m.timeout_s),
            group=(m.group, m.epoch) if m.group else None, parts=tuple(m.parts),
            hint=Hint.from_dict(m.hint) if m.hint else None,
            tokens=m.tokens, text=m.text, job=m.job,
        )  # fmt: skip
        reservation = await self._store.writers.reserve(self.holder, state, keys, asked)
        self.reservation_ids.add(reservation.reservation_id)
        return _reserved(reservation, self._store.writers.ttl_s)

    def _seal_parts(self, m: p.SealParts) -> Answer:
        self._store.writers.seal_parts(self.holder, m.reservation_id, m.index, m.parts)
        return p.Done(len(m.parts))

    async def _seal(self, m: p.Seal) -> p.Reply:
        self.reservation_ids.discard(m.reservation_id)
        results, reasons = await self._store.writers.seal(
            self.holder, m.reservation_id, m.digests, m.alive, m.unwritten
        )
        return p.Sealed(results, reasons)

    def _abort(self, m: p.Abort) -> Answer:
        self.reservation_ids.discard(m.reservation_id)
        self._store.writers.abort(self.holder, m.reservation_id, m.alive)
        return p.Done(1)

    def _next_rebuild(self, m: p.NextRebuild) -> Answer:
        return self._rebuilds.next(m.runner_id, _bounded(m.timeout_s))

    def _exists(self, m: p.Exists) -> Answer:
        return p.Held(self._store.exists(m.namespace_id, m.keys, m.key_bytes))

    def _drop(self, m: p.Drop) -> Answer:
        return p.Done(self._store.drop(m.namespace_id, m.keys, m.key_bytes, m.tier))

    async def _forget(self, m: p.Forget) -> p.Reply:
        return p.Done(await self._store.text_calls.forget(m.namespace_id, m.keys, m.key_bytes))

    def _pin(self, m: p.Pin) -> Answer:
        return p.Done(
            self._store.pin(m.namespace_id, m.keys, m.key_bytes, _bounded(m.ttl_s, PIN_MAX_S))
        )

    def _prefetch(self, m: p.Prefetch) -> Answer:
        return p.Done(self._store.prefetch(m.namespace_id, m.keys, m.key_bytes))

    async def _prefetch_session(self, m: p.PrefetchSession) -> p.Reply:
        return p.Done(await self._store.contexts.prefetch(m.session))

    async def _supersede(self, m: p.Supersede) -> p.Reply:
        state = self._store.state(m.namespace_id)
        return p.Done(await self._store.contexts.supersede(state, m.old_leaf, m.new_leaf))

    def _stat(self, m: p.Stat) -> Answer:
        return p.Report({"blobs": self._store.stat(m.namespace_id, m.keys, m.key_bytes)})

    def _explain(self, m: p.Explain) -> Answer:
        return p.Report({"blobs": self._store.explain(m.namespace_id, m.keys, m.key_bytes)})

    def _stats(self, m: p.Stats) -> Answer:
        return p.Report(self._store.stats())

    async def _verify(self, m: p.Verify) -> p.Reply:
        return p.Report(await self._store.verify(_bounded(m.timeout_s)))

    def _namespaces(self, m: p.Namespaces) -> Answer:
        return p.Report(listing.page_of_namespaces(self._store.index, m.after, m.limit))

    def _list(self, m: p.List) -> Answer:
        state = self._store.state(m.namespace_id)
        blobs, following = self._store.list_blobs(m.namespace_id, m.after, m.limit)
        named = listing.namespace_facts(state) | {"encoding": state.namespace.encode()}
        return p.Report({"namespace": named, "blobs": blobs, "next": following})


def _bounded(seconds: float, most_s: float = TIMEOUT_MAX_S) -> float:
    """`seconds` if it is a time that may be asked for; InvalidRequest otherwise (NaN too)."""
    if not 0 <= seconds <= most_s:
        raise InvalidRequest(f"{seconds} s is not between 0 and {most_s:.0f} s")
    return seconds


def _too_large(reply: p.Reply, nbytes: int) -> FrameTooLarge:
    return FrameTooLarge(
        f"{type(reply).__name__} of {nbytes} bytes exceeds the limit of {framing.MAX_BODY_BYTES}: "
        "ask for less at a time"
    )


def _failed(error: BlobStoreError) -> p.Failed:
    retry_after_s = error.retry_after_s if isinstance(error, Retryable) else 0.0
    return p.Failed(error.code, str(error), retry_after_s)


def _leased(found: Found) -> p.Leased:
    return p.Leased(found.lease_id, found.extents, found.reason, found.served)


def _reserved(reservation: Reservation, ttl_s: float) -> p.Reserved:
    extents = b"".join(
        slot.draft.record.extent_bytes() if slot.draft is not None else _NO_EXTENT
        for slot in reservation.slots
    )
    reasons = [slot.reason for slot in reservation.slots]
    return p.Reserved(reservation.reservation_id, extents, reasons, ttl_s)


_NO_EXTENT = p.NO_EXTENT.to_bytes(8, "little") + bytes(8)

"""One job of a model runner: the tokens, what they continue, and the blobs to be filled.

Each blob is lent, written and sealed for itself, so that readers have it as soon as it is
computed, however many follow.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blobstore.clients.bound import BoundNamespace
from blobstore.clients.lease import LeaseBase
from blobstore.clients.link import Link, Ticket
from blobstore.clients.steps import Call, Operation, Posted, ask, checked, reason
from blobstore.clients.ways import LoopWay, ThreadsWay
from blobstore.clients.writer import WriterBase
from blobstore.errors import BlobStoreError, InvalidRequest
from blobstore.keys import ID_BYTES, Keys
from blobstore.protocol import (
    Done,
    Get,
    Leased,
    Rebuild,
    RebuildEnded,
    RebuildProgress,
    Reply,
    Reserve,
    Reserved,
)

LEND_S = 10.0
"""How long a blob may wait for room."""
SEAL_S = 60.0
"""How long its digest may take."""
AHEAD_MAX = 64
"""Blobs that are lent ahead to a job of an event loop."""

_MADE = ("stored", "exists", "divergent")
"""Results after which readers have a blob, if not always this one's bytes."""

Ids = NDArray[np.uint32]


class RebuildStopped(BlobStoreError):
    """The daemon takes no more of this job: it was given up or refused, or there is no room."""

    code = "stopped"

    def __init__(self, why: str) -> None:
        super().__init__(f"the daemon takes no more of this job: {why}")
        self.why = why


class RebuildJobBase:
    """Blobs that a model runner makes again, `len(job)` of them.

    `tokens` are the ids of the run, `keys` the blobs' keys; `position` tokens come before.
    `context` are their ids (None if some are not known), `context_keys` their blobs, and
    `parent` a lease over these (None at the root), which ends with the handler. `text` is
    what the caller said of the run. `wanted` leading blobs are still wanted: it shrinks when
    readers leave, or get the rest from elsewhere; nothing beyond it need be computed.
    """

    def __init__(self, namespaces: Mapping[bytes, BoundNamespace], told: Rebuild) -> None:
        self.namespace = ns = namespaces[told.namespace_id]
        self.keys = Keys(told.keys, told.key_bytes, told.tail_tokens)
        self.tokens: Ids = np.frombuffer(told.tokens, "<u4")
        self.position = told.position
        self.parent: LeaseBase | None = None
        self.context_keys = Keys(told.context_keys, told.key_bytes)
        known = len(told.context) == told.position * ID_BYTES
        self.context: Ids | None = np.frombuffer(told.context, "<u4") if known else None
        self.text = told.text
        self.priority = told.priority
        self.wanted = told.wanted
        self.job_id = told.job_id
        self.n_sealed = 0
        self._numbers = ns.writes
        self._deadline_s = monotonic() + told.deadline_s
        self._writers: dict[int, WriterBase] = {}
        self._link: Link | None = None

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def deadline_s(self) -> float:
        """Seconds until the last who waits gives up; 0 if nobody does, or no longer."""
        return max(self._deadline_s - monotonic(), 0.0)

    def blob_tokens(self, index: int) -> Ids:
        """The token ids of blob `index`."""
        start = range(len(self))[index] * self.namespace.tokens_per_blob
        return self.tokens[start : start + self.namespace.tokens_per_blob]

    def _get_parent(self, call: Call, kind: type[LeaseBase]) -> Operation[Any]:
        """A lease over all that the job continues; RebuildStopped if it cannot be had."""
        keys, ns = self.context_keys, self.namespace
        request = Get(
            ns.id, keys.packed, keys.key_bytes, call.daemon_timeout_s(), job=self.job_id
        )  # fmt: skip
        leased = yield from ask(request, Leased)
        lease = kind(ns, keys, call.link, leased)
        if len(lease) < len(keys):
            lease.release()
            raise RebuildStopped("no_context")
        return lease

    def _lend(self, call: Call, index: int) -> Operation[WriterBase]:
        """A writer of blob `index`."""
        key, before = self.keys[index : index + 1], self.context_keys
        if index:
            before = self.keys[index - 1 : index]
        request = Reserve(
            self.namespace.id, key.packed, key.key_bytes, before[-1] if before else b"",
            key.tail_tokens, "standard", call.daemon_timeout_s(), job=self.job_id,
        )  # fmt: skip
        try:
            reserved = yield from ask(request, Reserved)
        except BlobStoreError as error:
            raise RebuildStopped(reason(error)) from error
        self._link = call.link
        writer = WriterBase(self.namespace, key, self._numbers, "standard", call.link, reserved)
        if writer.reasons[0] not in ("", "exists"):
            why = writer.reasons[0]
            writer.abort()
            raise RebuildStopped(_NO_ROOM.get(why, why))
        self._writers[index] = writer
        return writer

    def _seal_to(self, call: Call, index: int) -> Operation[None]:
        """Seal the blobs up to and including `index`, and learn what is still wanted."""
        index = range(len(self))[index]
        run = range(self.n_sealed, index + 1)
        for at in run:
            if at not in self._writers or not _touched(self._writers[at]):
                raise InvalidRequest(f"blob {at} was not written")
        if not run:
            return
        call.link = self._link
        tickets: dict[int, Ticket | None] = {}
        for at in run:
            tickets[at] = yield from self._writers[at]._post_seal()
        asked: Ticket = yield Posted(RebuildProgress(self.job_id, self.n_sealed))
        refused = ""
        for at, ticket in tickets.items():
            writer = self._writers.pop(at)
            yield from writer._take_in_seal(ticket)
            if writer.results[0] not in _MADE:
                refused = refused or writer.reasons[0] or "refused"
            elif not refused:
                self.n_sealed = at + 1
        if refused:
            raise RebuildStopped(refused)
        self._take_in((yield asked))

    def _report(self) -> Operation[None]:
        """Say how far it is, and that it goes on."""
        self._take_in((yield RebuildProgress(self.job_id, self.n_sealed)))

    def _take_in(self, reply: Reply) -> None:
        self.wanted = min(checked(reply, Done).count, len(self))

    def _seal_rest(self, call: Call) -> Operation[str]:
        """Seal what was written and is not sealed; why that is not all that is wanted, or ""."""
        end = self.n_sealed
        while end in self._writers and _touched(self._writers[end]):
            end += 1
        if end > self.n_sealed:
            yield from self._seal_to(call, end - 1)
        return "unwritten" if self.n_sealed < self.wanted else ""

    def _abort(self) -> None:
        """Give up what is not sealed."""
        while self._writers:
            self._writers.popitem()[1].abort()

    def _ended(self, why: str, seconds: float) -> Operation[None]:
        yield from ask(RebuildEnded(self.job_id, why, self.n_sealed, seconds), Done)


class RebuildJob(RebuildJobBase):
    """A job as a handler gets it; see RebuildJobBase. Blobs are lent when they are looked at."""

    def __init__(
        self, way: ThreadsWay, namespaces: Mapping[bytes, BoundNamespace], told: Rebuild
    ) -> None:
        super().__init__(namespaces, told)
        self._way = way

    def __getitem__(self, index: int) -> memoryview:
        """The payload of blob `index`, to be filled. Raises RebuildStopped."""
        return self._writer(index)[0]

    def parts(self, index: int) -> tuple[memoryview, ...]:
        """Blob `index` by layer range and head range, to be filled. Raises RebuildStopped."""
        return self._writer(index).parts(0)

    def seal(self, index: int) -> None:
        """Blobs up to and including `index` are complete: readers get them now.

        Arrays made of their views should be gone by then, or copies are published instead.
        """
        self._way.run(self._seal_to(call := self._way.call(SEAL_S), index), call)

    def _writer(self, index: int) -> WriterBase:
        index = range(len(self))[index]
        if index < self.n_sealed:
            raise InvalidRequest(f"blob {index} is sealed")
        for at in range(self.n_sealed, index + 1):  # each continues the one before
            if at not in self._writers:
                call = self._way.call(LEND_S)
                self._way.run(self._lend(call, at), call)
        return self._writers[index]


class AsyncRebuildJob(RebuildJobBase):
    """A job as a coroutine handler gets it; see RebuildJobBase.

    Some blobs are lent ahead: `ahead` of them past the last that was sealed.
    """

    def __init__(
        self, way: LoopWay, namespaces: Mapping[bytes, BoundNamespace], told: Rebuild, share: int
    ) -> None:
        super().__init__(namespaces, told)
        self._way = way
        nbytes = max(self.namespace.layout.nbytes(self.namespace.tokens_per_blob), 1)
        self._ahead_max = min(max(way.lent_bytes_max // share // nbytes, 1), AHEAD_MAX)

    @property
    def ahead(self) -> int:
        """How many blobs from `n_sealed` on are lent and may be written now."""
        return len(self._writers)

    def __getitem__(self, index: int) -> memoryview:
        """As of RebuildJob; InvalidRequest for one that is not lent yet: seal those before."""
        return self._writer(index)[0]

    def parts(self, index: int) -> tuple[memoryview, ...]:
        """As of RebuildJob; InvalidRequest for one that is not lent yet."""
        return self._writer(index).parts(0)

    async def seal(self, index: int) -> None:
        """As RebuildJob.seal; more is lent then."""
        await self._way.run(self._seal_to(call := self._way.call(SEAL_S), index), call)
        await self._lend_ahead()

    async def _lend_ahead(self) -> None:
        """Have blobs lent as far as there is room; RebuildStopped if there is none for the next."""
        while self.ahead < self._ahead_max and (at := self.n_sealed + self.ahead) < len(self):
            call = self._way.call(0.0 if self.ahead else LEND_S)
            try:
                await self._way.run(self._lend(call, at), call)
            except RebuildStopped:
                if self.ahead:
                    return
                raise

    def _writer(self, index: int) -> WriterBase:
        index = range(len(self))[index]
        writer = self._writers.get(index)
        if writer is None:
            sealed = index < self.n_sealed
            raise InvalidRequest(
                f"blob {index} is {'sealed' if sealed else 'not lent yet: seal those before it'}"
            )
        return writer


def _touched(writer: WriterBase) -> bool:
    return bool(writer._views)


_NO_ROOM = dict.fromkeys(("full", "lent_bytes", "too_large", "no_room"), "no_room")
"""Reasons of a daemon that has no room for a blob."""

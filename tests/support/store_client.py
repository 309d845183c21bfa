"""A client process without the process: it writes and reads through the store's arena."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from blobstore.digest import payload_digest, piece_digests
from blobstore.drafts import Asked, Reservation
from blobstore.index import Retention
from blobstore.layout import KVLayout
from blobstore.namespace import Namespace
from blobstore.readers import Found
from blobstore.store import Store

Answers = list[tuple[str, str]]
"""Result and reason of each blob."""


def digest_of(payload: bytes) -> bytes:
    """The digest that the store gives these bytes."""
    return payload_digest(len(payload), piece_digests(memoryview(payload)))


def content(seed: int, nbytes: int) -> bytes:
    """Bytes that differ for every seed."""
    return np.random.default_rng(seed).bytes(nbytes)


@dataclass(slots=True)
class Loan:
    """Bytes of the arena that this client may write."""

    offset: int
    nbytes: int


class Writing:
    """One reservation."""

    def __init__(self, client: StoreClient, reservation: Reservation) -> None:
        self.client = client
        self.reservation = reservation
        self.reasons = [slot.reason for slot in reservation.slots]
        self.loans = [
            Loan(slot.draft.record.dram.offset, slot.draft.record.nbytes)
            if slot.draft is not None and slot.draft.record.dram is not None
            else None
            for slot in reservation.slots
        ]

    def write(self, index: int, payload: bytes, start: int = 0) -> None:
        """Write into blob `index`; nothing happens where no extent was lent."""
        loan = self.loans[index]
        if loan is not None:
            self.client.scribble(loan, payload, start)

    def seal_parts(self, index: int, parts: Sequence[int]) -> None:
        self.client.store.writers.seal_parts(
            self.client.holder, self.reservation.reservation_id, index, parts
        )

    async def seal(
        self,
        digests: Sequence[bytes] = (),
        alive: Sequence[int] = (),
        unwritten: Sequence[int] = (),
    ) -> Answers:
        results, reasons = await self.client.store.writers.seal(
            self.client.holder, self.reservation.reservation_id, digests, alive, unwritten
        )
        return list(zip(results, reasons, strict=True))

    def abort(self, alive: Sequence[int] = ()) -> None:
        self.client.store.writers.abort(self.client.holder, self.reservation.reservation_id, alive)


class Reading:
    """One lease; `extents` are pairs of offset and size."""

    def __init__(self, client: StoreClient, found: Found) -> None:
        self.client = client
        self.lease_id = found.lease_id
        self.reason = found.reason
        self.served = found.served
        self.extents = np.frombuffer(found.extents, "<u8").reshape(-1, 2).tolist()

    def __len__(self) -> int:
        return len(self.extents)

    def __getitem__(self, index: int) -> bytes:
        offset, nbytes = self.extents[index]
        return bytes(self.client.store.arena.view[offset : offset + nbytes])

    def payloads(self) -> list[bytes]:
        return [self[index] for index in range(len(self))]

    async def wait(self, index: int, start: int, end: int, timeout_s: float = 5.0) -> str:
        return await self.client.store.readers.wait(
            self.client.holder, self.lease_id, index, start, end, timeout_s
        )

    def release(self) -> int:
        return self.client.store.readers.release(self.client.holder, [self.lease_id])


class StoreClient:
    """One client process of `store`."""

    def __init__(self, store: Store, name: str = "client") -> None:
        self.store = store
        self.holder = store.attach(name, pid=1, name=name)

    def scribble(self, loan: Loan, payload: bytes, start: int = 0) -> None:
        """Write, whether or not that is still allowed."""
        at = loan.offset + start
        assert start + len(payload) <= loan.nbytes
        self.store.arena.view[at : at + len(payload)] = payload

    async def reserve(
        self, ns: Namespace, keys: Sequence[bytes], *, retention: str = "standard", **terms: Any
    ) -> Writing:
        """A reservation; `terms` as of Asked."""
        asked = Asked(retention=Retention.parse(retention), **terms)
        reservation = await self.store.writers.reserve(
            self.holder, self.store.state(ns.id), keys, asked
        )
        return Writing(self, reservation)

    async def put(
        self, ns: Namespace, keys: Sequence[bytes], payloads: Sequence[bytes], **terms: Any
    ) -> Answers:
        """Reserve, write, seal."""
        writing = await self.reserve(ns, keys, **terms)
        for index, payload in enumerate(payloads):
            writing.write(index, payload)
        return await writing.seal([digest_of(payload) for payload in payloads])

    async def get(
        self, ns: Namespace, keys: Sequence[bytes], *, timeout_s: float = 5.0, **terms: Any
    ) -> Reading:
        """A lease; `terms` as of Store.get."""
        found = self.store.get(
            self.holder, ns.id, b"".join(keys), len(keys[0]), timeout_s=timeout_s, **terms
        )
        return Reading(self, found if isinstance(found, Found) else await found)

    async def read(self, ns: Namespace, keys: Sequence[bytes], **terms: Any) -> list[bytes]:
        """The payloads of the leading blobs, leased no longer than it takes to copy them."""
        reading = await self.get(ns, keys, **terms)
        try:
            return reading.payloads()
        finally:
            reading.release()

    def match(self, ns: Namespace, keys: Sequence[bytes]) -> int:
        return self.store.match(ns.id, b"".join(keys), len(keys[0]))[0]

    def exists(self, ns: Namespace, keys: Sequence[bytes]) -> list[bool]:
        return [bool(b) for b in self.store.exists(ns.id, b"".join(keys), len(keys[0]))]

    def drop(self, ns: Namespace, keys: Sequence[bytes], tier: str = "") -> int:
        return self.store.drop(ns.id, b"".join(keys), len(keys[0]), tier)

    def pin(self, ns: Namespace, keys: Sequence[bytes], ttl_s: float) -> int:
        return self.store.pin(ns.id, b"".join(keys), len(keys[0]), ttl_s)

    def prefetch(self, ns: Namespace, keys: Sequence[bytes]) -> int:
        return self.store.prefetch(ns.id, b"".join(keys), len(keys[0]))

    def stat(self, ns: Namespace, keys: Sequence[bytes]) -> list[dict[str, Any]]:
        return self.store.stat(ns.id, b"".join(keys), len(keys[0]))

    def acknowledge(self, loans: Iterable[Loan]) -> int:
        """No view of these is left."""
        return self.store.writers.acknowledge(self.holder, [loan.offset for loan in loans])

    def exit(self) -> None:
        """The process ends, whatever it was doing."""
        self.store.gone(self.holder)


def opaque(nbytes: int, model: str = "m") -> Namespace:
    """A namespace of blobs of `nbytes`."""
    return Namespace(model, KVLayout.opaque(nbytes), tokens_per_blob=16)


def chain(n: int, name: str = "") -> list[bytes]:
    """Keys of a chain of `n` blobs, told from others by its name."""
    return [hashlib.sha256(f"{name}/{number}".encode()).digest() for number in range(n)]

"""A client process that does everything that clients can do, at random, and checks every byte.

Ends by itself only when something is wrong.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from blobstore.clients import (
    AsyncClient,
    BoundNamespace,
    Client,
    Keys,
    KVLayout,
    LayerGroup,
    Lease,
    Namespace,
    Shard,
    WriterGroup,
)
from blobstore.errors import InvalidRequest, Retryable, StorageFailed
from blobstore.units import KIB, MIB
from tests.support.blobs import chain, opaque, payload_of
from tests.support.program import say

LAYERED = Namespace(
    model="layers",
    layout=KVLayout(
        (LayerGroup.attention(layers=6, heads=4, head_size=1024, dtype="bf16"),), head_groups=2
    ),
    tokens_per_blob=32,
)
NAMESPACES = (opaque(1000), opaque(60_000), opaque(64 * KIB + 1), opaque(2 * MIB + 3), LAYERED)
SEEDS = range(1, 7)
LENGTH = 6


def contexts(namespace: Namespace) -> list[Keys]:
    """All that is ever put into a namespace, by all processes."""
    if namespace is LAYERED:
        return [namespace.keys([seed] * (32 * LENGTH)) for seed in SEEDS]
    return [chain(namespace, seed, LENGTH) for seed in SEEDS]


class Chaos:
    """One thread's share of it."""

    def __init__(self, kv: Client, address: str, seed: int) -> None:
        self.kv = kv
        self.address = address
        self.rng = random.Random(seed)
        self.held: list[tuple[Lease, int, bytes]] = []
        self.verbs: list[tuple[Callable[[BoundNamespace, Keys], None], int]] = [
            (self.put, 10), (self.write, 5), (self.put_share, 4), (self.give_up, 3),
            (self.get, 12), (self.get_into, 6), (self.stream, 6), (self.follow, 4),
            (self.look_again, 8), (self.let_go, 6), (self.cancel, 1),
            (self.drop, 3), (self.demote, 6), (self.pin, 2), (self.prefetch, 3), (self.ask, 5),
        ]  # fmt: skip

    def run(self) -> NoReturn:
        """Until it is killed."""
        verbs, weights = zip(*self.verbs, strict=True)
        while True:
            namespace = self.rng.choice(NAMESPACES)
            keys = self.rng.choice(contexts(namespace))[: self.rng.randint(1, LENGTH)]
            (verb,) = self.rng.choices(verbs, weights)
            verb(self.kv.namespace(namespace), keys)

    def put(self, ns: BoundNamespace, keys: Keys) -> None:
        retention = self.rng.choice(("volatile", "standard", "standard", "durable"))
        payloads = [right(ns, key) for key in keys]
        try:
            results = self.kv.put_from(ns, keys, payloads, retention=retention, timeout_s=0.5)
        except (Retryable, StorageFailed, InvalidRequest):
            return  # invalid: durable, but it continues a volatile one
        assert set(results) <= {"stored", "exists", "refused"}, results

    def write(self, ns: BoundNamespace, keys: Keys) -> None:
        with self.kv.put(ns, keys, timeout_s=0.5) as writer:
            for index, key in enumerate(keys):
                writer[index][:] = right(ns, key)
        assert set(writer.results) <= {"stored", "exists", "refused"}, writer.results

    def put_share(self, ns: BoundNamespace, keys: Keys) -> None:
        """One rank's parts; other processes put those of the other rank."""
        if ns.namespace is not LAYERED:
            return
        rank = self.kv.namespace(LAYERED, Shard(tp_rank=self.rng.randrange(2), tp_size=2))
        group = WriterGroup("engine", self.rng.randrange(3))
        payload = right(ns, keys[0])
        parts = [rank.layout.parts(32)[number] for number in rank.writes]
        share = b"".join(payload[part.offset : part.offset + part.nbytes] for part in parts)
        (result,) = self.kv.put_from(rank, keys[:1], [share], group=group, timeout_s=0.5)
        assert result in ("stored", "exists", "refused", "partial"), result

    def give_up(self, ns: BoundNamespace, keys: Keys) -> None:
        writer = self.kv.put(ns, keys, timeout_s=0.2)
        writer[0][:] = b"\xee" * writer[0].nbytes
        writer.abort()

    def get(self, ns: BoundNamespace, keys: Keys) -> None:
        with self.kv.get(ns, keys, timeout_s=self.rng.choice((0.0, 0.05, 1.0))) as lease:
            for key, view in zip(keys, lease, strict=False):
                check(ns, key, view)
        if len(self.held) < 4:
            kept = self.kv.get(ns, keys)
            if len(kept):
                index = self.rng.randrange(len(kept))
                self.held.append((kept, index, right(ns, keys[index])))

    def look_again(self, ns: BoundNamespace, keys: Keys) -> None:
        """What was leased long ago has not changed."""
        for lease, index, expected in self.held:
            assert lease[index] == expected, "a leased blob changed"

    def let_go(self, ns: BoundNamespace, keys: Keys) -> None:
        if self.held:
            lease, _, _ = self.held.pop(self.rng.randrange(len(self.held)))
            if self.rng.random() < 0.5:
                lease.release()

    def get_into(self, ns: BoundNamespace, keys: Keys) -> None:
        buffers = [bytearray(nbytes_of(ns.namespace)) for _ in keys]
        filled = self.kv.get_into(ns, keys, buffers, timeout_s=1.0)
        for key, buffer in zip(keys[:filled], buffers, strict=False):
            check(ns, key, buffer)

    def stream(self, ns: BoundNamespace, keys: Keys) -> None:
        with self.kv.get(ns, keys, stream=True, timeout_s=1.0) as lease:
            for index in range(len(lease)):
                for part in self.rng.sample(range(lease.n_parts), min(2, lease.n_parts)):
                    if lease.wait(index, part, timeout_s=1.0):
                        span = ns.layout.parts(ns.tokens_per_blob)[part]
                        expected = right(ns, keys[index])[span.offset :][: span.nbytes]
                        assert lease.part(index, part) == expected, "a streamed part is wrong"

    def follow(self, ns: BoundNamespace, keys: Keys) -> None:
        with self.kv.get(ns, keys, stream=True, wait=True, timeout_s=0.1) as lease:
            for index in range(len(lease)):
                if lease.wait(index, timeout_s=0.1):
                    check(ns, keys[index], lease[index])

    def cancel(self, ns: BoundNamespace, keys: Keys) -> None:
        asyncio.run(self._cancel(ns, keys))

    async def _cancel(self, ns: BoundNamespace, keys: Keys) -> None:
        async with AsyncClient(self.address) as kv:
            tasks = [asyncio.ensure_future(kv.get(ns, keys[: n + 1])) for n in range(len(keys))]
            await asyncio.sleep(self.rng.uniform(0.0, 0.005))
            for task in self.rng.sample(tasks, len(tasks) // 2):
                task.cancel()
            for lease in await asyncio.gather(*tasks, return_exceptions=True):
                if not isinstance(lease, BaseException):
                    for key, view in zip(keys, lease, strict=False):
                        check(ns, key, view)

    def drop(self, ns: BoundNamespace, keys: Keys) -> None:
        self.kv.drop(ns, keys[-1:])

    def demote(self, ns: BoundNamespace, keys: Keys) -> None:
        self.kv.drop(ns, keys, tier="dram")

    def pin(self, ns: BoundNamespace, keys: Keys) -> None:
        self.kv.pin(ns, keys, self.rng.choice((0.0, 0.05)))

    def prefetch(self, ns: BoundNamespace, keys: Keys) -> None:
        self.kv.prefetch(ns, keys)

    def ask(self, ns: BoundNamespace, keys: Keys) -> None:
        hit = self.kv.match(ns, keys)
        assert 0 <= hit.warm <= hit.blobs <= len(keys)
        assert len(self.kv.exists(ns, keys)) == len(keys)
        assert len(self.kv.stat(ns, keys)) in (0, len(keys))


_RIGHT: dict[tuple[bytes, int], bytes] = {}


def nbytes_of(namespace: Namespace) -> int:
    """Of a blob of this namespace."""
    return namespace.layout.nbytes(namespace.tokens_per_blob)


def right(ns: BoundNamespace, key: bytes) -> bytes:
    """The bytes that belong under a key."""
    wanted = (key, nbytes_of(ns.namespace))
    if wanted not in _RIGHT:
        _RIGHT[wanted] = payload_of(*wanted)
    return _RIGHT[wanted]


def check(ns: BoundNamespace, key: bytes, found: memoryview | bytearray) -> None:
    """AssertionError if these are not the bytes that belong under the key."""
    assert memoryview(found) == right(ns, key), f"wrong bytes under {key.hex()[:12]}"


def main(address: str, seed: str) -> None:
    """Two threads on one client; the first error of either ends the process."""
    kv = Client(address, timeout_s=5.0)

    def run(number: int) -> None:
        try:
            Chaos(kv, address, 2 * int(seed) + number).run()
        except BaseException:
            sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
            os._exit(3)

    for number in range(2):
        threading.Thread(target=run, args=(number,), daemon=True).start()
    say("running")
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])

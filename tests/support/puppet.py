"""A client in a process of its own that does what a test tells it, a verb at a time.

with Puppet(address) as puppet:
    puppet.do("put", nbytes, seed, n)
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from blobstore.clients import AsyncClient, Client, Lease, Writer
from tests.support.blobs import chain, count_right, opaque, payload_of, put
from tests.support.program import ANSWER_S, Program, say


class Puppet(Program):
    """The test's side."""

    def __init__(self, address: str, **options: Any) -> None:
        super().__init__("tests.support.puppet", address, **options)

    def do(self, verb: str, *arguments: object, timeout_s: float = ANSWER_S) -> Any:
        """What the verb returned."""
        return self.ask([verb, *arguments], timeout_s)


class _Actor:
    """The verbs. A context is named by the size of its blobs, a seed and their number."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.kv = Client(address, timeout_s=20.0)
        self.leases: list[Lease] = []
        self.views: list[memoryview] = []
        self.writer: Writer | None = None

    def put(self, nbytes: int, seed: int, n: int, retention: str = "standard") -> list[str]:
        """Store a context."""
        namespace = opaque(nbytes)
        return put(self.kv, namespace, chain(namespace, seed, n), retention)

    def get(self, nbytes: int, seed: int, n: int) -> int:
        """Leading blobs that are held; all of them are right."""
        namespace = opaque(nbytes)
        return count_right(self.kv, namespace, chain(namespace, seed, n))

    def get_at_once(self, nbytes: int, seeds: list[int], threads: int) -> list[int]:
        """Get one-blob contexts from so many threads, and from as many tasks of a loop."""
        namespace = opaque(nbytes)

        def one(seed: int) -> int:
            return count_right(self.kv, namespace, chain(namespace, seed, 1))

        with ThreadPoolExecutor(threads) as pool:
            found = list(pool.map(one, seeds))
        return found + asyncio.run(_get_at_once(self._address, nbytes, seeds))

    def flood(self, nbytes: int, seed: int, n: int) -> dict[str, int]:
        """Store `n` contexts of one blob each, and count the results."""
        counts: dict[str, int] = {}
        for number in range(n):
            (result,) = self.put(nbytes, seed + number, 1)
            counts[result] = counts.get(result, 0) + 1
        return counts

    def lease(self, nbytes: int, seed: int, n: int) -> int:
        """Lease a context, and hold it with a view of each blob."""
        namespace = opaque(nbytes)
        lease = self.kv.get(self.kv.namespace(namespace), chain(namespace, seed, n))
        self.leases.append(lease)
        self.views += list(lease)
        return len(lease)

    def views_right(self, nbytes: int, seed: int, n: int) -> bool:
        """Whether the views, of one lease of this context, show the right bytes."""
        keys = chain(opaque(nbytes), seed, n)
        return [bytes(view) for view in self.views] == [payload_of(key, nbytes) for key in keys]

    def release(self) -> None:
        """Let go of all leases and views."""
        self.views.clear()
        while self.leases:
            self.leases.pop().release()

    def reserve(self, nbytes: int, seed: int, n: int) -> list[str]:
        """Open a writer; why there is nothing to write, for each blob."""
        namespace = opaque(nbytes)
        keys = chain(namespace, seed, n)
        self.writer = self.kv.put(self.kv.namespace(namespace), keys)
        return list(self.writer.reasons)

    def fill(self, byte: int) -> None:
        """Write this byte all over the writer's blobs."""
        assert self.writer is not None
        nbytes = self.writer[0].nbytes
        for index in range(len(self.writer)):
            self.writer[index][:] = bytes((byte,)) * nbytes

    def seal(self) -> dict[str, list[str]]:
        """End the writing."""
        assert self.writer is not None
        self.writer.seal()
        return {"results": list(self.writer.results), "reasons": list(self.writer.reasons)}

    def close(self) -> None:
        """Close the client; leases and views stay."""
        self.kv.close()

    def leave(self, how: str) -> None:
        """End this process, with everything still open."""
        if how == "exception":
            raise RuntimeError("as the test asked")
        if how == "_exit":
            os._exit(0)
        sys.exit(0)


async def _get_at_once(address: str, nbytes: int, seeds: list[int]) -> list[int]:
    namespace = opaque(nbytes)
    async with AsyncClient(address, timeout_s=20.0) as kv:
        ns = await kv.namespace(namespace)

        async def one(seed: int) -> int:
            keys = chain(namespace, seed, 1)
            async with kv.get(ns, keys) as lease:
                return sum(lease[i] == payload_of(keys[i], nbytes) for i in range(len(lease)))

        return await asyncio.gather(*(one(seed) for seed in seeds))


def main(address: str) -> None:
    """Do what standard input says until it ends."""
    actor = _Actor(address)
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        say(getattr(actor, verb)(*arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])

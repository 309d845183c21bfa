"""A client process that puts, reads and drops at random, and knows what it was promised.

The test says what is missing to start a round, and "stop" to end it; the answer is a
`Promises`, by size of blob: keys of blobs that "must" be there after a crash, that "may"
be, and that "never" are, since they are volatile.
"""

from __future__ import annotations

import json
import random
import select
import sys
from collections import deque
from typing import Any

from blobstore.clients import BoundNamespace, Client, Keys, Namespace
from blobstore.errors import Retryable, StorageFailed
from blobstore.units import KIB, MIB
from tests.support.blobs import chain, count_right, opaque, payloads_of
from tests.support.program import say

SIZES = (60_000, 64 * KIB + 1, MIB + 123, 4 * MIB)
"""Within the catalogue, and in segments: one piece, two, several."""
DURABLE_BYTES_MAX = 8 * MIB
SHARED_SEEDS = range(1, 4)
"""Contexts that every process puts, at the same time as the others."""

Promises = dict[str, dict[str, list[str]]]


class _Load:
    def __init__(self, address: str, number: int, seed: int) -> None:
        self._kv = Client(address, timeout_s=10.0)
        self._rng = random.Random(seed * 1000 + number)
        self._next_seed = (number + 1) << 24
        self._bound: dict[int, BoundNamespace] = {
            nbytes: self._kv.namespace(opaque(nbytes)) for nbytes in SIZES
        }
        self._durable: deque[tuple[int, Keys]] = deque()
        self._put: deque[tuple[int, Keys]] = deque(maxlen=20)
        self._must: set[tuple[int, bytes]] = set()
        self._may: set[tuple[int, bytes]] = set()
        self._never: set[tuple[int, bytes]] = set()

    def step(self) -> None:
        """One random operation."""
        dice = self._rng.random()
        if dice < 0.5:
            self._put_one()
        elif dice < 0.6:
            self._put_shared()
        elif dice < 0.9 and self._put:
            nbytes, keys = self._rng.choice(self._put)
            count_right(self._kv, _namespace(nbytes), keys)
        elif self._put:
            self._drop(*self._rng.choice(self._put))
        while sum(nbytes * len(keys) for nbytes, keys in self._durable) > DURABLE_BYTES_MAX:
            self._drop(*self._durable.popleft())

    def forget(self, missing: dict[str, list[str]]) -> None:
        """The test found that these are not there, as they need not be."""
        for nbytes, keys in missing.items():
            self._may -= {(int(nbytes), bytes.fromhex(key)) for key in keys}

    def promises(self) -> Promises:
        """What the daemon promised to this process."""
        report: Promises = {"must": {}, "may": {}, "never": {}}
        may = self._may - self._must
        for name, known in (("must", self._must), ("may", may), ("never", self._never)):
            for nbytes, key in known:
                report[name].setdefault(str(nbytes), []).append(key.hex())
        self._never.clear()
        return report

    def _put_one(self) -> None:
        nbytes = self._rng.choice(SIZES)
        self._next_seed += 1
        keys = chain(_namespace(nbytes), self._next_seed, self._rng.randint(1, 4))
        retention = self._rng.choices(("durable", "standard", "volatile"), (5, 4, 1))[0]
        self._store(nbytes, keys, retention)

    def _put_shared(self) -> None:
        nbytes = self._rng.choice(SIZES)
        keys = chain(_namespace(nbytes), self._rng.choice(SHARED_SEEDS), 2)
        self._store(nbytes, keys, "standard")

    def _store(self, nbytes: int, keys: Keys, retention: str) -> None:
        known = self._never if retention == "volatile" else self._may
        known |= {(nbytes, key) for key in keys}
        self._put.append((nbytes, keys))
        try:
            self._kv.put_from(
                self._bound[nbytes], keys, payloads_of(keys, nbytes), retention=retention
            )
        except (Retryable, StorageFailed):
            return  # full, or the daemon is dead: nothing was promised
        if retention == "durable":
            self._must |= {(nbytes, key) for key in keys}
            self._durable.append((nbytes, keys))

    def _drop(self, nbytes: int, keys: Keys) -> None:
        self._must -= {(nbytes, key) for key in keys}
        self._kv.drop(self._bound[nbytes], keys[:1])


def _namespace(nbytes: int) -> Namespace:
    return _NAMESPACES[nbytes]


_NAMESPACES = {nbytes: opaque(nbytes) for nbytes in SIZES}


def main(address: str, number: str, seed: str) -> None:
    """Work whenever the test says so."""
    load = _Load(address, int(number), int(seed))
    say("ready")
    for line in sys.stdin:
        message: Any = json.loads(line)
        load.forget(message)
        say("running")
        while not select.select([0], [], [], 0)[0]:
            load.step()
        sys.stdin.readline()
        say(load.promises())


if __name__ == "__main__":
    main(*sys.argv[1:])

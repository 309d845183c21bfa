"""Client processes by the dozen: forked from one that has everything imported.

Each puts, reads and holds at random until it is killed. The test tells the seed of
the next one and hears its process id.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from typing import NoReturn

from blobstore.clients import Client, Lease, Writer
from blobstore.units import MIB
from tests.support.blobs import chain, opaque, payload_of
from tests.support.program import say

NAMESPACE = opaque(MIB)
CONTEXTS = range(1, 5)
"""Seeds of the contexts that all of them put and read."""
LENGTH = 4


def main(address: str) -> None:
    """Fork one client for every line of input."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    say("ready")
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _work(address, int(line))
        say(pid)


def _work(address: str, seed: int) -> NoReturn:
    rng = random.Random(seed)
    kv = Client(address)
    ns = kv.namespace(NAMESPACE)
    held: list[Lease | Writer | memoryview] = []
    while True:
        keys = chain(NAMESPACE, rng.choice(CONTEXTS), LENGTH)[: rng.randint(1, LENGTH)]
        dice = rng.random()
        if dice < 0.3:
            with kv.put(ns, keys) as writer:
                for key, view in zip(keys, (writer[i] for i in range(len(keys))), strict=True):
                    view[:] = payload_of(key, MIB)
        elif dice < 0.5:  # open until it is killed, or until it is many
            writer = kv.put(ns, chain(NAMESPACE, rng.randint(1 << 16, 1 << 24), 1))
            writer[0][:] = b"\xee" * MIB
            held.append(writer)
        elif dice < 0.9:
            lease = kv.get(ns, keys)
            held += [lease, *lease]
        else:
            kv.drop(ns, keys[-1:])
        if len(held) > 12:
            del held[: rng.randint(1, 12)]


if __name__ == "__main__":
    main(*sys.argv[1:])

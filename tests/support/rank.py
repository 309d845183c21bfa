"""The second of two ranks of an engine, in a process of its own: its writer is open until it dies.

with Program("tests.support.rank", address, model) as rank:
    reasons = rank.hear()
"""

from __future__ import annotations

import sys

from blobstore.clients import Client, KVLayout, LayerGroup, Namespace, Shard, WriterGroup
from tests.support.program import say

TOKENS = 4
N = 3
LAYOUT = KVLayout((LayerGroup.attention(layers=2, heads=2, head_size=64),), head_groups=2)
GROUP = WriterGroup("engine that loses a rank", 1)


def namespace_of(model: str) -> Namespace:
    """That the rank writes to."""
    return Namespace(model, LAYOUT, tokens_per_blob=TOKENS)


def main(address: str, model: str) -> None:
    """Open the writer, say its reasons, and wait for the end of standard input."""
    namespace = namespace_of(model)
    with Client(address) as kv:
        ns = kv.namespace(namespace, Shard(1, 2))
        writer = kv.put(ns, namespace.keys(range(TOKENS * N)), group=GROUP)
        for blob in range(N):
            for part in writer.parts(blob):
                part[:] = b"d" * part.nbytes
        say(writer.reasons)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])

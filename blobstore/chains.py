"""Where the blobs of a chain lie in DRAM, for leases.

Ranks of one engine lease the same chain at the same moment, and conversations
share their head; so the last answers are kept, each until a blob leaves DRAM.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from xxhash import xxh3_128_digest

from blobstore.index import Record

CHAINS_MAX = 256
"""Answers kept: 16 bytes a blob each, so 2 MB for contexts of 500 blobs."""


@dataclass(frozen=True, slots=True)
class _Answer:
    departures: int
    keys_digest: bytes
    extents: bytes


class Chains:
    """Packed extents of chains that are readable in DRAM from end to end.

    `departures` counts the blobs that have left DRAM so far: as long as it
    stands still, an answer stays right, for a sealed blob never changes.
    """

    def __init__(self, departures: Callable[[], int]) -> None:
        self._departures = departures
        self._answers: OrderedDict[Record, _Answer] = OrderedDict()

    def extents(self, leaf: Record, keys: bytes, n: int) -> bytes | None:
        """Extents of the `n` blobs that end at `leaf`, if all are readable, under these `keys`."""
        now = self._departures()
        keys_digest = xxh3_128_digest(keys)
        answer = self._answers.get(leaf)
        if answer and answer.departures == now and answer.keys_digest == keys_digest:
            return answer.extents
        extents = _walk(leaf, keys, n)
        if extents is not None:
            self._answers[leaf] = _Answer(now, keys_digest, extents)
            self._answers.move_to_end(leaf)
            if len(self._answers) > CHAINS_MAX:
                self._answers.popitem(last=False)
        return extents


def _walk(leaf: Record, keys: bytes, n: int) -> bytes | None:
    extents: list[bytes] = []
    found: list[bytes] = []
    node: Record | None = leaf
    for _ in range(n):
        if node is None or not node.packed:
            return None
        extents.append(node.packed)
        found.append(node.key)
        node = node.parent
    found.reverse()
    if b"".join(found) != keys:
        return None
    extents.reverse()
    return b"".join(extents)

"""Chunks of vLLM's offloading as blobs: their keys, and which one each continues.

An offload key is the hash of a chunk's last block with the number of its cache group, in
four bytes, behind it. Chunks of one request and group are a chain, in the order of the
tokens that they end with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

GROUP_BYTES = 4


@dataclass(frozen=True, slots=True)
class Chunk:
    """A row of the engine's host memory, and what it is."""

    key: bytes
    row: int
    parent: bytes | None = None
    """The key that it continues, if that is known."""


class Positions:
    """Where the chunks of one request lie.

    Args:
        chunk_tokens: of each cache group, by its number.
    """

    def __init__(self, chunk_tokens: Mapping[int, int]) -> None:
        self._chunk_tokens = chunk_tokens
        self._seen = 0
        self._at: dict[tuple[int, int], bytes] = {}

    def chunks(
        self, keys: Iterable[bytes], rows: Iterable[int], ends: Mapping[bytes, int]
    ) -> list[Chunk]:
        """The chunks with these keys, in these rows, each after the one that it continues.

        `ends` are the tokens that the request's chunks end with, all that are known so far:
        a mapping that only ever grows.
        """
        for key, end in islice(ends.items(), self._seen, None):
            self._at[_group(key), end] = key
        self._seen = len(ends)
        pairs = ((bytes(key), int(row)) for key, row in zip(keys, rows, strict=True))
        placed = sorted(pairs, key=lambda pair: (_group(pair[0]), ends.get(pair[0], 0)))
        return [Chunk(key, row, self._parent(key, ends.get(key))) for key, row in placed]

    def _parent(self, key: bytes, end: int | None) -> bytes | None:
        """What the chunk that ends with token number `end` continues; None if it is not known."""
        step = self._chunk_tokens.get(_group(key))
        if end is None or step is None:
            return None
        return self._at.get((_group(key), (end - 1) // step * step))


def _group(key: bytes) -> int:
    return int.from_bytes(key[-GROUP_BYTES:], "big")


def runs(chunks: Sequence[Chunk]) -> list[list[Chunk]]:
    """Cut where a chunk does not continue the one before it."""
    cut: list[list[Chunk]] = []
    for chunk in chunks:
        if cut and chunk.parent == cut[-1][-1].key:
            cut[-1].append(chunk)
        else:
            cut.append([chunk])
    return cut

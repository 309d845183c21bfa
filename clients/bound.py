"""A namespace as one reader or writer sees it: identity, and the rank's share of each blob."""

from __future__ import annotations

from dataclasses import dataclass, field

from blobstore.keys import Keys
from blobstore.layout import KVLayout, Part, Shard
from blobstore.namespace import Namespace
from blobstore.terms import Terms

Run = tuple[int, int]
"""Start and end of consecutive bytes of a payload."""


@dataclass(frozen=True, slots=True)
class BoundNamespace:
    """What every call names: a namespace, and optionally this rank's share of its blobs.

    A value: it may be used with any client, across reconnects, threads and forks.
    Raises InvalidRequest if the shard does not fit the layout.
    """

    namespace: Namespace
    shard: Shard | None = None
    terms: Terms = field(default=Terms(), compare=False)
    """What each daemon that does not know the namespace yet is told beside it."""
    id: bytes = field(init=False, repr=False)
    reads: tuple[int, ...] = field(init=False, repr=False)
    """Numbers of the parts that this rank reads: all, without a shard."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", self.namespace.id)
        object.__setattr__(self, "reads", self.layout.shard_parts(self.shard))

    @property
    def layout(self) -> KVLayout:
        """Of the payloads."""
        return self.namespace.layout

    @property
    def tokens_per_blob(self) -> int:
        """In a full blob."""
        return self.namespace.tokens_per_blob

    @property
    def writes(self) -> tuple[int, ...]:
        """Numbers of the parts that this rank writes; InvalidRequest if it can write none whole."""
        return self.layout.shard_writes(self.shard)

    def keys(self, token_ids: object, *, tail: bool = False) -> Keys:
        """One key per full blob of `token_ids`; see Namespace.keys."""
        return self.namespace.keys(token_ids, tail=tail)

    def tokens(self, keys: Keys, index: int) -> int:
        """Tokens of blob number `index` of `keys`."""
        if keys.tail_tokens and index == len(keys) - 1:
            return keys.tail_tokens
        return self.tokens_per_blob

    def leading_tokens(self, keys: Keys, n: int) -> int:
        """Tokens of the first `n` blobs of `keys`."""
        total = n * self.tokens_per_blob
        if keys.tail_tokens and n == len(keys):
            total -= self.tokens_per_blob - keys.tail_tokens
        return total

    def parts(self, tokens: int, numbers: tuple[int, ...]) -> tuple[Part, ...]:
        """The parts with these numbers of a blob of `tokens` tokens."""
        parts = self.layout.parts(tokens)
        return parts if len(numbers) == len(parts) else tuple(parts[number] for number in numbers)


class Share:
    """Which bytes of each blob of a chain a rank reads or writes: the parts `numbers`."""

    def __init__(self, ns: BoundNamespace, keys: Keys, numbers: tuple[int, ...]) -> None:
        self._n = len(keys)
        self._tokens = ns.tokens_per_blob, ns.tokens(keys, self._n - 1)
        self._runs = tuple(_joined(ns.parts(n, numbers)) for n in self._tokens)
        self._blob_bytes = tuple(map(ns.layout.nbytes, self._tokens))

    def runs(self, index: int) -> tuple[Run, ...]:
        """The bytes of blob `index`, in order: what a rank's buffer holds."""
        return self._runs[index == self._n - 1]

    def tokens(self, index: int) -> int:
        """Tokens of blob `index`."""
        return self._tokens[index == self._n - 1]

    def blob_nbytes(self, index: int) -> int:
        """All bytes of blob `index`."""
        return self._blob_bytes[index == self._n - 1]

    @property
    def sizes(self) -> list[int]:
        """The rank's bytes of each blob."""
        return self._of_each(tuple(sum(end - start for start, end in runs) for runs in self._runs))

    @property
    def blob_sizes(self) -> list[int]:
        """All bytes of each blob."""
        return self._of_each(self._blob_bytes)

    def _of_each(self, values: tuple[int, ...]) -> list[int]:
        full, last = values
        return [full] * (self._n - 1) + [last] if self._n else []


def _joined(parts: tuple[Part, ...]) -> tuple[Run, ...]:
    """Where the parts are, neighbours in one."""
    runs: list[Run] = []
    for part in parts:
        start = part.offset
        if runs and runs[-1][1] == start:
            start, _ = runs.pop()
        runs.append((start, part.offset + part.nbytes))
    return tuple(runs)

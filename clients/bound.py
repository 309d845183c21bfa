"""A namespace as one reader or writer sees it: identity, and the rank's share of each blob."""

from __future__ import annotations

from dataclasses import dataclass, field

from blobstore.keys import Keys
from blobstore.layout import KVLayout, Part, Shard
from blobstore.namespace import Namespace

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

    def runs(self, tokens: int, numbers: tuple[int, ...]) -> tuple[Run, ...]:
        """The bytes of these parts, neighbours joined: what a rank's buffer holds, in order."""
        runs: list[Run] = []
        for part in self.parts(tokens, numbers):
            start, end = part.offset, part.offset + part.nbytes
            if runs and runs[-1][1] == start:
                start, _ = runs.pop()
            runs.append((start, end))
        return tuple(runs)

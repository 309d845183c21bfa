"""The worker threads of a store: who waits for a disk does not hold up who computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, fields

HASH_LANES = 2


@dataclass(frozen=True, slots=True)
class Pools:
    """One pool for each kind of work."""

    read: Executor
    write: Executor
    hash: Executor
    sync: Executor
    commit: Executor
    trim: Executor

    @classmethod
    def of(cls, threads: Callable[[int, str], Executor], lanes: int) -> Pools:
        """Pools made by `threads`, of `lanes` workers where bytes go to and from the disk."""
        return cls(
            read=threads(lanes, "read"),
            write=threads(lanes, "write"),
            hash=threads(HASH_LANES, "hash"),
            sync=threads(lanes, "sync"),
            commit=threads(1, "commit"),
            trim=threads(1, "trim"),
        )

    def __iter__(self) -> Iterator[Executor]:
        return (getattr(self, field.name) for field in fields(self))

"""What is to be rebuilt, and who waits for it: jobs, and each waiter's shares in them.

A job is a run of consecutive blobs that one runner makes from front to back. A waiter wants
the leading blobs of a chain, which may lie in several jobs: its shares. Plain data with the
arithmetic between them; `RebuildQueue` moves it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from blobstore.text_entry import TextEntry

if TYPE_CHECKING:
    from blobstore.runners import Runner


@dataclass(slots=True, eq=False)
class Waiter:
    """One request for the leading `need` blobs of a chain."""

    need: int
    deadline_s: float
    priority: int
    on_change: Callable[[], None]
    """Called when more blobs are made, and when it has ended."""
    shares: list[Share] = field(default_factory=list)
    short: str = ""
    """Why it gets no more than `need`, if that is less than was asked for."""
    reason: str | None = None
    """None while it waits; then "" or why not all of its blobs were made."""
    n_last: int = 0
    """How many of its blobs were made when it ended: jobs go on without it."""

    @property
    def n_sealed(self) -> int:
        """How many of its leading blobs are made."""
        if self.reason is not None:
            return self.n_last
        total = 0
        for share in self.shares:
            n = min(max(share.job.n_sealed - share.first, 0), share.n)
            total += n
            if n < share.n:
                break
        return total


@dataclass(slots=True, eq=False)
class Share:
    """The part of a waiter's chain that one job makes."""

    waiter: Waiter
    job: Job
    first: int
    """The share's first blob, in the job."""
    n: int
    offset: int
    """The same blob, in the waiter's chain."""

    @property
    def wanted(self) -> int:
        """How many leading blobs of the job it takes to satisfy the waiter here."""
        n = min(self.n, self.waiter.need - self.offset)
        return self.first + n if n > 0 else 0


@dataclass(slots=True, eq=False)
class Job:
    """Consecutive blobs of one namespace, root side first, made by one runner at a time."""

    job_id: int
    namespace_id: bytes
    keys: list[bytes]
    entries: list[TextEntry]
    after: tuple[Job, int] | None = None
    """A job, and which of its blobs the first one here continues."""
    dependants: set[Job] = field(default_factory=set)
    """Jobs that wait `after` this one."""
    shares: set[Share] = field(default_factory=set)
    n_sealed: int = 0
    base: int = 0
    """Blobs that were made before the current runner got the job: not part of what it is given."""
    told: int = 0
    """Leading blobs that are still meant to be made, as far as the runner knows."""
    n_kept: int = 0
    """Leading blobs that are made although whoever asked for them could not wait so long."""
    runner: Runner | None = None
    """At work on it; None while it is queued, and once it has ended."""
    tried: set[int] = field(default_factory=set)
    """Runners that failed."""
    remade: int = 0
    """How often it had to begin further up."""
    taken_s: float = 0.0
    silent_s: float = 0.0
    """How long nothing was heard of the runner, but for times when this process stood still."""
    limit_s: float = math.inf
    """When the runner is given up, whatever it says."""
    reason: str | None = None
    """None until it has ended; then "" or why."""

    @property
    def wanted(self) -> int:
        """How many of its leading blobs anybody still wants, or are made already."""
        wanted = max((share.wanted for share in self.shares), default=0)
        for job in self.dependants:
            assert job.after is not None
            wanted = max(wanted, job.after[1] + 1)
        return max(wanted, self.n_kept, self.n_sealed)

    @property
    def needed(self) -> bool:
        """Somebody wants more than is made."""
        return (
            self.n_kept > self.n_sealed
            or any(share.wanted > self.n_sealed for share in self.shares)
            or any(job.after[1] >= self.n_sealed for job in self.dependants if job.after)
        )

    @property
    def ready(self) -> bool:
        """What it continues is not still to be made."""
        return self.after is None or self.after[0].n_sealed > self.after[1]

    @property
    def urgency(self) -> tuple[int, float, int]:
        """Jobs with the least go first."""
        waiters = [share.waiter for share in self.shares]
        priority = max((waiter.priority for waiter in waiters), default=0)
        deadline_s = min((waiter.deadline_s for waiter in waiters), default=math.inf)
        return -priority, deadline_s, self.job_id

    @property
    def deadline_s(self) -> float:
        """When the last of those who wait gives up; far in the past if nobody waits."""
        return max((share.waiter.deadline_s for share in self.shares), default=-math.inf)

    @property
    def n_tokens(self) -> int:
        """Of all its blobs."""
        return sum(entry.n_tokens for entry in self.entries)

    def follow(self, above: Place | None) -> None:
        """Wait until the blob at `above`, which it continues, is made; for nothing if None."""
        if self.after is not None:
            self.after[0].dependants.discard(self)
        node = above[0] if above is not None else None
        while node is not None and node is not self:
            node = node.after[0] if node.after is not None else None
        if node is self:  # engines' own keys may name each other as parents
            above = None
        self.after = above
        if above is not None:
            above[0].dependants.add(self)


Place = tuple[Job, int]
"""A blob, as a job and its number there."""

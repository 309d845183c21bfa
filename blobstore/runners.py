"""Who computes blobs again from their tokens: registered model runners, and how they do.

A runner is believed to be there while it is heard of. One that failed is left alone for a
moment, and none is given jobs faster than at a steady pace: what piled up while it stood
still does not come over the store all at once. Used on the event loop only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from blobstore.backoff import Backoff
from blobstore.errors import Busy, InvalidRequest
from blobstore.tiering.budget import Budget

RUNNERS_MAX = 1024
NAMESPACES_MAX = 1024
"""Of one runner."""
CONCURRENCY_MAX = 256
JOBS_PER_S = 64.0
"""That one runner is given on average."""
BURST_JOBS = 16
"""That one runner may be given at once after a rest."""


@dataclass(slots=True, eq=False)
class Runner:
    """One registration: what it computes, and how many jobs at once."""

    runner_id: int
    name: str
    namespace_ids: frozenset[bytes]
    concurrency: int
    pace: Budget
    backoff: Backoff
    beats: bool
    """It says every second that it is at work; others are only heard of when they are done."""
    running: set[int] = field(default_factory=set)
    """Jobs that it was given and has not reported as ended, wanted or not."""
    silent: bool = False
    """It was given a job, and then nothing was heard of it for too long."""

    @property
    def able(self) -> bool:
        """It may be given jobs, if not now then in a moment."""
        return not (self.silent or self.backoff.active)


class Runners:
    """All registrations of the store."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._runners: dict[int, Runner] = {}
        self._next_id = 1

    def __len__(self) -> int:
        return len(self._runners)

    def __iter__(self) -> Iterator[Runner]:
        return iter(self._runners.values())

    def add(
        self, name: str, namespace_ids: Collection[bytes], concurrency: int, *, beats: bool = True
    ) -> Runner:
        """Register a runner. Raises InvalidRequest for numbers out of bounds, Busy if too many."""
        if not 0 < len(namespace_ids) <= NAMESPACES_MAX:
            raise InvalidRequest(
                f"a runner serves 1 to {NAMESPACES_MAX} namespaces, found {len(namespace_ids)}"
            )
        if not 0 < concurrency <= CONCURRENCY_MAX:
            raise InvalidRequest(
                f"concurrency is from 1 to {CONCURRENCY_MAX} jobs, found {concurrency}"
            )
        if len(self._runners) >= RUNNERS_MAX:
            raise Busy(f"{RUNNERS_MAX} runners are registered, the most there may be")
        runner = Runner(
            self._next_id, name, frozenset(namespace_ids), concurrency,
            Budget(JOBS_PER_S, BURST_JOBS), Backoff(self._clock), beats,
        )  # fmt: skip
        self._next_id += 1
        self._runners[runner.runner_id] = runner
        return runner

    def get(self, runner_id: int) -> Runner | None:
        """The runner registered under this id, unless its registration ended."""
        return self._runners.get(runner_id)

    def remove(self, runner: Runner) -> bool:
        """End a registration; whether it was there."""
        return self._runners.pop(runner.runner_id, None) is not None

    def serving(self, namespace_id: bytes, tried: Collection[int] = ()) -> Iterator[Runner]:
        """Runners that could be given a job of this namespace, but for those in `tried`."""
        for runner in self._runners.values():
            if namespace_id in runner.namespace_ids and runner.runner_id not in tried:
                yield runner

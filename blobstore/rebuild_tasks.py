"""Jobs as runners are told of them: put together when they are taken.

What a job continues is kept from then on until it has ended. If it has gone already, the job
is made to begin further up. Used on the event loop only; texts are read on threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blobstore.index import Index, NamespaceState, Record
from blobstore.rebuild_jobs import Job
from blobstore.rebuild_map import JOB_BLOBS_MAX
from blobstore.rebuild_queue import RebuildQueue
from blobstore.residency import Residency
from blobstore.runners import Runner
from blobstore.text_entry import TextEntry
from blobstore.texts import Texts

CONTEXT_BYTES_MAX = 5 << 20
"""Of keys and tokens before a job that its runner is told: more than a million tokens."""
JOB_TEXT_BYTES_MAX = 1 << 20
"""Of the caller's texts that a runner is told with a job."""


@dataclass(frozen=True, slots=True)
class Task:
    """A job as its runner is told of it."""

    job_id: int
    ns: NamespaceState
    keys: list[bytes]
    tokens: bytes
    """Ids of the whole run, u32 LE."""
    position: int
    context_keys: list[bytes]
    """All blobs before, root side first."""
    context: bytes
    """Their token ids; empty if some are not known."""
    text: str
    wanted: int
    deadline_s: float
    """Seconds left until nobody waits any longer, at least 0."""
    limit_s: float
    """Seconds after which the runner is given up."""
    priority: int


class Tasks:
    """Puts jobs together, and keeps what they continue."""

    def __init__(
        self,
        index: Index,
        residency: Residency,
        texts: Texts,
        queue: RebuildQueue,
        clock: Callable[[], float],
    ) -> None:
        self._index = index
        self._residency = residency
        self._texts = texts
        self._queue = queue
        self._clock = clock
        self._kept: dict[int, Record] = {}
        """What the jobs that run continue, by job."""

    async def put_together(self, job: Job, runner: Runner) -> Task | None:
        """What the runner is told; None if the job had to be given up, or begin further up."""
        try:
            ns = self._index.namespace(job.namespace_id)
            context_keys = self._context(ns, job)
            if context_keys is None:
                await self._begin_further_up(ns, job)
                return None
            entries = await self._texts.chain(ns, context_keys) if context_keys else []
            if job.runner is not runner:  # meanwhile
                return None
            return self._task(ns, job, context_keys, entries)
        except BaseException:
            if job.runner is runner:
                self._queue.put_back(job)
                self.let_go()
            raise

    def _context(self, ns: NamespaceState, job: Job) -> list[bytes] | None:
        """The keys of all that `job` continues, kept from now on; None if some is not held."""
        while True:
            parent_key = job.entries[job.base].parent
            if not parent_key:
                return []
            record = ns.blobs.get(parent_key)
            if record is not None and not _gap(record):
                self._residency.keep(record)
                self._kept[job.job_id] = record
                return [node.key for node in record.path()]
            if not job.base:
                return None
            job.base = 0  # what another runner had made is gone again

    async def _begin_further_up(self, ns: NamespaceState, job: Job) -> None:
        """What `job` continues is not held: have it made first, if its text is known."""
        runner, blobs = job.runner, ns.blobs
        above = await self._texts.ancestors(ns, job.entries[0].parent, JOB_BLOBS_MAX)
        if job.runner is not runner:  # meanwhile
            return
        n = next((n for n, (key, _) in enumerate(above) if key in blobs), len(above))
        if n < len(above):
            n += len(_gap(blobs[above[n][0]]))
        run = above[:n][::-1]
        top = blobs.get(run[0][1].parent) if run else None
        if not run or len(run) < n or (run[0][1].parent and (top is None or _gap(top))):
            self._queue.drop(job, "no_text")
        elif not self._queue.begin_further_up(
            job, [key for key, _ in run], [entry for _, entry in run]
        ):
            self._queue.drop(job, "nested")

    def _task(
        self,
        ns: NamespaceState,
        job: Job,
        context_keys: list[bytes],
        context: Sequence[TextEntry | None],
    ) -> Task:
        entries = job.entries[job.base :]
        known = [entry.tokens for entry in context if entry is not None]
        nbytes = sum(map(len, known)) + sum(map(len, context_keys))
        whole = len(known) == len(context_keys) and nbytes <= CONTEXT_BYTES_MAX
        text = "".join(entry.text for entry in entries)
        now_s = self._clock()
        return Task(
            job.job_id,
            ns,
            job.keys[job.base :],
            b"".join(entry.tokens for entry in entries),
            entries[0].position,
            context_keys,
            b"".join(known) if whole else b"",
            text if len(text.encode()) <= JOB_TEXT_BYTES_MAX else "",
            job.told - job.base,
            max(job.deadline_s - now_s, 0.0),
            job.limit_s - now_s,
            -job.urgency[0],
        )

    def let_go(self) -> None:
        """What jobs continued that run no more may go."""
        for job_id in list(self._kept):
            job = self._queue.get(job_id)
            if job is None or job.runner is None:
                self._residency.unkeep(self._kept.pop(job_id))


def _gap(record: Record) -> list[Record]:
    """The blobs from the first that is missing on the way to `record` down to it; [] if none."""
    path = record.path()
    start = next((n for n, node in enumerate(path) if not node.held), len(path))
    return path[start:]

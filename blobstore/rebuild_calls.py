"""What a model runner asks over one connection of the local socket: jobs, and to report on them.

Runners that registered over a connection end with it: jobs that they have not ended go to others.
"""

from __future__ import annotations

from blobstore import protocol as p
from blobstore.errors import InvalidRequest
from blobstore.keys import ID_BYTES
from blobstore.rebuild_tasks import Task
from blobstore.rebuilds import Rebuilds
from blobstore.runners import Runner


class RebuildCalls:
    """The calls of one connection. `close` ends what it registered."""

    def __init__(self, rebuilds: Rebuilds, name: str) -> None:
        self._rebuilds = rebuilds
        self._name = name
        self._runners: dict[int, Runner] = {}

    def serve(self, m: p.ServeRebuilds) -> p.Reply:
        """Register a runner."""
        runner = self._rebuilds.register(self._name, m.namespace_ids, m.concurrency)
        self._runners[runner.runner_id] = runner
        return p.Done(runner.runner_id)

    async def next(self, runner_id: int, timeout_s: float) -> p.Reply:
        """Wait for a job. Raises InvalidRequest for a runner of another connection."""
        runner = self._runners.get(runner_id)
        if runner is None:
            raise InvalidRequest(f"runner {runner_id} is not registered over this connection")
        task = await self._rebuilds.next(runner, timeout_s)
        return _told(task) if task is not None else p.Done()

    def untold(self, reply: p.Rebuild) -> None:
        """A job that `next` gave could not be told: another runner may have it."""
        self.ended(p.RebuildEnded(reply.job_id, "untold", 0, 0.0))

    def progress(self, m: p.RebuildProgress) -> p.Reply:
        """How many blobs of a job are still wanted; 0 if it is not this connection's any more."""
        runner = self._of_job(m.job_id)
        if runner is None:
            return p.Done()
        return p.Done(self._rebuilds.progress(runner, m.job_id, m.n_sealed))

    def ended(self, m: p.RebuildEnded) -> p.Reply:
        """A job is done, or failed."""
        runner = self._of_job(m.job_id)
        if runner is None:
            return p.Done()
        return p.Done(
            int(self._rebuilds.end(runner, m.job_id, m.n_sealed, m.reason, seconds=m.seconds))
        )

    def stop(self, m: p.StopRebuilds) -> p.Reply:
        """End a registration."""
        runner = self._runners.pop(m.runner_id, None)
        return p.Done(int(runner is not None and self._rebuilds.unregister(runner)))

    def close(self) -> None:
        """End all that this connection registered. Again is harmless."""
        while self._runners:
            self._rebuilds.unregister(self._runners.popitem()[1])

    def _of_job(self, job_id: int) -> Runner | None:
        return next((r for r in self._runners.values() if job_id in r.running), None)


def _told(task: Task) -> p.Rebuild:
    n_tokens = len(task.tokens) // ID_BYTES
    return p.Rebuild(
        task.job_id,
        task.ns.id,
        b"".join(task.keys),
        len(task.keys[0]),
        n_tokens % task.ns.namespace.tokens_per_blob,
        task.tokens,
        task.position,
        b"".join(task.context_keys),
        task.context,
        task.text,
        task.wanted,
        task.deadline_s,
        task.limit_s,
        task.priority,
    )

"""Serving rebuilds: a model runner takes jobs from the daemon, and computes blobs anew.

The runner has a connection of its own. It says every second that it is at work; the daemon
takes one of which it hears nothing for frozen. A daemon that restarts is registered with again.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import traceback
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, Self

from blobstore.clients.bound import BoundNamespace
from blobstore.clients.http_address import is_http
from blobstore.clients.lease import LeaseBase
from blobstore.clients.operations import declare
from blobstore.clients.rebuild_job import (
    AsyncRebuildJob,
    RebuildJob,
    RebuildJobBase,
    RebuildStopped,
)
from blobstore.clients.steps import Operation, ask
from blobstore.clients.ways import for_loop, for_threads
from blobstore.errors import BlobStoreError, DeadlineExceeded, InvalidRequest, Retryable, StaleBoot
from blobstore.protocol import (
    Done,
    NextRebuild,
    Rebuild,
    ServeRebuilds,
    StopRebuilds,
)

POLL_S = 5.0
BEAT_S = 1.0
RETRY_S = 0.25
"""Between tries to register with a daemon that cannot be reached, or refuses."""
PARENT_S = 60.0
"""How long what a job continues may take to be in DRAM."""
CALL_S = 5.0
CLOSE_S = 5.0
"""How long `close` waits for handlers that are at work."""

log = logging.getLogger("blobstore.clients")

Handler = Callable[[RebuildJob], None]
AsyncHandler = Callable[[AsyncRebuildJob], Awaitable[None]]


class _Serving:
    """What both kinds of server know: what they serve, and what they have done."""

    def __init__(
        self, address: str, namespaces: Sequence[BoundNamespace], concurrency: int
    ) -> None:
        if is_http(address):
            raise InvalidRequest(
                "a runner elsewhere registers a URL: POST /v1/namespaces/{ns}/rebuilders"
            )
        if not namespaces or concurrency < 1:
            raise InvalidRequest(
                f"a runner serves one or more namespaces, with a concurrency of 1 or more; found "
                f"{len(namespaces)} and {concurrency}"
            )
        for ns in namespaces:
            if len(ns.writes) < ns.layout.n_parts:
                raise InvalidRequest("a runner makes whole blobs: leave out the shard")
        self._namespaces = {ns.id: ns for ns in namespaces}
        self._concurrency = concurrency
        self._runner_id = 0
        """0 while it is not registered."""
        self._jobs: set[RebuildJobBase] = set()
        self._counts = {"jobs": 0, "failed": 0, "cancelled": 0, "blobs": 0, "tokens": 0}
        self._seconds = 0.0

    def stats(self) -> dict[str, Any]:
        """Jobs that were done, failed and cancelled; blobs, tokens and seconds of all."""
        return {**self._counts, "seconds": self._seconds, "running": len(self._jobs)}

    def _register(self, *, again: bool) -> Operation[int]:
        if again:  # the daemon may be another run, which has heard of none of them
            for ns in self._namespaces.values():
                yield from declare(ns)
        request = ServeRebuilds(list(self._namespaces), self._concurrency)
        self._runner_id = runner_id = (yield from ask(request, Done)).count
        return runner_id

    def _next(self, runner_id: int) -> Operation[Rebuild | None]:
        reply = yield NextRebuild(runner_id, POLL_S)
        return reply if isinstance(reply, Rebuild) else None

    def _stop(self, runner_id: int) -> Operation[None]:
        yield from ask(StopRebuilds(runner_id), Done)

    def _lost(self, runner_id: int, error: BlobStoreError) -> None:
        """Where the daemon is only slow it still knows this registration; it would have two."""
        if self._runner_id == runner_id and not isinstance(error, DeadlineExceeded):
            self._runner_id = 0

    def _done_with(self, job: RebuildJobBase, why: str, seconds: float) -> None:
        """Let go of all that the job holds, and count it."""
        self._jobs.discard(job)
        job._abort()
        if job.parent is not None:
            job.parent.release()
        self._counts["jobs"] += 1
        self._counts["blobs"] += job.n_sealed
        self._counts["tokens"] += sum(len(job.blob_tokens(i)) for i in range(job.n_sealed))
        self._seconds += seconds
        if why:
            wanted = why != "cancelled" and job.wanted > job.n_sealed
            self._counts["failed" if wanted else "cancelled"] += 1


class RebuildServer(_Serving):
    """Calls a handler for each job, from as many threads as jobs run at once, until `close`.

    Made by `Client.serve_rebuilds`. A handler that raises fails its job: what it sealed
    stays, the daemon may try another runner, and the next job comes.
    """

    def __init__(
        self,
        address: str,
        namespaces: Sequence[BoundNamespace],
        handler: Handler,
        concurrency: int,
    ) -> None:
        super().__init__(address, namespaces, concurrency)
        self._handler = handler
        self._way = for_threads(address, CALL_S, "", "")
        self._registering = threading.Lock()
        self._stopping = threading.Event()
        call = self._way.call(None)
        try:
            self._way.run(self._register(again=False), call)
        except BaseException:
            self._way.close()
            raise
        targets = [self._serve] * concurrency + [self._beat]
        self._threads = [
            threading.Thread(target=target, name="blobstore-rebuilds", daemon=True)
            for target in targets
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Take no more jobs. Those at work see that nothing of theirs is wanted any more."""
        self._stopping.set()
        for job in list(self._jobs):
            job.wanted = 0
        call = self._way.call(CALL_S)
        with suppress(BlobStoreError):
            self._way.run(self._stop(self._runner_id), call)
        deadline_s = monotonic() + CLOSE_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(deadline_s - monotonic(), 0.0))
        self._way.close()

    def _serve(self) -> None:
        while not self._stopping.is_set():
            runner_id = self._runner_id
            try:
                runner_id = runner_id or self._registered()
                call = self._way.call(POLL_S)
                told = self._way.run(self._next(runner_id), call)
            except BlobStoreError as error:
                self._lost(runner_id, error)
                log.debug("no jobs for now: %s", error)
                self._stopping.wait(RETRY_S)
                continue
            if told is not None:
                self._do(RebuildJob(self._way, self._namespaces, told))

    def _registered(self) -> int:
        with self._registering:
            if self._runner_id or self._stopping.is_set():
                return self._runner_id
            call = self._way.call(CALL_S)
            return self._way.run(self._register(again=True), call)

    def _do(self, job: RebuildJob) -> None:
        self._jobs.add(job)
        why, started_s = "failed", monotonic()
        try:
            if job.context_keys:
                call = self._way.call(PARENT_S)
                job.parent = self._way.run(job._get_parent(call, LeaseBase), call)
            started_s = monotonic()
            self._handler(job)
            call = self._way.call(PARENT_S)
            why = self._way.run(job._seal_rest(call), call)
        except Exception as error:
            why = _why(error)
        finally:
            self._end(job, why, monotonic() - started_s)

    def _end(self, job: RebuildJob, why: str, seconds: float) -> None:
        self._done_with(job, why, seconds)
        call = self._way.call(CALL_S)
        with suppress(BlobStoreError):  # then the daemon finds out by itself
            self._way.run(job._ended(why, seconds), call)

    def _beat(self) -> None:
        while not self._stopping.wait(BEAT_S):
            for job in list(self._jobs):
                call = self._way.call(CALL_S)
                with suppress(BlobStoreError):
                    self._way.run(job._report(), call)


class AsyncRebuildServer(_Serving):
    """RebuildServer for an event loop: a coroutine handler, called in as many tasks.

    Made by `AsyncClient.serve_rebuilds`, or started by `start`.
    """

    def __init__(
        self,
        address: str,
        namespaces: Sequence[BoundNamespace],
        handler: AsyncHandler,
        concurrency: int,
    ) -> None:
        super().__init__(address, namespaces, concurrency)
        self._handler = handler
        self._way = for_loop(address, CALL_S, "", "")
        self._stopping = asyncio.Event()
        self._registering = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> Self:
        """Register, or raise; then serve."""
        call = self._way.call(None)
        try:
            await self._way.run(self._register(again=False), call)
        except BaseException:
            self._way.close()
            raise
        serving = [self._serve() for _ in range(self._concurrency)]
        self._tasks = [asyncio.ensure_future(each) for each in (*serving, self._beat())]
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """As RebuildServer.close; handlers that are at work for too long are cancelled."""
        self._stopping.set()
        for job in self._jobs:
            job.wanted = 0
        call = self._way.call(CALL_S)
        with suppress(BlobStoreError):
            await self._way.run(self._stop(self._runner_id), call)
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=CLOSE_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        self._way.close()

    async def _serve(self) -> None:
        while not self._stopping.is_set():
            runner_id = self._runner_id
            try:
                runner_id = runner_id or await self._registered()
                call = self._way.call(POLL_S)
                told = await self._way.run(self._next(runner_id), call)
            except BlobStoreError as error:
                self._lost(runner_id, error)
                log.debug("no jobs for now: %s", error)
                await self._rest(RETRY_S)
                continue
            if told is not None:
                await self._do(
                    AsyncRebuildJob(self._way, self._namespaces, told, 4 * self._concurrency)
                )

    async def _registered(self) -> int:
        async with self._registering:
            if self._runner_id or self._stopping.is_set():
                return self._runner_id
            call = self._way.call(CALL_S)
            return await self._way.run(self._register(again=True), call)

    async def _do(self, job: AsyncRebuildJob) -> None:
        self._jobs.add(job)
        why, started_s = "failed", monotonic()
        try:
            if job.context_keys:
                call = self._way.call(PARENT_S)
                job.parent = await self._way.run(job._get_parent(call, LeaseBase), call)
            started_s = monotonic()
            await job._lend_ahead()
            await self._handler(job)
            call = self._way.call(PARENT_S)
            why = await self._way.run(job._seal_rest(call), call)
        except Exception as error:
            why = _why(error)
        finally:
            seconds = monotonic() - started_s
            self._done_with(job, why, seconds)
        call = self._way.call(CALL_S)
        with suppress(BlobStoreError):  # then the daemon finds out by itself
            await self._way.run(job._ended(why, seconds), call)

    async def _beat(self) -> None:
        while not self._stopping.is_set():
            await self._rest(BEAT_S)
            for job in list(self._jobs):
                call = self._way.call(CALL_S)
                with suppress(BlobStoreError):
                    await self._way.run(job._report(), call)

    async def _rest(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)


def _why(error: Exception) -> str:
    """Why a job ended early, which the log tells unless the daemon has had it stopped.

    In words, as the frames of a traceback hold views of blobs.
    """
    if isinstance(error, RebuildStopped):
        return error.why
    if isinstance(error, Retryable | StaleBoot):
        log.info("lost the daemon during a rebuild: %s", error)
    else:
        log.warning("a rebuild failed: %s", "".join(traceback.format_exception(error)))
    return "failed"

"""Model runners elsewhere: each job is posted to the URL that one registered.

The runner PUTs the blobs with `?job=`, root side first, and answers 200 when it is done. Its
registration ends by itself unless it is renewed. A job that fails there goes to another runner;
one that nobody wants any more is cut off, which the runner learns by its connection's end.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
from aiohttp import web
from yarl import URL

from blobstore.errors import Busy, InvalidRequest, SizeMismatch
from blobstore.http import bodies
from blobstore.http.answers import answer
from blobstore.http.callback_post import post_json
from blobstore.http.context import Context
from blobstore.http.tokens import Right
from blobstore.http.verbs import ROOT
from blobstore.index import NamespaceState
from blobstore.rebuild_tasks import Task
from blobstore.rebuilds import Rebuilds
from blobstore.runners import CONCURRENCY_MAX, Runner

CALLBACKS_MAX = 256
URL_CHARS_MAX = 2048
TTL_S_MIN, TTL_S_MAX = 60.0, 86_400.0
TTL_S = 600.0
POLL_S = 10.0
LOOK_S = 1.0
"""Between two looks whether what a runner is at work on is wanted yet."""

log = logging.getLogger(__name__)


class Callback(msgspec.Struct, forbid_unknown_fields=True):
    """Where jobs go for `ttl_s` seconds; 0 ends it. `blob_bytes` is what the runner makes."""

    url: Annotated[str, msgspec.Meta(max_length=URL_CHARS_MAX)]
    concurrency: Annotated[int, msgspec.Meta(ge=1, le=CONCURRENCY_MAX)] = 1
    ttl_s: float = TTL_S
    blob_bytes: int | None = None


@dataclass(slots=True, eq=False)
class _Registration:
    """A callback, and the tasks that wait for jobs and post them to it."""

    runner: Runner
    expires_s: float
    tasks: set[asyncio.Task[None]]


class Rebuilders:
    """The handler, and all that was registered by it."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._rebuilds: Rebuilds = context.store.rebuilds
        self._tls: ssl.SSLContext | None = None
        """Made for the first https:// URL: it reads the system's certificates."""
        self._registrations: dict[tuple[bytes, str], _Registration] = {}
        """By namespace and URL."""

    def routes(self) -> list[web.RouteDef]:
        """Where it is served."""
        return [web.post(ROOT + "/{namespace}/rebuilders", self.register)]

    async def register(self, request: web.Request) -> web.StreamResponse:
        """Register a URL, renew that, or end it."""
        context = self._context
        ns = context.namespace(request, Right.WRITE)
        asked = await bodies.read_json(request, Callback, context.io_timeout_s)
        url = _checked(asked, ns)
        name = (ns.id, url)
        known = self._registrations.get(name)
        if known is not None and (not asked.ttl_s or known.runner.concurrency != asked.concurrency):
            self._end(name)
            known = None
        if not asked.ttl_s:
            return answer({"runner": 0, "ttl_s": 0.0})
        expires_s = asyncio.get_running_loop().time() + asked.ttl_s
        if known is None:
            known = self._begin(ns, url, asked.concurrency, expires_s)
        known.expires_s = expires_s
        return answer({"runner": known.runner.runner_id, "ttl_s": asked.ttl_s})

    async def close(self) -> None:
        """End all registrations."""
        tasks = [task for known in self._registrations.values() for task in known.tasks]
        for name in list(self._registrations):
            self._end(name)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(
        self, ns: NamespaceState, url: str, concurrency: int, expires_s: float
    ) -> _Registration:
        if len(self._registrations) >= CALLBACKS_MAX:
            raise Busy(f"{CALLBACKS_MAX} callbacks are registered, the most there may be")
        runner = self._rebuilds.register(url[:80], [ns.id], concurrency, beats=False)
        known = _Registration(runner, expires_s, set())
        self._registrations[ns.id, url] = known
        self._start(known, self._serve((ns.id, url), known))
        return known

    def _start(self, known: _Registration, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        known.tasks.add(task)
        task.add_done_callback(known.tasks.discard)

    def _end(self, name: tuple[bytes, str]) -> None:
        known = self._registrations.pop(name)
        self._rebuilds.unregister(known.runner)
        for task in list(known.tasks):
            if task is not asyncio.current_task():
                task.cancel()

    async def _serve(self, name: tuple[bytes, str], known: _Registration) -> None:
        """Have jobs posted until the registration has expired."""
        loop = asyncio.get_running_loop()
        while self._registrations.get(name) is known:
            left_s = known.expires_s - loop.time()
            if left_s <= 0:
                self._end(name)
                return
            task = await self._rebuilds.next(known.runner, min(left_s, POLL_S))
            if task is not None:
                self._start(known, self._do(name[1], known.runner, task))

    async def _do(self, url: str, runner: Runner, task: Task) -> None:
        """See one job through, for as long as somebody wants it."""
        posting = asyncio.get_running_loop().create_task(self._post(URL(url), task))
        try:
            while not posting.done() and self._rebuilds.wants(runner, task.job_id):
                await asyncio.wait([posting], timeout=LOOK_S)
            why = posting.result() if posting.done() else "cancelled"
            n_sealed = 0 if why else len(task.keys)  # those that it has not put do not count
            self._rebuilds.end(runner, task.job_id, n_sealed, why, 0.0)
        finally:
            posting.cancel()
            await asyncio.gather(posting, return_exceptions=True)

    async def _post(self, url: URL, task: Task) -> str:
        """Have the runner do a job; "" or "failed"."""
        work = asyncio.get_running_loop().run_in_executor
        body = await work(self._context.pool, _as_json, task)
        if url.scheme == "https" and self._tls is None:
            self._tls = await work(self._context.pool, ssl.create_default_context)
        try:
            async with asyncio.timeout(task.limit_s):
                status = await post_json(url, body, self._tls if url.scheme == "https" else None)
        except (OSError, ValueError) as error:  # TimeoutError is an OSError
            # What it says may hold the URL as a whole, and what the runner sent.
            log.warning("a runner cannot be asked at %s: %s", _named(url), type(error).__name__)
            return "failed"
        if status != 200:
            log.warning("a runner answered %s with %d", _named(url), status)
            return "failed"
        return ""


def _checked(asked: Callback, ns: NamespaceState) -> str:
    """The URL. InvalidRequest, and SizeMismatch for a runner of another layout."""
    try:
        url = URL(asked.url)
    except ValueError as error:
        raise InvalidRequest(f"url is not one: {error}") from None
    if url.scheme not in ("http", "https") or not url.host or url.user or url.fragment:
        raise InvalidRequest("url is http:// or https://, with a host, without user or fragment")
    if asked.ttl_s and not TTL_S_MIN <= asked.ttl_s <= TTL_S_MAX:
        raise InvalidRequest(
            f"ttl_s is {TTL_S_MIN:.0f} to {TTL_S_MAX:.0f} seconds, or 0, found {asked.ttl_s}"
        )
    if asked.blob_bytes not in (None, ns.full_bytes):
        raise SizeMismatch(
            f"the runner makes blobs of {asked.blob_bytes} bytes, those of this namespace have "
            f"{ns.full_bytes}"
        )
    return str(url)


def _named(url: URL) -> str:
    """As far as a log should have it: a query may hold a secret."""
    return str(url.with_query(None))


def _as_json(task: Task) -> bytes:
    """What is posted (work)."""
    context = np.frombuffer(task.context, "<u4").tolist()
    return msgspec.json.encode(
        {
            "job": task.job_id,
            "namespace": task.ns.id.hex(),
            "keys": [key.hex() for key in task.keys],
            "parent": task.context_keys[-1].hex() if task.context_keys else None,
            "position": task.position,
            "token_ids": np.frombuffer(task.tokens, "<u4").tolist(),
            "context_keys": [key.hex() for key in task.context_keys],
            "context_token_ids": context if len(context) == task.position else None,
            "text": task.text,
            "wanted": task.wanted,
            "deadline_s": task.deadline_s,
            "limit_s": task.limit_s,
            "priority": task.priority,
        }
    )

"""One set of tests for both clients: AsyncClient, called as if it blocked.

Its loop runs only inside calls; what must happen in between is for the tests of
AsyncClient itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self

from blobstore.clients import AsyncClient, Client
from tests.support.daemon import Daemon
from tests.support.http_daemon import HttpDaemon

KINDS = ("threads", "loop")
HTTP_KINDS = tuple(f"{kind} over http" for kind in KINDS)
"""As `reach` knows them as well."""


class Blocking:
    """AsyncClient with the calls of Client."""

    def __init__(self, address: str, **options: Any) -> None:
        self._runner = asyncio.Runner()
        self._client = AsyncClient(address, **options)
        try:
            self._run(self._client.connect())
        except BaseException:
            self._runner.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def boot_id(self) -> int:
        return self._client.boot_id

    def close(self) -> None:
        self._run(self._client.close())
        self._runner.close()

    def get(self, *args: Any, **options: Any) -> _Lease:
        return _Lease(self._runner, self._run(self._client.get(*args, **options)))

    def put(self, *args: Any, **options: Any) -> AbstractContextManager[Any]:
        return _Writer(self._runner, self._run(self._client.put(*args, **options)))

    def session(self, *args: Any, **options: Any) -> _Session:
        return _Session(self._runner, self._client.session(*args, **options))

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        return lambda *args, **options: self._run(method(*args, **options))

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return _run(self._runner, coroutine)


class _Session:
    """AsyncClientSession with the calls of ClientSession."""

    def __init__(self, runner: asyncio.Runner, session: Any) -> None:
        self._runner = runner
        self._session = session

    def get(self, *args: Any, **options: Any) -> _Lease:
        return _Lease(self._runner, _run(self._runner, self._session.get(*args, **options)))

    def put(self, *args: Any, **options: Any) -> AbstractContextManager[Any]:
        return _Writer(self._runner, _run(self._runner, self._session.put(*args, **options)))

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._session, name)
        if name not in ("match", "get_into", "put_from", "finish_turn", "prefetch"):
            return found
        return lambda *args, **options: _run(self._runner, found(*args, **options))


class _Lease(Sequence[memoryview]):
    def __init__(self, runner: asyncio.Runner, lease: Any) -> None:
        self._runner = runner
        self._lease = lease

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        _run(self._runner, self._lease.__aexit__(*exc_info))

    def __len__(self) -> int:
        return len(self._lease)

    def __getitem__(self, index: Any) -> Any:
        return self._lease[index]

    def __iter__(self) -> Iterator[memoryview]:
        return iter(self._lease)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lease, name)

    def wait(self, *args: Any, **options: Any) -> bool:
        waited: bool = _run(self._runner, self._lease.wait(*args, **options))
        return waited


class _Writer:
    def __init__(self, runner: asyncio.Runner, writer: Any) -> None:
        self._runner = runner
        self._writer = writer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _run(self._runner, self._writer.__aexit__(kind, error, trace))

    def __getitem__(self, index: int) -> memoryview:
        view: memoryview = self._writer[index]
        return view

    def __len__(self) -> int:
        return len(self._writer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def seal(self, **kwargs: Any) -> None:
        _run(self._runner, self._writer.seal(**kwargs))

    def seal_parts(self, *args: Any) -> bool:
        sealed: bool = _run(self._runner, self._writer.seal_parts(*args))
        return sealed


def _run(runner: asyncio.Runner, coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The outcome. An exception leaves no reference cycle, as none does inside a loop."""

    async def run() -> tuple[Any, Exception | None]:
        try:
            return await coroutine, None
        except Exception as error:
            return None, error

    result, error = runner.run(run())
    try:
        if error is not None:
            raise error
        return result
    finally:
        del error


def connect(kind: str, address: str, **options: Any) -> Any:
    """A client of either kind."""
    return Client(address, **options) if kind == "threads" else Blocking(address, **options)


def reach(kind: str, run: Daemon, **options: Any) -> Any:
    """A client of either kind of a daemon, by its socket or by HTTP."""
    if kind in KINDS:
        return connect(kind, run.address, **options)
    door = HttpDaemon(run)
    return connect(kind.removesuffix(" over http"), door.url, token=door.token, **options)


def disconnect(kv: Any) -> None:
    """Close a client of either kind; later calls can still be made."""
    if isinstance(kv, Blocking):
        kv._run(kv._client.close())
    else:
        kv.close()

"""The client for event loops."""

from __future__ import annotations

from collections.abc import Coroutine, Generator, Sequence
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from blobstore.clients import operations
from blobstore.clients.bound import BoundNamespace
from blobstore.clients.client_session import AsyncClientSession
from blobstore.clients.hit import Hit
from blobstore.clients.lease import LeaseBase
from blobstore.clients.rebuilds import AsyncHandler, AsyncRebuildServer
from blobstore.clients.steps import Call
from blobstore.clients.sync import TIMEOUT_S
from blobstore.clients.ways import LoopWay, for_loop
from blobstore.clients.writer import WriterBase
from blobstore.clients.writing import PutTerms, checked_text, packed_tokens
from blobstore.hint import Hint
from blobstore.keys import Keys
from blobstore.layout import Shard
from blobstore.namespace import Namespace, WriterGroup
from blobstore.terms import Terms


class AsyncClient:
    """Client, with coroutines: `async with AsyncClient("unix:…") as kv` connects, or raises.

    So does `await kv.connect()`; without either, the first call connects, and misses if
    it cannot. What Client promises holds here too. Belongs to one running loop at a time;
    in another loop it connects anew. A cancelled call gives back what it was lent.
    """

    def __init__(
        self, address: str, *, timeout_s: float = TIMEOUT_S, token: str = "", ca_file: str = ""
    ) -> None:
        self._address = address
        self._runner = for_loop(address, timeout_s, token, ca_file)

    async def connect(self) -> Self:
        """Connect now, or raise Unavailable."""
        await self._runner.connect()
        return self

    async def __aenter__(self) -> Self:
        return await self.connect()

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Disconnect; later calls miss. Views of leased bytes stay valid until they die."""
        self._runner.close()

    @property
    def boot_id(self) -> int:
        """Tells one run of the daemon from the next; 0 before the first call."""
        return self._runner.boot_id

    async def namespace(
        self, namespace: Namespace, shard: Shard | None = None, *, terms: Terms | None = None
    ) -> BoundNamespace:
        """As Client.namespace."""
        ns = BoundNamespace(namespace, shard, terms or Terms())
        await self._runner.run(operations.declare(ns), self._runner.call(None))
        return ns

    def session(self, session: str, *, kind: str = "", turn: int = 0) -> AsyncClientSession:
        """As Client.session."""
        return AsyncClientSession(self, session, kind, turn)

    async def ping(self, *, timeout_s: float | None = None) -> bool:
        """As Client.ping."""
        return await self._runner.run(operations.ping(), self._runner.call(timeout_s))

    async def match(
        self,
        ns: BoundNamespace,
        keys: Sequence[bytes],
        *,
        hint: Hint | None = None,
        timeout_s: float | None = None,
    ) -> Hit:
        """As Client.match."""
        operation = operations.match(ns, Keys.of(keys), hint)
        return await self._runner.run(operation, self._runner.call(timeout_s))

    def get(
        self,
        ns: BoundNamespace,
        keys: Sequence[bytes],
        *,
        hint: Hint | None = None,
        timeout_s: float | None = None,
        stream: bool = False,
        wait: bool = False,
    ) -> Opening[AsyncLease]:
        """As Client.get: `async with kv.get(…) as lease`, or `lease = await kv.get(…)`."""
        call = self._runner.call(timeout_s)
        operation = self._runner.reading.get(
            call, AsyncLease, ns, Keys.of(keys), stream=stream, wait=wait, hint=hint
        )

        async def lease() -> AsyncLease:
            got = await self._runner.run(operation, call)
            got._runner = self._runner
            return got

        return Opening(lease())

    async def get_into(
        self,
        ns: BoundNamespace,
        keys: Sequence[bytes],
        buffers: object,
        *,
        hint: Hint | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """As Client.get_into; copies in a thread, which a cancelled call waits for."""
        call = self._runner.call(timeout_s)
        await self._runner.prepare(call)
        operation = self._runner.reading.get_into(
            call, ns, Keys.of(keys), buffers, self._runner.lent_bytes_max, hint
        )
        return await self._runner.run(operation, call)

    def put(
        self,
        ns: BoundNamespace,
        keys: Sequence[bytes],
        *,
        token_ids: object = None,
        text: str = "",
        parent: bytes | None = None,
        retention: str = "standard",
        hint: Hint | None = None,
        group: WriterGroup | None = None,
        timeout_s: float | None = None,
    ) -> Opening[AsyncWriter]:
        """As Client.put: `async with kv.put(…) as writer`."""
        call = self._runner.call(timeout_s)
        keys = Keys.of(keys)
        tokens = packed_tokens(ns, keys, token_ids)
        terms = PutTerms(parent, retention, hint, group, tokens, checked_text(text))
        operation = self._runner.writing.reserve(call, AsyncWriter, ns, keys, terms)

        async def writer() -> AsyncWriter:
            made = await self._runner.run(operation, call)
            made._runner, made._timeout_s = self._runner, timeout_s
            return made

        return Opening(writer())

    async def put_from(
        self,
        ns: BoundNamespace,
        keys: Sequence[bytes],
        buffers: object,
        *,
        token_ids: object = None,
        text: str = "",
        parent: bytes | None = None,
        retention: str = "standard",
        hint: Hint | None = None,
        group: WriterGroup | None = None,
        timeout_s: float | None = None,
    ) -> list[str]:
        """As Client.put_from; copies in a thread, which a cancelled call waits for."""
        call = self._runner.call(timeout_s)
        keys = Keys.of(keys)
        tokens = packed_tokens(ns, keys, token_ids)
        terms = PutTerms(parent, retention, hint, group, tokens, checked_text(text))
        await self._runner.prepare(call)
        operation = self._runner.writing.put_from(
            call, ns, keys, buffers, terms, self._runner.lent_bytes_max
        )
        return await self._runner.run(operation, call)

    async def exists(
        self, ns: BoundNamespace, keys: Sequence[bytes], *, timeout_s: float | None = None
    ) -> list[bool]:
        """As Client.exists."""
        operation = operations.exists(ns, Keys.of(keys))
        return await self._runner.run(operation, self._runner.call(timeout_s))

    async def drop(
        self,
        ns: BoundNamespace,
        keys: Sequence[bytes],
        tier: str = "",
        *,
        timeout_s: float | None = None,
    ) -> int:
        """As Client.drop."""
        operation = operations.drop(ns, Keys.of(keys), tier)
        return await self._runner.run(operation, self._runner.call(timeout_s))

    async def forget(
        self, ns: BoundNamespace, keys: Sequence[bytes], *, timeout_s: float | None = None
    ) -> int:
        """As Client.forget."""
        operation = operations.forget(ns, Keys.of(keys))
        return await self._runner.run(operation, self._runner.call(timeout_s))

    async def pin(
        self,
        ns: BoundNamespace,
        keys: Sequence[bytes],
        ttl_s: float,
        *,
        timeout_s: float | None = None,
    ) -> int:
        """As Client.pin."""
        operation = operations.pin(ns, Keys.of(keys), ttl_s)
        return await self._runner.run(operation, self._runner.call(timeout_s))

    async def prefetch(
        self,
        ns: BoundNamespace | None = None,
        keys: Sequence[bytes] | None = None,
        tier: str = "dram",
        *,
        session: str = "",
        timeout_s: float | None = None,
    ) -> int:
        """As Client.prefetch."""
        chain = Keys.of(keys) if keys is not None else None
        operation = operations.prefetch(ns, chain, tier, session)
        return await self._runner.run(operation, self._runner.call(timeout_s))

    async def supersede(
        self,
        ns: BoundNamespace,
        old_leaf: bytes,
        new_leaf: bytes,
        *,
        timeout_s: float | None = None,
    ) -> int:
        """As Client.supersede."""
        operation = operations.supersede(ns, old_leaf, new_leaf)
        return await self._runner.run(operation, self._runner.call(timeout_s))

    async def serve_rebuilds(
        self, namespaces: Sequence[BoundNamespace], handler: AsyncHandler, *, concurrency: int = 1
    ) -> AsyncRebuildServer:
        """As Client.serve_rebuilds; `handler` is a coroutine function, called in tasks."""
        return await AsyncRebuildServer(self._address, namespaces, handler, concurrency).start()

    async def stat(
        self, ns: BoundNamespace, keys: Sequence[bytes], *, timeout_s: float | None = None
    ) -> list[dict[str, Any]]:
        """As Client.stat."""
        operation = operations.stat(ns, Keys.of(keys))
        return await self._runner.run(operation, self._runner.call(timeout_s))

    async def explain(
        self, ns: BoundNamespace, keys: Sequence[bytes], *, timeout_s: float | None = None
    ) -> list[dict[str, Any]]:
        """As Client.explain."""
        operation = operations.explain(ns, Keys.of(keys))
        return await self._runner.run(operation, self._runner.call(timeout_s))

    async def stats(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """As Client.stats."""
        return await self._runner.run(operations.stats(), self._runner.call(timeout_s))

    async def verify(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """As Client.verify."""
        call = self._runner.call(timeout_s)
        return await self._runner.run(operations.verify(call), call)


class AsyncLease(LeaseBase):
    """Leased blobs; see LeaseBase."""

    __slots__ = ("_runner",)

    _runner: LoopWay

    async def wait(
        self, index: int, part: int | None = None, *, timeout_s: float | None = None
    ) -> bool:
        """As Lease.wait."""
        call = self._runner.call(timeout_s)
        call.link = self._link
        return await self._runner.run(self._wait(call, index, part), call)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.release()


class AsyncWriter(WriterBase):
    """Blobs being written; see WriterBase."""

    _runner: LoopWay
    _timeout_s: float | None

    async def seal(self, *, timeout_s: float | None = None) -> None:
        """As Writer.seal."""
        await self._runner.run(self._seal(), self._call(timeout_s))

    async def seal_parts(self, index: int, parts: Sequence[int]) -> bool:
        """As Writer.seal_parts."""
        return await self._runner.run(self._seal_parts(index, parts), self._call())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        if kind is None:
            await self.seal()
        else:
            self.abort()

    def _call(self, timeout_s: float | None = None) -> Call:
        call = self._runner.call(self._timeout_s if timeout_s is None else timeout_s)
        call.link = self._link
        return call


class _Held(Protocol):
    async def __aenter__(self) -> Any: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


H = TypeVar("H", bound=_Held)


class Opening(Coroutine[Any, Any, H]):
    """A coroutine for something that is left again: awaited, or entered by `async with`."""

    def __init__(self, coroutine: Coroutine[Any, Any, H]) -> None:
        self._coroutine = coroutine
        self._held: H | None = None

    def send(self, value: Any) -> Any:
        """As of a coroutine."""
        return self._coroutine.send(value)

    def throw(self, *args: Any) -> Any:
        """As of a coroutine."""
        return self._coroutine.throw(*args)

    def close(self) -> None:
        """As of a coroutine."""
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, H]:
        return self._coroutine.__await__()

    async def __aenter__(self) -> H:
        self._held = await self._coroutine
        entered: H = await self._held.__aenter__()
        return entered

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._held is not None
        held, self._held = self._held, None
        await held.__aexit__(kind, error, trace)

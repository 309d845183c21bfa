"""One conversation, or one run of an agent: its calls, with the hints filled in.

The daemon learns from hints when a context will be needed again, so whoever knows which
session a request is for should say so. Nothing else changes.
"""

from __future__ import annotations

import threading
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from blobstore.errors import InvalidRequest
from blobstore.hint import Hint

if TYPE_CHECKING:
    from blobstore.clients.aio import AsyncClient, AsyncLease, AsyncWriter, Opening
    from blobstore.clients.bound import BoundNamespace
    from blobstore.clients.hit import Hit
    from blobstore.clients.sync import Client, Lease, Writer
    from blobstore.namespace import WriterGroup


class Turns:
    """Names a session and counts its turns: one ends with what is put, the next begins by reading.

    `turn` is the number of the first one. Threads may share it.
    """

    def __init__(self, session: str, kind: str = "", turn: int = 0) -> None:
        if not session:
            raise InvalidRequest("a session needs a name")
        self._hint = Hint(session=session, turn=turn, kind=kind)
        self._has_put = False
        self._lock = threading.Lock()

    @property
    def session(self) -> str:
        """Its name."""
        return self._hint.session

    @property
    def turn(self) -> int:
        """The number of the turn that calls belong to now."""
        assert self._hint.turn is not None
        return self._hint.turn

    def next_turn(self) -> None:
        """Calls from now on belong to another turn: for turns that put nothing."""
        with self._lock:
            self._advance()

    def _ending(self, finish: str) -> Hint:
        """The hint of a call that ends the turn."""
        with self._lock:
            self._has_put = True
            return Hint(finish=finish).over(self._hint)

    def _advance(self) -> None:
        self._hint = Hint(turn=self.turn + 1).over(self._hint)
        self._has_put = False

    def _reading(self, hint: Hint | None) -> Hint:
        """The hint of a call that reads."""
        with self._lock:
            if self._has_put:
                self._advance()
            return self._filled(hint)

    def _putting(self, hint: Hint | None) -> Hint:
        """The hint of a call that puts."""
        with self._lock:
            self._has_put = True
            return self._filled(hint)

    def _filled(self, hint: Hint | None) -> Hint:
        if hint is None:
            return self._hint
        if hint.session not in ("", self.session):
            raise InvalidRequest(
                f"this is session {self.session!r}, the hint says {hint.session!r}"
            )
        return hint.over(self._hint)


class ClientSession(Turns):
    """A session's calls by a `Client`; made by `Client.session`.

    Its verbs are the client's that take a hint, and fill it in: what `hint` sets of it, such as
    the reason why the model stopped, goes before.
    """

    def __init__(self, client: Client, session: str, kind: str = "", turn: int = 0) -> None:
        super().__init__(session, kind, turn)
        self._client = client

    def match(
        self,
        ns: BoundNamespace,
        keys: Sequence[bytes],
        *,
        hint: Hint | None = None,
        timeout_s: float | None = None,
    ) -> Hit:
        """As Client.match."""
        return self._client.match(ns, keys, hint=self._reading(hint), timeout_s=timeout_s)

    def get(
        self,
        ns: BoundNamespace,
        keys: Sequence[bytes],
        *,
        hint: Hint | None = None,
        timeout_s: float | None = None,
        stream: bool = False,
        wait: bool = False,
    ) -> Lease:
        """As Client.get."""
        return self._client.get(
            ns, keys, hint=self._reading(hint), timeout_s=timeout_s, stream=stream, wait=wait
        )

    def get_into(
        self,
        ns: BoundNamespace,
        keys: Sequence[bytes],
        buffers: object,
        *,
        hint: Hint | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """As Client.get_into."""
        return self._client.get_into(
            ns, keys, buffers, hint=self._reading(hint), timeout_s=timeout_s
        )

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
    ) -> Writer:
        """As Client.put."""
        return self._client.put(
            ns, keys, token_ids=token_ids, text=text, parent=parent, retention=retention,
            hint=self._putting(hint), group=group, timeout_s=timeout_s,
        )  # fmt: skip

    def put_from(
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
        """As Client.put_from."""
        return self._client.put_from(
            ns, keys, buffers, token_ids=token_ids, text=text, parent=parent, retention=retention,
            hint=self._putting(hint), group=group, timeout_s=timeout_s,
        )  # fmt: skip

    def prefetch(self, *, timeout_s: float | None = None) -> int:
        """Start to bring the context that it used last into DRAM, ahead of its next turn.

        How many blobs are on their way.
        """
        return self._client.prefetch(session=self.session, timeout_s=timeout_s)

    def finish_turn(
        self,
        ns: BoundNamespace,
        keys: Sequence[bytes],
        finish: str,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """The model stopped, `finish` says why, and no put will: too little is new for a blob.

        `keys` are those of the context. The next call that reads begins a turn.
        """
        self._client.match(ns, keys, hint=self._ending(finish), timeout_s=timeout_s)


class AsyncClientSession(Turns):
    """As ClientSession, of an `AsyncClient`."""

    def __init__(self, client: AsyncClient, session: str, kind: str = "", turn: int = 0) -> None:
        super().__init__(session, kind, turn)
        self._client = client

    def match(
        self,
        ns: BoundNamespace,
        keys: Sequence[bytes],
        *,
        hint: Hint | None = None,
        timeout_s: float | None = None,
    ) -> Coroutine[Any, Any, Hit]:
        """As AsyncClient.match."""
        return self._client.match(ns, keys, hint=self._reading(hint), timeout_s=timeout_s)

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
        """As AsyncClient.get."""
        return self._client.get(
            ns, keys, hint=self._reading(hint), timeout_s=timeout_s, stream=stream, wait=wait
        )

    def get_into(
        self,
        ns: BoundNamespace,
        keys: Sequence[bytes],
        buffers: object,
        *,
        hint: Hint | None = None,
        timeout_s: float | None = None,
    ) -> Coroutine[Any, Any, int]:
        """As AsyncClient.get_into."""
        return self._client.get_into(
            ns, keys, buffers, hint=self._reading(hint), timeout_s=timeout_s
        )

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
        """As AsyncClient.put."""
        return self._client.put(
            ns, keys, token_ids=token_ids, text=text, parent=parent, retention=retention,
            hint=self._putting(hint), group=group, timeout_s=timeout_s,
        )  # fmt: skip

    def put_from(
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
    ) -> Coroutine[Any, Any, list[str]]:
        """As AsyncClient.put_from."""
        return self._client.put_from(
            ns, keys, buffers, token_ids=token_ids, text=text, parent=parent, retention=retention,
            hint=self._putting(hint), group=group, timeout_s=timeout_s,
        )  # fmt: skip

    async def prefetch(self, *, timeout_s: float | None = None) -> int:
        """As ClientSession.prefetch."""
        return await self._client.prefetch(session=self.session, timeout_s=timeout_s)

    async def finish_turn(
        self,
        ns: BoundNamespace,
        keys: Sequence[bytes],
        finish: str,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """As ClientSession.finish_turn."""
        await self._client.match(ns, keys, hint=self._ending(finish), timeout_s=timeout_s)

"""The client for threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from blobstore.clients import operations
from blobstore.clients.bound import BoundNamespace
from blobstore.clients.client_session import ClientSession
from blobstore.clients.hit import Hit
from blobstore.clients.lease import LeaseBase
from blobstore.clients.rebuilds import Handler, RebuildServer
from blobstore.clients.steps import Call
from blobstore.clients.ways import ThreadsWay, for_threads
from blobstore.clients.writer import WriterBase
from blobstore.clients.writing import PutTerms, checked_text, packed_tokens
from blobstore.hint import Hint
from blobstore.keys import Keys
from blobstore.layout import Shard
from blobstore.namespace import Namespace, WriterGroup
from blobstore.terms import Terms

TIMEOUT_S = 5.0


class Client:
    """A connection to a daemon, shared by all threads of this process.

    `unix:PATH` is the daemon on this machine, whose memory is read and written in place.
    `http://HOST:PORT` and `https://HOST:PORT` are any machine's: they take the daemon's
    `token` (and `ca_file`, if the system does not know who vouches for it), and copies
    travel. Outcomes are the same, but for leases, which hold copies, writers, which
    send when they are sealed, and ranks, which fill blobs together only in place.

    Connects now, or raises Unavailable. Later a fault of any kind (a deadline, a daemon
    that died or restarted, a full or failing tier) is a miss with a reason, never an
    exception: recompute and go on. A restarted daemon is found again by the same client.
    Raised are the caller's own mistakes (InvalidRequest) and durable puts that fail.

    Every call takes `timeout_s`, by default the client's: how long the daemon may take, its
    answer a moment more; 0 asks for what can be had at once. Some take a `hint` of what they
    are for: it changes nothing that a call returns, and helps the daemon to keep what will be
    needed; `session` fills it in. In a forked child the client connects anew; leases and
    writers of the parent raise WrongProcess there.
    """

    def __init__(
        self, address: str, *, timeout_s: float = TIMEOUT_S, token: str = "", ca_file: str = ""
    ) -> None:
        self._address = address
        self._runner = for_threads(address, timeout_s, token, ca_file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect; later calls miss. Views of leased bytes stay valid until they die."""
        self._runner.close()

    @property
    def boot_id(self) -> int:
        """Tells one run of the daemon from the next."""
        return self._runner.boot_id

    def namespace(
        self, namespace: Namespace, shard: Shard | None = None, *, terms: Terms | None = None
    ) -> BoundNamespace:
        """What all calls name: a namespace, and optionally this rank's share of its blobs.

        It is declared to this daemon, and to each later one that does not know it. `terms`
        change what is kept of its tokens and how its blobs come back; they hold for all who
        use it, until others are told.
        """
        ns = BoundNamespace(namespace, shard, terms or Terms())
        self._runner.run(operations.declare(ns), self._runner.call(None))
        return ns

    def session(self, session: str, *, kind: str = "", turn: int = 0) -> ClientSession:
        """Calls for one conversation or run, which the daemon is told of by hints.

        Keep it for as long as that lasts: it counts turns, from `turn` on. `kind` is of its
        requests, such as "main" or "subagent".
        """
        return ClientSession(self, session, kind, turn)

    def ping(self, *, timeout_s: float | None = None) -> bool:
        """Whether the daemon answers."""
        return self._runner.run(operations.ping(), self._runner.call(timeout_s))

    def match(
        self,
        ns: BoundNamespace,
        keys: Sequence[bytes],
        *,
        hint: Hint | None = None,
        timeout_s: float | None = None,
    ) -> Hit:
        """How many leading blobs are held. Does not keep them, and never counts as use."""
        operation = operations.match(ns, Keys.of(keys), hint)
        return self._runner.run(operation, self._runner.call(timeout_s))

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
        """Lease the leading blobs that are held, to be read in place: `with kv.get(…) as lease`.

        Waits until they are in DRAM. With `stream` it returns once room for them is
        reserved, and `lease.wait` tells when bytes are there. With `wait`, blobs that
        are being written count as held: best together with `stream`.
        """
        call = self._runner.call(timeout_s)
        operation = self._runner.reading.get(
            call, Lease, ns, Keys.of(keys), stream=stream, wait=wait, hint=hint
        )
        lease = self._runner.run(operation, call)
        lease._runner = self._runner
        return lease

    def get_into(
        self,
        ns: BoundNamespace,
        keys: Sequence[bytes],
        buffers: object,
        *,
        hint: Hint | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Copy leading blobs into `buffers`; how many are there. Later buffers are undefined.

        `buffers` are a list of one per key, or one for all; each anything with the buffer
        protocol, `__cuda_array_interface__` or DLPack, contiguous. With a shard they take
        the rank's parts. The chain may exceed the arena.
        """
        call = self._runner.call(timeout_s)
        operation = self._runner.reading.get_into(
            call, ns, Keys.of(keys), buffers, self._runner.lent_bytes_max, hint
        )
        return self._runner.run(operation, call)

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
        """Write new blobs in place: `with kv.put(…) as writer: writer[i][:] = …`.

        They are sealed when the block ends, and stored by then; nothing is if it raises.
        `parent` is the key that the first one continues (None: it is a root).
        `retention` is "volatile", "standard" or "durable": on SSD by the end of the
        block, or the block raises. Ranks that fill blobs together name their `group`.
        `token_ids` of the blobs are kept as the namespace's terms say, so that a model runner
        can make them again; `text`, up to 1 MiB, is kept with the first of them where these
        are "text". Waits for room until the deadline.
        """
        call = self._runner.call(timeout_s)
        keys = Keys.of(keys)
        tokens = packed_tokens(ns, keys, token_ids)
        terms = PutTerms(parent, retention, hint, group, tokens, checked_text(text))
        operation = self._runner.writing.reserve(call, Writer, ns, keys, terms)
        writer = self._runner.run(operation, call)
        writer._runner, writer._timeout_s = self._runner, timeout_s
        return writer

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
        """Copy `buffers` into new blobs; what became of each, as in `writer.results`.

        Arguments as of `get_into` and `put`. The chain may exceed the arena. From the
        first blob that is refused, all are.
        """
        call = self._runner.call(timeout_s)
        keys = Keys.of(keys)
        tokens = packed_tokens(ns, keys, token_ids)
        terms = PutTerms(parent, retention, hint, group, tokens, checked_text(text))
        operation = self._runner.writing.put_from(
            call, ns, keys, buffers, terms, self._runner.lent_bytes_max
        )
        return self._runner.run(operation, call)

    def exists(
        self, ns: BoundNamespace, keys: Sequence[bytes], *, timeout_s: float | None = None
    ) -> list[bool]:
        """Which keys are held, each for itself. Never counts as use."""
        operation = operations.exists(ns, Keys.of(keys))
        return self._runner.run(operation, self._runner.call(timeout_s))

    def drop(
        self,
        ns: BoundNamespace,
        keys: Sequence[bytes],
        tier: str = "",
        *,
        timeout_s: float | None = None,
    ) -> int:
        """Free blobs and all that continue them, those under a lease when it ends; how many.

        With `tier` "dram", only copies in DRAM of blobs that are on SSD as well; others begin to
        be written there.
        """
        operation = operations.drop(ns, Keys.of(keys), tier)
        return self._runner.run(operation, self._runner.call(timeout_s))

    def forget(
        self, ns: BoundNamespace, keys: Sequence[bytes], *, timeout_s: float | None = None
    ) -> int:
        """As `drop`, and erase what is known of their tokens, and of all that continue them.

        How many blobs had bytes or a text. Other than a drop it raises what kept it from being
        done: until it returns, something may be left.
        """
        operation = operations.forget(ns, Keys.of(keys))
        return self._runner.run(operation, self._runner.call(timeout_s))

    def pin(
        self,
        ns: BoundNamespace,
        keys: Sequence[bytes],
        ttl_s: float,
        *,
        timeout_s: float | None = None,
    ) -> int:
        """Keep blobs that are held from eviction for `ttl_s` seconds (0: no longer); how many."""
        operation = operations.pin(ns, Keys.of(keys), ttl_s)
        return self._runner.run(operation, self._runner.call(timeout_s))

    def prefetch(
        self,
        ns: BoundNamespace | None = None,
        keys: Sequence[bytes] | None = None,
        tier: str = "dram",
        *,
        session: str = "",
        timeout_s: float | None = None,
    ) -> int:
        """Start to bring leading blobs into DRAM; how many are on their way.

        Or those of the context that a `session` used last, as hints have named it: `ns` and
        `keys` are left out then.
        """
        chain = Keys.of(keys) if keys is not None else None
        operation = operations.prefetch(ns, chain, tier, session)
        return self._runner.run(operation, self._runner.call(timeout_s))

    def supersede(
        self,
        ns: BoundNamespace,
        old_leaf: bytes,
        new_leaf: bytes,
        *,
        timeout_s: float | None = None,
    ) -> int:
        """The context that ends at `old_leaf` goes on as the one that ends at `new_leaf`.

        After a compaction: both keys are of the last blob, and both contexts are stored. What
        only the old one has leaves DRAM and SSD before anything else, after a grace period and
        when room is needed; what others share with it stays. How many blobs that is. A get, a
        prefetch or a put that goes on from there takes it back for the blobs that it is about,
        and so does superseding the new context by the old one.
        """
        operation = operations.supersede(ns, old_leaf, new_leaf)
        return self._runner.run(operation, self._runner.call(timeout_s))

    def serve_rebuilds(
        self, namespaces: Sequence[BoundNamespace], handler: Handler, *, concurrency: int = 1
    ) -> RebuildServer:
        """Be the model runner of `namespaces`: compute blobs anew when they are wanted.

        `handler` is called with each RebuildJob in a thread, `concurrency` at once, until the
        server that this returns is closed. It has a connection of its own, and outlives this
        client. Raises InvalidRequest (a namespace that nobody declared, an HTTP address) and
        Unavailable.
        """
        return RebuildServer(self._address, namespaces, handler, concurrency)

    def stat(
        self, ns: BoundNamespace, keys: Sequence[bytes], *, timeout_s: float | None = None
    ) -> list[dict[str, Any]]:
        """Facts about each blob, {} where nothing is known; [] after a fault."""
        operation = operations.stat(ns, Keys.of(keys))
        return self._runner.run(operation, self._runner.call(timeout_s))

    def explain(
        self, ns: BoundNamespace, keys: Sequence[bytes], *, timeout_s: float | None = None
    ) -> list[dict[str, Any]]:
        """Why each blob is where it is, {} where nothing is known; [] after a fault."""
        operation = operations.explain(ns, Keys.of(keys))
        return self._runner.run(operation, self._runner.call(timeout_s))

    def stats(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """The daemon's counters and gauges; after a fault only a "reason"."""
        return self._runner.run(operations.stats(), self._runner.call(timeout_s))

    def verify(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Let the daemon read every blob and check its digests; after a fault only a "reason"."""
        call = self._runner.call(timeout_s)
        return self._runner.run(operations.verify(call), call)


class Lease(LeaseBase):
    """Leased blobs; see LeaseBase."""

    __slots__ = ("_runner",)

    _runner: ThreadsWay

    def wait(self, index: int, part: int | None = None, *, timeout_s: float | None = None) -> bool:
        """Wait until part `part` of `parts(index)`, or all of them, may be read; whether so.

        If not, `reason` says why.
        """
        call = self._runner.call(timeout_s)
        call.link = self._link
        return self._runner.run(self._wait(call, index, part), call)


class Writer(WriterBase):
    """Blobs being written; see WriterBase."""

    _runner: ThreadsWay
    _timeout_s: float | None

    def seal(self, *, timeout_s: float | None = None) -> None:
        """End the writing: `results` are final. Raises if a durable blob is refused.

        `timeout_s` is that of the put, unless it is given.
        """
        self._runner.run(self._seal(), self._call(timeout_s))

    def seal_parts(self, index: int, parts: Sequence[int]) -> bool:
        """Let waiting readers have these of `parts(index)`, which are written; whether so."""
        return self._runner.run(self._seal_parts(index, parts), self._call())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        if kind is None:
            self.seal()
        else:
            self.abort()

    def _call(self, timeout_s: float | None = None) -> Call:
        call = self._runner.call(self._timeout_s if timeout_s is None else timeout_s)
        call.link = self._link
        return call

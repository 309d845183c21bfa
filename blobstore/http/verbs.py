"""All that is not one blob: namespaces, batches of keys, facts, health."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
from aiohttp import web

from blobstore.errors import InvalidRequest
from blobstore.hint import MAX_TEXT_BYTES, Hint
from blobstore.http import bodies
from blobstore.http.answers import Refusal, answer, answer_list, encoded
from blobstore.http.context import Context, bounded, hex_bytes, require, unpacked, whole_of
from blobstore.http.tokens import Right, Token
from blobstore.index import NamespaceState
from blobstore.keys import KEY_BYTES_MAX
from blobstore.layout import KVLayout
from blobstore.namespace import HASH_SCHEME, Namespace
from blobstore.protocol import KEYS_MAX
from blobstore.terms import Terms

ROOT = "/v1/namespaces"
PIN_MAX_S = 30 * 86400.0
PAGE_MAX = 1000
NAMESPACE_BYTES_MAX = 1 << 20
AT_ONCE = 1000
"""Blobs or namespaces, before others have their turn."""
EXPLAIN_KEYS_MAX = 100
"""Of one call: each takes some 50 µs."""
INLINE_KEYS = 2000
"""More of them are unpacked on a thread."""

Count = Annotated[int, msgspec.Meta(ge=0)]
Hex = Annotated[str, msgspec.Meta(max_length=2 * KEY_BYTES_MAX)]
KeyList = Annotated[list[Hex], msgspec.Meta(min_length=1, max_length=KEYS_MAX)]


class Chain(msgspec.Struct, forbid_unknown_fields=True):
    """Keys, root side first."""

    keys: KeyList


class Hints(msgspec.Struct, frozen=True):
    """What the call is for; unknown fields are a newer client's."""

    session: str = ""
    turn: Count | None = None
    kind: str = ""
    finish: str = ""


class Match(msgspec.Struct, forbid_unknown_fields=True):
    """A chain whose last blob has `tail_tokens` tokens, if it is partial."""

    keys: KeyList
    tail_tokens: Count = 0
    hint: Hints = Hints()


class Explanation(msgspec.Struct, forbid_unknown_fields=True):
    """Keys of blobs to be told about."""

    keys: Annotated[list[Hex], msgspec.Meta(min_length=1, max_length=EXPLAIN_KEYS_MAX)]


class Pin(msgspec.Struct, forbid_unknown_fields=True):
    """Keep blobs for `ttl_s` seconds; 0 ends it."""

    keys: KeyList
    ttl_s: float


class Drop(msgspec.Struct, forbid_unknown_fields=True):
    """Free blobs, or with tier "dram" their copies in DRAM."""

    keys: KeyList
    tier: str = ""


class Succession(msgspec.Struct, forbid_unknown_fields=True):
    """One context goes on as another: keys of their last blobs."""

    old_leaf: Hex
    new_leaf: Hex


class SessionNamed(msgspec.Struct, forbid_unknown_fields=True):
    """A session, as hints have named it."""

    session: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TEXT_BYTES)]


class Declaration(msgspec.Struct, forbid_unknown_fields=True):
    """A namespace of blobs of `opaque_bytes` without structure; `terms` change what holds."""

    model: str
    opaque_bytes: int
    revision: str = ""
    salt: str = ""
    tokens_per_blob: int = 256
    hash_scheme: str = HASH_SCHEME
    terms: dict[str, str] = {}


class Verification(msgspec.Struct, forbid_unknown_fields=True):
    """How long it may take."""

    timeout_s: float = 600.0


class Verbs:
    """The handlers."""

    def __init__(self, context: Context, draining: asyncio.Event) -> None:
        self._context = context
        self._store = context.store
        self._draining = draining

    def routes(self) -> list[web.RouteDef]:
        """Where they are served."""
        one = ROOT + "/{namespace}"
        posts = {
            ROOT: self.declare,
            f"{one}/match": self.match,
            f"{one}/exists": self.exists,
            f"{one}/stat": self.stat,
            f"{one}/explain": self.explain,
            f"{one}/prefetch": self.prefetch,
            f"{one}/pin": self.pin,
            f"{one}/drop": self.drop,
            f"{one}/supersede": self.supersede,
            "/v1/prefetch": self.prefetch_session,
            "/v1/verify": self.verify,
        }
        gets = {
            ROOT: self.namespaces,
            f"{one}/blobs": self.blobs,
            "/v1/stats": self.stats,
            "/healthz": self.healthz,
            "/readyz": self.readyz,
        }
        return [
            *(web.post(path, handler, expect_handler=_not_yet) for path, handler in posts.items()),
            *(web.get(path, handler) for path, handler in gets.items()),
        ]

    async def declare(self, request: web.Request) -> web.StreamResponse:
        """Declare a namespace."""
        context = self._context
        token = context.bearer(request)
        terms = Terms.from_dict(dict(request.query))
        if request.content_type == "application/octet-stream":
            encoded = await bodies.read_small(request, NAMESPACE_BYTES_MAX, context.io_timeout_s)
            namespace = Namespace.decode(encoded)
        else:
            asked = await bodies.read_json(request, Declaration, context.io_timeout_s)
            terms = Terms.from_dict(asked.terms).over(terms)
            namespace = Namespace(
                model=asked.model,
                layout=KVLayout.opaque(asked.opaque_bytes),
                revision=asked.revision,
                salt=asked.salt,
                tokens_per_blob=asked.tokens_per_blob,
                hash_scheme=asked.hash_scheme,
            )
        if not token.sees(namespace.model):
            raise Refusal(403, "forbidden", "the token has no rights on namespaces of this model")
        if terms != Terms():
            require(token, Right.WRITE)
        await self._store.declare(namespace.encode(), terms)
        return answer(
            {
                "id": namespace.id.hex(),
                "blob_bytes": namespace.nbytes,
                "tokens_per_blob": namespace.tokens_per_blob,
            }
        )

    async def namespaces(self, request: web.Request) -> web.StreamResponse:
        """Those that the token may see."""
        token = self._context.bearer(request)
        after, slices = b"", []
        while found := self._store.list_namespaces(after, AT_ONCE):
            slices.append(encoded([facts for facts in found if token.sees(facts["model"])]))
            after = bytes.fromhex(found[-1]["id"])
            await asyncio.sleep(0)
        return answer_list("namespaces", slices)

    async def blobs(self, request: web.Request) -> web.StreamResponse:
        """A page of facts about blobs, by key."""
        ns = self._context.namespace(request, Right.READ)
        limit = whole_of(request, "limit", PAGE_MAX, 1, PAGE_MAX)
        text = request.query.get("after", "")
        after = hex_bytes(text, "after") if text else b""
        page, following = self._store.list_blobs(ns.id, after, limit)
        return answer({"blobs": page, "next": following.hex() or None})

    async def match(self, request: web.Request) -> web.StreamResponse:
        """How far a chain is held."""
        ns = self._context.namespace(request, Right.READ)
        asked = await self._body(request, Match)
        per_blob = ns.namespace.tokens_per_blob
        if asked.tail_tokens >= per_blob:
            raise InvalidRequest(f"tail of {asked.tail_tokens} tokens in blobs of {per_blob}")
        hint = Hint(**msgspec.structs.asdict(asked.hint))
        keys, key_bytes = await unpacked_keys(asked.keys)
        n, warm, eta_s = self._store.match(ns.id, keys, key_bytes, hint=hint)
        tokens = n * per_blob
        if n == len(asked.keys) and asked.tail_tokens:
            tokens -= per_blob - asked.tail_tokens
        tiers = ["dram"] * warm + ["ssd"] * (n - warm)
        further = self._store.text_calls.rebuildable(ns.id, keys, key_bytes, n)
        rebuild_blobs, rebuild_eta_s = await further if further is not None else (0, 0.0)
        return answer(
            {
                "blobs": n,
                "tokens": tokens,
                "tiers": tiers,
                "eta_s": eta_s,
                "rebuild_blobs": rebuild_blobs,
                "rebuild_eta_s": rebuild_eta_s,
            }
        )

    async def exists(self, request: web.Request) -> web.StreamResponse:
        """Which keys are held, each for itself."""
        ns, (keys, key_bytes) = await self._chain(request, Right.READ)
        held: list[bool] = []
        async for some in _in_turns(keys, key_bytes):
            held += map(bool, self._store.exists(ns.id, some, key_bytes))
        return answer({"held": held})

    async def stat(self, request: web.Request) -> web.StreamResponse:
        """Facts about each blob."""
        ns, (keys, key_bytes) = await self._chain(request, Right.READ)
        slices = [
            encoded(self._store.stat(ns.id, some, key_bytes))
            async for some in _in_turns(keys, key_bytes)
        ]
        return answer_list("blobs", slices)

    async def explain(self, request: web.Request) -> web.StreamResponse:
        """Why each blob is where it is."""
        ns = self._context.namespace(request, Right.READ)
        asked = await self._body(request, Explanation)
        keys, key_bytes = await unpacked_keys(asked.keys)
        told = self._store.explain(ns.id, keys, key_bytes)
        if not self._context.bearer(request).sees_all:
            for about in told:  # whose turn it is next may be others' blobs
                about.pop("next", None)
        return answer({"blobs": told})

    async def prefetch(self, request: web.Request) -> web.StreamResponse:
        """Start to bring the leading blobs into DRAM."""
        ns, (keys, key_bytes) = await self._chain(request, Right.READ)
        return answer({"count": self._store.prefetch(ns.id, keys, key_bytes)})

    async def prefetch_session(self, request: web.Request) -> web.StreamResponse:
        """Start to bring a session's context into DRAM; 0 for what the token may not see."""
        token = self._context.bearer(request)
        require(token, Right.READ)
        session = Hint(session=(await self._body(request, SessionNamed)).session).session
        ns = await self._store.contexts.namespace_of(session)
        seen = ns is not None and token.sees(ns.namespace.model)
        return answer({"count": await self._store.contexts.prefetch(session) if seen else 0})

    async def supersede(self, request: web.Request) -> web.StreamResponse:
        """Let what only one context has leave before anything else: it goes on as another."""
        ns = self._context.namespace(request, Right.WRITE)
        asked = await self._body(request, Succession)
        old, new = (hex_bytes(leaf, "a key") for leaf in (asked.old_leaf, asked.new_leaf))
        return answer({"count": await self._store.contexts.supersede(ns, old, new)})

    async def pin(self, request: web.Request) -> web.StreamResponse:
        """Keep blobs from eviction for a time."""
        ns = self._context.namespace(request, Right.WRITE)
        asked = await self._body(request, Pin)
        keys, key_bytes = await unpacked_keys(asked.keys)
        ttl_s = bounded(asked.ttl_s, "ttl_s", PIN_MAX_S)
        count = 0
        async for some in _in_turns(keys, key_bytes):
            count += self._store.pin(ns.id, some, key_bytes, ttl_s)
        return answer({"count": count})

    async def drop(self, request: web.Request) -> web.StreamResponse:
        """Free blobs and all that continue them."""
        ns = self._context.namespace(request, Right.ADMIN)
        asked = await self._body(request, Drop)
        keys, key_bytes = await unpacked_keys(asked.keys)
        count = 0
        async for some in _in_turns(keys, key_bytes, from_end=asked.tier == "dram"):
            count += self._store.drop(ns.id, some, key_bytes, asked.tier)
        return answer({"count": count})

    async def stats(self, request: web.Request) -> web.StreamResponse:
        """Counters and gauges of the whole store."""
        self._context.bearer(request)
        return answer(self._store.stats())

    async def verify(self, request: web.Request) -> web.StreamResponse:
        """Read every blob back and check its digests."""
        token = self._context.bearer(request)
        require(token, Right.ADMIN)
        _require_all(token)
        asked = Verification()
        if bodies.expected_length(request) != 0:
            asked = await self._body(request, Verification)
        return answer(await self._store.verify(bounded(asked.timeout_s, "timeout_s")))

    async def healthz(self, request: web.Request) -> web.StreamResponse:
        """The daemon answers."""
        return answer({"status": "ok"})

    async def readyz(self, request: web.Request) -> web.StreamResponse:
        """The daemon takes requests."""
        if self._draining.is_set():
            raise Refusal(503, "unavailable", "the daemon is stopping", retry_after_s=1.0)
        return answer({"status": "ready"})

    async def _body(self, request: web.Request, kind: type[bodies.T]) -> bodies.T:
        return await bodies.read_json(request, kind, self._context.io_timeout_s)

    async def _chain(
        self, request: web.Request, right: Right
    ) -> tuple[NamespaceState, tuple[bytes, int]]:
        ns = self._context.namespace(request, right)
        return ns, await unpacked_keys((await self._body(request, Chain)).keys)


async def _in_turns(keys: bytes, key_bytes: int, *, from_end: bool = False) -> AsyncIterator[bytes]:
    """Slices of packed keys, with a chance for others after each: a long call holds up nobody."""
    step = AT_ONCE * key_bytes
    starts = range(0, len(keys), step)
    for start in reversed(starts) if from_end else starts:
        yield keys[start : start + step]
        await asyncio.sleep(0)


async def unpacked_keys(keys: list[str]) -> tuple[bytes, int]:
    """Keys of one call, packed, and how long each is."""
    if len(keys) <= INLINE_KEYS:
        return unpacked(keys, "a key")
    return await asyncio.get_running_loop().run_in_executor(None, unpacked, keys, "a key")


def _require_all(token: Token) -> None:
    if not token.sees_all:
        raise Refusal(403, "forbidden", 'this needs a token for all namespaces ("*")')


async def _not_yet(request: web.Request) -> Any:
    """Instead of sending 100 (Continue) at once: the handlers do when they want the body."""

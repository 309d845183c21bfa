"""The verbs that are one request: declare, match, exists, drop, pin, prefetch, stats and so on.

A fault inside is a miss: nothing is held, nothing was done. Only the caller's own
mistakes are raised.
"""

from __future__ import annotations

from typing import Any, TypeVar

from blobstore.clients.bound import BoundNamespace
from blobstore.clients.hit import Hit
from blobstore.clients.steps import Call, Operation, ask, checked, reason
from blobstore.errors import BlobStoreError, InvalidRequest, UnknownNamespace
from blobstore.hint import Hint
from blobstore.keys import Keys
from blobstore.protocol import (
    KEYS_MAX,
    Declare,
    Declared,
    Done,
    Drop,
    Exists,
    Explain,
    Forget,
    Held,
    Hints,
    Keyed,
    Match,
    Matched,
    Pin,
    Ping,
    Pong,
    Prefetch,
    PrefetchSession,
    Reply,
    Report,
    Request,
    Stat,
    Stats,
    Supersede,
    Verify,
)

STAT_KEYS = 1000
"""Keys of one Stat: their facts take about 300 bytes each."""
EXPLAIN_KEYS = 100
"""Keys of one Explain: it takes the daemon some 50 µs each."""

R = TypeVar("R", bound=Reply)


def declaration(ns: BoundNamespace) -> Declare:
    """What a daemon is told of `ns`."""
    return Declare(ns.namespace.encode(), ns.terms.as_dict())


def ask_in(ns: BoundNamespace, request: Keyed | Supersede, expected: type[R]) -> Operation[R]:
    """The reply to a request in `ns`, which is declared if this daemon does not know it yet."""
    try:
        reply = yield request
    except UnknownNamespace:
        yield from ask(declaration(ns), Declared)
        reply = yield request
    return reply if type(reply) is expected else checked(reply, expected)


def declare(ns: BoundNamespace) -> Operation[None]:
    """Tell the daemon of `ns`. If it cannot be told now, the first call that needs it will."""
    try:
        yield from ask(declaration(ns), Declared)
    except BlobStoreError as error:
        reason(error)


def ping() -> Operation[bool]:
    """Whether the daemon answers."""
    try:
        checked((yield Ping()), Pong)
    except BlobStoreError as error:
        reason(error)
        return False
    return True


def hints_of(hint: Hint | None) -> Hints:
    """As it travels."""
    return hint.as_dict() if hint is not None else {}


def match(ns: BoundNamespace, keys: Keys, hint: Hint | None = None) -> Operation[Hit]:
    """How far the chain is held."""
    if not keys:
        return Hit(0, 0)
    request = Match(ns.id, keys.packed, keys.key_bytes, hints_of(hint))
    try:
        found = yield from ask_in(ns, request, Matched)
    except BlobStoreError as error:
        return Hit(0, 0, reason=reason(error))
    return Hit(
        found.blobs, ns.leading_tokens(keys, found.blobs), found.warm, found.eta_s,
        rebuildable=found.rebuild_blobs, rebuild_eta_s=found.rebuild_eta_s,
    )  # fmt: skip


def exists(ns: BoundNamespace, keys: Keys) -> Operation[list[bool]]:
    """Which keys are held."""
    held = b""
    try:
        for some in _cut(keys, KEYS_MAX):
            request = Exists(ns.id, some.packed, some.key_bytes)
            held += (yield from ask_in(ns, request, Held)).held
    except BlobStoreError as error:
        reason(error)
        return [False] * len(keys)
    return [flag != 0 for flag in held]


def drop(ns: BoundNamespace, keys: Keys, tier: str) -> Operation[int]:
    """Free blobs; how many."""
    dropped = 0
    for some in reversed(_cut(keys, KEYS_MAX)):  # in DRAM, what continues a blob keeps it
        dropped += yield from _done(ns, Drop(ns.id, some.packed, some.key_bytes, tier))
    return dropped


def forget(ns: BoundNamespace, keys: Keys) -> Operation[int]:
    """Free blobs and erase their texts; how many. A fault is raised: it was not done."""
    forgotten = 0
    for some in _cut(keys, KEYS_MAX):
        request = Forget(ns.id, some.packed, some.key_bytes)
        forgotten += (yield from ask_in(ns, request, Done)).count
    return forgotten


def pin(ns: BoundNamespace, keys: Keys, ttl_s: float) -> Operation[int]:
    """Keep blobs from eviction; how many."""
    pinned = 0
    for some in _cut(keys, KEYS_MAX):
        pinned += yield from _done(ns, Pin(ns.id, some.packed, some.key_bytes, ttl_s))
    return pinned


def prefetch(
    ns: BoundNamespace | None, keys: Keys | None, tier: str, session: str
) -> Operation[int]:
    """Start loads of a chain, or of what a session used last; how many blobs are on their way."""
    if tier != "dram":
        raise InvalidRequest(f"blobs can be prefetched to dram, not to {tier!r}")
    if session and ns is None and keys is None:
        return _prefetch_session(session)
    if session or ns is None or keys is None:
        raise InvalidRequest("prefetch takes a namespace and keys, or a session and neither")
    return _done(ns, Prefetch(ns.id, keys.packed, keys.key_bytes))


def supersede(ns: BoundNamespace, old_leaf: bytes, new_leaf: bytes) -> Operation[int]:
    """Say that one context replaces another; how many blobs only the old one has."""
    keys = Keys.of([old_leaf, new_leaf])
    return _done(ns, Supersede(ns.id, keys[0], keys[1]))


def stat(ns: BoundNamespace, keys: Keys) -> Operation[list[dict[str, Any]]]:
    """Facts about each blob."""
    return _about_each(ns, keys, Stat, STAT_KEYS)


def explain(ns: BoundNamespace, keys: Keys) -> Operation[list[dict[str, Any]]]:
    """Why each blob is where it is."""
    return _about_each(ns, keys, Explain, EXPLAIN_KEYS)


def _about_each(
    ns: BoundNamespace, keys: Keys, kind: type[Stat | Explain], at_once: int
) -> Operation[list[dict[str, Any]]]:
    blobs: list[dict[str, Any]] = []
    for some in _cut(keys, at_once):
        report = yield from _report(kind(ns.id, some.packed, some.key_bytes), ns)
        if "blobs" not in report:
            return []
        blobs += report["blobs"]
    return blobs


def stats() -> Operation[dict[str, Any]]:
    """Counters and gauges."""
    return (yield from _report(Stats()))


def verify(call: Call) -> Operation[dict[str, Any]]:
    """Read every blob and check its digests."""
    return (yield from _report(Verify(call.daemon_timeout_s())))


def _cut(keys: Keys, n: int) -> list[Keys]:
    """Consecutive keys, at most `n` for each request."""
    return [keys[start : start + n] for start in range(0, len(keys), n)]


def _prefetch_session(session: str) -> Operation[int]:
    name = Hint(session=session).session
    try:
        return (yield from ask(PrefetchSession(name), Done)).count
    except BlobStoreError as error:
        reason(error)
        return 0


def _done(ns: BoundNamespace, request: Keyed | Supersede) -> Operation[int]:
    if isinstance(request, Keyed) and not request.keys:
        return 0
    try:
        done = yield from ask_in(ns, request, Done)
    except BlobStoreError as error:
        reason(error)
        return 0
    return done.count


def _report(request: Request, ns: BoundNamespace | None = None) -> Operation[dict[str, Any]]:
    """The body of a report; after a fault only its "reason"."""
    try:
        if ns is not None:
            assert isinstance(request, Keyed)
            report = yield from ask_in(ns, request, Report)
        else:
            report = yield from ask(request, Report)
    except BlobStoreError as error:
        return {"reason": reason(error)}
    return report.body

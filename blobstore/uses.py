"""Which chains requests have used: noted on the request path, told to the policies off it.

A request may come in several calls: the ranks of an engine lease one chain at the same
moment, a long context is read window by window, and what was missing is put later. Here
they become one use, and what was put its continuation. Used on the event loop only.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import inf
from typing import Protocol

from blobstore.hint import Hint
from blobstore.index import Record
from blobstore.sessions import Sessions
from blobstore.tiering.policy import Use

PAUSE_S = 0.02
"""Between a call and its telling: most of what belongs to one request has come by then."""
BACKLOG_PAUSE_S = 0.005
SLICE_S = 0.002
"""How long other calls may be held up at a time."""
WAITING_MAX = 4096
"""Calls noted and not told of yet; more are lost, and counted."""

SAME_S = 1.0
"""Calls for one leaf within this time are one use."""
WINDOW_S = 5.0
"""A call that goes on where one this long ago has ended belongs to the same request."""
REQUEST_S = 300.0
"""A put this long after a get may be of what that has missed: long contexts are prefilled so
long. Nothing of one request is further apart."""
PUT_AFTER_PUT_S = 10.0
"""What a model generates is put piece by piece; a next turn does not come as fast."""

OUT_OF_ORDER_MAX = 8
"""Blobs of one chain that a client may ask for at a time, each by a call of its own."""

MISSED_MAX = 1024
"""Blobs at which matches ended of which it is remembered what they missed, until somebody gets
what they found."""
MISSED_OF_ONE_MAX = 16
"""Such matches of one blob: many requests may share it and nothing else."""
TOLD_MAX = 4096
REQUESTS_OF_ONE_MAX = 64
"""That used one blob last: popular heads have many."""
TOLD_OF_ONE_MAX = 16
"""Blobs at the end of one chain that a later call may go on from."""

log = logging.getLogger(__name__)


class Timer(Protocol):
    """What `call_later` gives."""

    def cancel(self) -> None:
        """Do not call."""


_Name = tuple[str, bytes]
"""What tells requests for one blob apart: the session, and the last key asked for beyond it."""


class _Kind(Enum):
    GOT = "got"
    STORED = "stored"
    ENDED = "ended"
    """Nothing new, but for why the model stopped."""


@dataclass(slots=True)
class _Call:
    """One call about the chain that ends at `leaf`."""

    kind: _Kind
    leaf: Record
    n_named: int
    """Blobs of the chain's end that the call got or stored."""
    n_missed: int
    """Blobs that it asked for beyond."""
    hint: Hint | None
    now_s: float
    idle_s: float = 0.0
    """How long the leaf had not been used."""
    asked: bytes = b""
    """The last key that it asked for, if that is beyond the leaf."""

    @property
    def stored(self) -> bool:
        return self.kind is _Kind.STORED

    @property
    def session(self) -> str:
        return self.hint.session if self.hint is not None else ""

    @property
    def turn(self) -> int | None:
        return self.hint.turn if self.hint is not None else None


@dataclass(slots=True)
class _Told:
    """When a blob was told of last, and as part of what."""

    at_s: float
    stored: bool
    turn: int | None
    """As the caller counts, if it does."""
    asked: bytes
    """As of the call."""
    followed: bool = False
    """A put has gone on from here: one from the same blob on is another request's."""


@dataclass(frozen=True, slots=True)
class _Missed:
    """What a match asked for beyond what it found, and until when that is worth knowing."""

    n_missed: int
    asked: bytes
    until_s: float


class Uses:
    """Collects the calls, and tells `tell` of the uses that they make up.

    Args:
        tell: takes a use; what it raises is logged.
        sessions: learn of uses that name one.
        gap: is told how long the end of a chain that is got had not been used.
        clock: of the store.
        call_later: of the event loop.
    """

    def __init__(
        self,
        tell: Callable[[Use[Record]], None],
        sessions: Sessions,
        gap: Callable[[float], None],
        clock: Callable[[], float],
        call_later: Callable[[float, Callable[[], None]], Timer],
    ) -> None:
        self._tell = tell
        self._sessions = sessions
        self._gap = gap
        self._clock = clock
        self._call_later = call_later
        self._waiting: OrderedDict[object, _Call] = OrderedDict()
        """By leaf, session, what was asked for beyond the leaf, and kind of call."""
        self._told: OrderedDict[Record, OrderedDict[_Name, _Told]] = OrderedDict()
        """Those told of last, last; likewise of one blob."""
        self._missed: OrderedDict[tuple[Record, str], deque[_Missed]] = OrderedDict()
        """What matches missed beyond a blob, by session."""
        self._timer: Timer | None = None
        self.n_told = 0
        self.n_lost = 0
        """Calls that were not told of, since too many waited."""
        self.on_got: Callable[[Record], None] = lambda leaf: None
        """Called at once when a get has given the chain that ends at a blob."""

    def __len__(self) -> int:
        return len(self._waiting)

    def got(
        self,
        leaf: Record,
        n_got: int,
        n_asked: int,
        hint: Hint | None,
        used_s: float | None = None,
        asked: bytes = b"",
    ) -> None:
        """A get gave `n_got` blobs that end at `leaf`, of `n_asked`. Costs O(1), mostly nothing.

        `used_s`: when `leaf` had been used before the get, if that itself has touched it since.
        `asked`: the last key that it asked for, if that is beyond `leaf`.
        """
        self.on_got(leaf)
        session = hint.session if hint is not None else ""
        n_missed = n_asked - n_got
        if self._missed and not n_missed:
            n_missed, asked = self._missed_after(leaf, session)
        name = _waits_as(leaf, session, asked)
        if name in self._waiting:
            return
        now_s = self._clock()
        idle_s = now_s - (leaf.last_used if used_s is None else used_s)
        call = _Call(_Kind.GOT, leaf, n_got, n_missed, hint, now_s, idle_s, asked)
        if n_got == 1 and (parent := leaf.parent) is not None:
            call = self._joined(call, _waits_as(parent, session, b""))
        self._note(name, call)

    def stored(self, leaf: Record, n_stored: int, hint: Hint | None) -> None:
        """A put stored `n_stored` blobs that end at `leaf`."""
        call = _Call(_Kind.STORED, leaf, n_stored, 0, hint, self._clock())
        if n_stored == 1 and leaf.parent is not None:
            call = self._joined(call, (leaf.parent, call.session, call.kind))
        self._note((leaf, call.session, call.kind), call)

    def matched(self, leaf: Record, n_missed: int, hint: Hint | None, asked: bytes = b"") -> None:
        """A match has found a chain that ends at `leaf`, and missed so many blobs up to `asked`.

        No use, but it tells how long the prompt is whose head will be got next; and why the
        model stopped, if the hint says so, where no put can tell.
        """
        if n_missed:
            self._note_missed(leaf, hint.session if hint is not None else "", n_missed, asked)
        if hint is not None and hint.finish:
            call = _Call(_Kind.ENDED, leaf, 0, 0, hint, self._clock())
            self._note((leaf, call.session, call.kind), call)

    def _joined(self, call: _Call, parent: object) -> _Call:
        """A call for one blob, and the one for its parent if that still waits: HTTP has many."""
        before = self._waiting.get(parent)
        if before is None or before.turn != call.turn:
            return call
        del self._waiting[parent]
        return replace(call, n_named=before.n_named + 1, idle_s=before.idle_s)

    def drain(self, most_s: float = SLICE_S) -> None:
        """Tell now of what can be told within a moment."""
        until_s = self._clock() + most_s
        while len(self) and self._clock() <= until_s:
            self._tell_next()

    def forget(self, record: Record) -> None:
        """The blob has gone: if it is stored anew, it is told of anew."""
        self._told.pop(record, None)

    def close(self) -> None:
        """Tell of everything, and no more after that."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.drain(inf)

    def stats(self) -> dict[str, int]:
        """For the store's gauges."""
        return {"told": self.n_told, "waiting": len(self), "lost": self.n_lost}

    def _note(self, name: object, call: _Call) -> None:
        if len(self) >= WAITING_MAX:
            self.n_lost += 1
            return
        self._waiting[name] = call
        if self._timer is None:
            self._timer = self._call_later(PAUSE_S, self._slice)

    def _slice(self) -> None:
        """Tell for a moment, then let others have the loop."""
        self._timer = None
        try:
            self.drain()
        finally:
            if len(self):
                self._timer = self._call_later(BACKLOG_PAUSE_S, self._slice)

    def _tell_next(self) -> None:
        _, call = self._waiting.popitem(last=False)
        try:
            self._tell_of(call)
        except Exception:  # requests are served whatever the policies make of them
            log.exception("a use was not taken in")

    def _tell_of(self, call: _Call) -> None:
        chain = _chain(call.leaf)
        if call.kind is _Kind.ENDED:
            self._tell_end(call, chain)
            return
        start = max(0, min(call.leaf.depth - call.n_named, len(chain)))
        if not chain or (call.stored and start == len(chain)):
            return
        session, own_turn = call.session, call.turn
        n_told, again = self._told_of(call, chain, start, session)
        if n_told >= len(chain):
            return
        turn = -1 if own_turn is None else own_turn
        if session:
            turn = self._sessions.used(session, chain, call.now_s, own_turn, again=again)
        if not (call.stored or again) and chain[-1] is call.leaf:
            self._gap(max(0.0, call.idle_s))
        fresh = n_told if again else start if call.stored else 0
        self._remember(chain[fresh:], call)
        self.n_told += 1
        n_held = n_told if again or call.stored else len(chain)
        self._tell(_use(call, chain, n_held, again=again, turn=turn))

    def _tell_end(self, call: _Call, chain: Sequence[Record]) -> None:
        """Say why the model stopped, if the request was told of."""
        told = next(self._told_at(chain[-1], call.session), None) if chain else None
        if told is None or call.now_s - told.at_s > REQUEST_S:
            return
        if _same_turn(told, call) is not False:
            turn = -1 if told.turn is None else told.turn
            self._tell(_use(call, chain, len(chain), again=True, turn=turn))

    def _note_missed(self, leaf: Record, session: str, n_missed: int, asked: bytes) -> None:
        of_leaf = self._missed.setdefault((leaf, session), deque(maxlen=MISSED_OF_ONE_MAX))
        if all(missed.asked != asked for missed in of_leaf):  # the ranks of an engine ask alike
            of_leaf.append(_Missed(n_missed, asked, self._clock() + REQUEST_S))
        if len(self._missed) > MISSED_MAX:
            self._missed.popitem(last=False)

    def _missed_after(self, leaf: Record, session: str) -> tuple[int, bytes]:
        """What the oldest match missed beyond `leaf` that nothing was got for since."""
        for named in dict.fromkeys((session, "")):
            of_leaf = self._missed.get((leaf, named))
            if of_leaf is not None:
                found = of_leaf.popleft()
                if not of_leaf:
                    del self._missed[leaf, named]
                if self._clock() <= found.until_s:
                    return found.n_missed, found.asked
        return 0, b""

    def _told_of(
        self, call: _Call, chain: Sequence[Record], start: int, session: str
    ) -> tuple[int, bool]:
        """How much of `chain` need not be told of any more, and whether `call` is part of a
        request that was told of."""
        if self._is_told(call, chain[-1], session):
            return len(chain), True
        n_told, again = start if call.stored else 0, False
        for n in range(start, max(0, start - OUT_OF_ORDER_MAX), -1):
            before = self._before(call, chain, n, session)
            if before is not None:
                before.followed |= call.stored
                n_told, again = n, True
                break
        while n_told < len(chain) and (again or call.stored):
            # Calls for parts of one chain may come in any order.
            if not self._is_told(call, chain[n_told], session):
                break
            n_told, again = n_told + 1, True
        return n_told, again

    def _is_told(self, call: _Call, record: Record, session: str) -> bool:
        """Whether `call` says once more what was told of `record` last.

        One that does not say what it missed may be any rank's of the last request.
        """
        of_requests = self._told.get(record, _NO_REQUESTS)
        if call.asked:
            last = of_requests.get((session, call.asked))
        else:
            names = (name for name in reversed(of_requests) if name[0] == session)
            last = next((of_requests[name] for name in names), None)
        return last is not None and _is_same(last, call)

    def _before(self, call: _Call, chain: Sequence[Record], n: int, session: str) -> _Told | None:
        """What was told of `chain[n - 1]` that `call` goes on from.

        Many requests may have ended there: a put belongs to the one that asked for what it
        stores, or else to the last that none belongs to yet.
        """
        told = [told for told in self._told_at(chain[n - 1], session) if _goes_on(told, call)]
        if not call.stored:
            return told[0] if told else None
        stored = {record.key for record in chain[n:]} if len(told) > 1 else set()
        for each in told:
            if each.asked in stored:
                return each
        return next((t for t in told if not t.followed or _same_turn(t, call)), None)

    def _told_at(self, record: Record, session: str) -> Iterator[_Told]:
        """Of the requests that used `record`, the latest first; then of those of no session."""
        of_requests = self._told.get(record, _NO_REQUESTS)
        for named in dict.fromkeys((session, "")):
            yield from (told for name, told in reversed(of_requests.items()) if name[0] == named)

    def _remember(self, records: Sequence[Record], call: _Call) -> None:
        name = call.session, call.asked
        for record in records[-TOLD_OF_ONE_MAX:]:
            of_requests = self._told.setdefault(record, OrderedDict())
            of_requests[name] = _Told(call.now_s, call.stored, call.turn, call.asked)
            of_requests.move_to_end(name)
            if len(of_requests) > REQUESTS_OF_ONE_MAX:
                of_requests.popitem(last=False)
            self._told.move_to_end(record)
        while len(self._told) > TOLD_MAX:
            self._told.popitem(last=False)


def _waits_as(leaf: Record, session: str, asked: bytes) -> object:
    return (leaf, session, asked) if session or asked else leaf


def _chain(leaf: Record) -> list[Record]:
    """The chain that ends at `leaf`, without what is not held any more, or not yet."""
    node: Record | None = leaf
    while node is not None and node.ns.blobs.get(node.key) is not node:
        node = node.parent
    return node.path() if node is not None else []


def _is_same(told: _Told, call: _Call) -> bool:
    """Whether `call` says once more what was told of."""
    same_turn = _same_turn(told, call)
    within_s = SAME_S if same_turn is None else REQUEST_S if same_turn else -1.0
    return told.stored == call.stored and call.now_s - told.at_s <= within_s


def _goes_on(told: _Told, call: _Call) -> bool:
    """Whether `call` goes on where the request that was told of has ended."""
    same_turn = _same_turn(told, call)
    if same_turn is not None:
        within_s = REQUEST_S if same_turn else -1.0
    elif call.stored:
        within_s = PUT_AFTER_PUT_S if told.stored else REQUEST_S
    else:
        within_s = -1.0 if told.stored else WINDOW_S
    return call.now_s - told.at_s <= within_s


def _same_turn(told: _Told, call: _Call) -> bool | None:
    """Whether callers say that it is; None if they do not say."""
    if call.turn is None or told.turn is None:
        return None
    return call.turn == told.turn


def _use(
    call: _Call, chain: Sequence[Record], n_held: int, *, again: bool, turn: int
) -> Use[Record]:
    per_blob = call.leaf.ns.namespace.tokens_per_blob
    prompt_tokens = 0
    if not again:
        prompt_tokens = (call.leaf.depth - 1 + call.n_missed) * per_blob + call.leaf.tokens
    hint = call.hint or _NO_HINT
    return Use(
        chain, n_held, call.now_s,
        item_tokens=per_blob, prompt_tokens=prompt_tokens, continues=again,
        session=hint.session, turn=turn, kind=hint.kind, finish=hint.finish,
    )  # fmt: skip


_NO_HINT = Hint()
_NO_REQUESTS: OrderedDict[_Name, _Told] = OrderedDict()

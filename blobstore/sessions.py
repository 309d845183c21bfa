"""What is known of each session: where its context ends, its turn, and how long it pauses.

A session is what callers name in their hints: a conversation, or a run of an agent. The
ones used last are kept, in memory and (but for what only volatile blobs would tell) in a
file beside the blobs, so that a restart does not make strangers of them.
"""

from __future__ import annotations

import logging
import struct
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import msgspec

from blobstore.index import Record, Retention, identity
from blobstore.tiering.sealed_file import Unusable, read_sealed, write_sealed

SESSIONS_MAX = 100_000
"""Some 500 bytes each."""
GAP_WEIGHT = 0.3
"""Of the last gap in the smoothed one."""
BLOBS_SEARCHED_MAX = 256
"""That continue a blob, in search of the sessions that it serves."""

FILE_NAME = "sessions"
_KIND = b"bs-sessn"
_VERSION = 1
_AT_ONCE = 1000
"""Encoded before other threads have their turn."""

log = logging.getLogger(__name__)


class Session(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One session, as of its last use."""

    namespace_id: bytes
    key: bytes
    """Of the deepest blob of its context that may be told of on disk; b"" if there is none."""
    leaf: int
    """Identity of the last blob of its context."""
    used_s: float
    """By the store's clock in memory, by the wall clock on disk."""
    gap_s: float
    """Smoothed time between its uses; below 0 as long as there was one only."""
    turn: int
    held: bytes = b""
    """Key of the last blob of its context that was on SSD at the last use, or is left of it."""


class Sessions:
    """The sessions used last, by their names. Used on the event loop only."""

    def __init__(self, *, most: int = SESSIONS_MAX) -> None:
        self._most = most
        self._known: OrderedDict[str, Session] = OrderedDict()
        """In order of last use."""
        self._of_leaf: dict[int, str] = {}
        """The session that used a leaf last."""
        self._changed = False
        self.why_cold = ""
        """Why those from before the start are not known; "" if they are."""

    def __len__(self) -> int:
        return len(self._known)

    def used(
        self, name: str, chain: Sequence[Record], now_s: float, turn: int | None, *, again: bool
    ) -> int:
        """A request of the session used `chain`; the number of its turn.

        `turn` is the caller's, if it counts. Else, and where it is behind (a caller may have
        begun anew), the uses are counted here. `again`: it is the same request as told of
        before.
        """
        before = self._known.pop(name, None)
        leaf = chain[-1]
        gap_s, number = -1.0, 0
        if before is not None:
            gap_s, number = before.gap_s, before.turn
            if not again:
                last_s = max(0.0, now_s - before.used_s)
                gap_s = last_s if gap_s < 0 else gap_s + GAP_WEIGHT * (last_s - gap_s)
                number += 1
            if self._of_leaf.get(before.leaf) == name:
                del self._of_leaf[before.leaf]
        if turn is not None and (before is None or turn > before.turn):
            number = turn
        self._known[name] = found = Session(
            leaf.ns.id, _lasting_key(leaf), identity(leaf), now_s, gap_s, number, _saved_key(leaf)
        )
        self._of_leaf[found.leaf] = name
        if len(self._known) > self._most:
            self._forget_oldest()
        self._changed = True
        return number

    def find(self, name: str) -> Session | None:
        """The session called `name`, if it is known. Not counted as a use."""
        return self._known.get(name)

    def ends_at(self, record: Record) -> bool:
        """Whether the context of a session ends with this blob."""
        return identity(record) in self._of_leaf

    def moved(self, old: Record, new: Record) -> None:
        """The context that ended at `old` goes on as the one that ends at `new`."""
        name = self._of_leaf.pop(identity(old), None)
        if name is not None:
            self._end_at(name, new, key=_lasting_key(new), held=_saved_key(new))

    def lost(self, record: Record) -> None:
        """The blob is in no tier any more: contexts that ended there end before it."""
        name = self._of_leaf.pop(identity(record), None)
        above = record.parent
        if name is not None and above is not None and not above.gone:
            self._end_at(name, above, held=_lasting_key(above))

    def facts(self, name: str, now_s: float) -> dict[str, object]:
        """What is known of a session, for people; {} if nothing is."""
        known = self._known.get(name)
        if known is None:
            return {}
        return {
            "session": name,
            "turn": known.turn,
            "idle_s": max(0.0, now_s - known.used_s),
            "gap_s": known.gap_s if known.gap_s >= 0 else None,
        }

    def facts_of(self, record: Record, now_s: float) -> dict[str, object]:
        """The session used last of those whose context the blob belongs to; {} if none is found.

        Looks at a bounded number of the blobs that continue it. "others" counts further
        sessions that were found.
        """
        names = {
            name
            for node in _continuing(record)
            if (name := self._of_leaf.get(identity(node))) is not None
        }
        if not names:
            return {}
        last = max(names, key=lambda name: self._known[name].used_s)
        return {**self.facts(last, now_s), "others": len(names) - 1}

    def stats(self) -> dict[str, object]:
        """For the store's gauges."""
        return {"known": len(self._known), "why_cold": self.why_cold}

    def load(self, directory: Path, now_s: float, wall_offset_s: float) -> None:
        """Know those that were saved in `directory`; none, and `why_cold`, if that cannot be.

        Reads a file. `wall_offset_s` is the wall clock's reading less that of the store's clock.
        """
        try:
            saved = _decode(read_sealed(directory / FILE_NAME, _KIND, _VERSION))
        except (Unusable, msgspec.MsgspecError) as error:
            self.why_cold = str(error)
            if (directory / FILE_NAME).exists():
                log.warning("sessions from before are not known: %s", error)
            return
        for name, entry in saved[-self._most :]:
            # What was used in the future, by a clock that has jumped, was used now.
            used_s = min(entry.used_s - wall_offset_s, now_s)
            self._known[name] = msgspec.structs.replace(entry, used_s=used_s)
            self._of_leaf[entry.leaf] = name

    def unsaved(self, directory: Path, wall_offset_s: float) -> Callable[[], None] | None:
        """Work that saves them in `directory`, if anything has changed since this was called.

        It blocks, may run on any thread, and only logs what goes wrong: it is tried again
        after the next change.
        """
        if not self._changed:
            return None
        self._changed = False
        return partial(_save, list(self._known.items()), directory, wall_offset_s)

    def _end_at(self, name: str, leaf: Record, **changes: bytes) -> None:
        known = self._known[name]
        self._known[name] = msgspec.structs.replace(known, leaf=identity(leaf), **changes)
        self._of_leaf.setdefault(identity(leaf), name)
        self._changed = True

    def _forget_oldest(self) -> None:
        name, oldest = self._known.popitem(last=False)
        if self._of_leaf.get(oldest.leaf) == name:
            del self._of_leaf[oldest.leaf]


_Saved = list[tuple[str, Session]]
_decode_some = msgspec.msgpack.Decoder(_Saved).decode
_LENGTH = struct.Struct("<I")


def _save(known: _Saved, directory: Path, wall_offset_s: float) -> None:
    lasting = [
        (name, msgspec.structs.replace(entry, used_s=entry.used_s + wall_offset_s))
        for name, entry in known
        if entry.key
    ]
    body = bytearray()
    for start in range(0, len(lasting), _AT_ONCE):
        some = msgspec.msgpack.encode(lasting[start : start + _AT_ONCE])
        body += _LENGTH.pack(len(some)) + some
    try:
        write_sealed(directory / FILE_NAME, _KIND, _VERSION, bytes(body))
    except OSError as error:
        log.warning("sessions are not saved: %s", error.strerror)


def _decode(body: bytes) -> _Saved:
    """What `_save` wrote. Raises MsgspecError for what is none."""
    found: _Saved = []
    at = 0
    while at < len(body):
        start = at + _LENGTH.size
        (nbytes,) = _LENGTH.unpack(body[at:start].ljust(_LENGTH.size, b"\xff"))
        at = start + nbytes
        if at > len(body):
            raise msgspec.DecodeError("it is cut short inside")
        found += _decode_some(body[start:at])
    return found


def _lasting_key(leaf: Record) -> bytes:
    """Of the last blob of a context that may be told of on disk; b"" if there is none."""
    return _key_of(leaf, lambda record: record.retention is not Retention.VOLATILE)


def _saved_key(leaf: Record) -> bytes:
    """Of the last blob of a context that is on SSD; b"" if none is."""
    return _key_of(leaf, lambda record: record.has_row)


def _key_of(leaf: Record, suits: Callable[[Record], bool]) -> bytes:
    node: Record | None = leaf
    while node is not None and not suits(node):
        node = node.parent
    return node.key if node is not None else b""


def _continuing(record: Record) -> Iterator[Record]:
    """`record` and blobs that continue it, nearest first, as many as may be looked at."""
    waiting = deque([record])
    for _ in range(BLOBS_SEARCHED_MAX):
        if not waiting:
            return
        node = waiting.popleft()
        yield node
        waiting.extend(islice(node.children(), BLOBS_SEARCHED_MAX))

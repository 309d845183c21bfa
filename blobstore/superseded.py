"""Contexts that others have replaced: which blobs belong to them alone, and so go first.

A conversation that is compacted goes on in another branch of the tree. What only the old
branch used is marked from its leaf up, and leaves its tier before anything else once a
grace period is over. Marks are advice about order: nothing is dropped for them, and a use
takes them back. Used on the event loop only, but for what says that it reads or writes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path

import msgspec

from blobstore.index import Index, NamespaceState, Record
from blobstore.sessions import Sessions
from blobstore.tiering.due_bytes import DueBytes
from blobstore.tiering.first_out import FirstOut
from blobstore.tiering.policy import Policy
from blobstore.tiering.sealed_file import Unusable, read_sealed, write_sealed

SLICE = 256
"""Blobs marked between two turns of the loop: a millisecond."""

SAVED_MAX = 100_000
"""Branches told of in the file."""

FILE_NAME = "superseded"
_KIND = b"bs-super"
_VERSION = 1

_Saved = list[tuple[bytes, bytes, float]]
"""Namespace id, key of the first blob of a branch, and when that is due by the wall clock."""

log = logging.getLogger(__name__)


class Superseded:
    """Blobs of replaced contexts, from when on each goes first.

    Where a blob is marked, all that continue it are: what is shared with a living context
    never is. There is at most one mark for each blob that is held.
    """

    def __init__(
        self, index: Index, sessions: Sessions, clock: Callable[[], float], grace_s: float
    ) -> None:
        self._index = index
        self._sessions = sessions
        self._clock = clock
        self._grace_s = grace_s
        self._due_s: dict[Record, float] = {}
        self._tops: dict[Record, None] = {}
        """Marked blobs that continue none that is: the rest follows from them."""
        self._on_ssd: DueBytes[Record] = DueBytes(clock)
        self._replacing: set[Record] = set()
        """Where contexts end that have replaced others: they live, whatever goes on from there."""
        self._saved: _Saved = []
        self._changed = False
        self.on_marked: Callable[[Record], None] = lambda record: None
        """Called for each blob that has been marked: it may have a new place in its tiers."""
        index.on_added = self._added

    def __len__(self) -> int:
        return len(self._due_s)

    def first_out(self, order: Policy[Record]) -> FirstOut[Record]:
        """The order of a tier, but with what is due here before all others."""
        return FirstOut(order, self._due_s.get, self._clock)

    def first_out_of_ssd(self, order: Policy[Record]) -> FirstOut[Record]:
        """The same for the SSD, of which `ssd_bytes` then tells."""
        return FirstOut(order, self._due_s.get, self._clock, self._on_ssd)

    @property
    def ssd_bytes(self) -> int:
        """Payloads on SSD that go first by now: whoever wants their room may count on it."""
        return self._on_ssd.now_bytes

    def goes_first(self, record: Record) -> bool:
        """Whether the blob's context was replaced, and the grace period is over."""
        due_s = self._due_s.get(record)
        return due_s is not None and due_s <= self._clock()

    def standing(self, record: Record) -> dict[str, float]:
        """For people: in how many seconds the blob goes first, {} if it is not marked."""
        due_s = self._due_s.get(record)
        return {} if due_s is None else {"first_in_s": max(0.0, due_s - self._clock())}

    async def replace(self, ns: NamespaceState, old_key: bytes, new_key: bytes) -> int:
        """The context that ends at `old_key` goes on as the one that ends at `new_key`.

        How many blobs only the old one has; 0 also where either is not held. The new one, if
        it was marked itself, is so no more.
        """
        old, new = ns.blobs.get(old_key), ns.blobs.get(new_key)
        if old is None or new is None or old is new:
            return 0
        self.used(new)
        self._replacing.discard(old)
        self._replacing.add(new)
        self._sessions.moved(old, new)
        return await self._mark_up(old, self._clock() + self._grace_s)

    def used(self, record: Record) -> None:
        """Somebody uses the context that ends at `record`: it lives."""
        node: Record | None = record
        while node is not None and node in self._due_s:
            self._unmark(node)
            node = node.parent

    def forget(self, record: Record) -> None:
        """The blob has gone."""
        self._replacing.discard(record)
        if record in self._due_s:
            self._unmark(record)

    def stats(self) -> dict[str, int]:
        """For the store's gauges."""
        return {"blobs": len(self._due_s), "branches": len(self._tops)}

    def load(self, directory: Path) -> None:
        """Read what was saved in `directory`, for `adopt`. Blocks; what goes wrong is logged."""
        try:
            body = read_sealed(directory / FILE_NAME, _KIND, _VERSION)
            self._saved = msgspec.msgpack.decode(body, type=_Saved)
        except (Unusable, msgspec.MsgspecError) as error:
            if (directory / FILE_NAME).exists():
                log.warning("superseded contexts from before are not known: %s", error)

    def adopt(self, wall_offset_s: float) -> None:
        """Mark again what was marked when it was saved, and is in the index.

        What was used after it was due was not marked any more, whatever an older file says.
        """
        saved, self._saved = self._saved, []
        latest_s = self._clock() + self._grace_s
        for namespace_id, key, due_wall_s in saved:
            ns = self._index.namespaces.get(namespace_id)
            top = ns.blobs.get(key) if ns is not None else None
            due_s = min(due_wall_s - wall_offset_s, latest_s)
            for record in reversed(self._index.subtree(top)) if top is not None else ():
                if record.last_used <= due_s and self._is_bare(record):
                    self._mark(record, due_s)

    def unsaved(self, directory: Path, wall_offset_s: float) -> Callable[[], None] | None:
        """Work that saves the marks in `directory`, if any has changed since this was called.

        It blocks, may run on any thread, and only logs what goes wrong.
        """
        if not self._changed:
            return None
        self._changed = False
        lasting = (top for top in self._tops if top.has_row)
        saved = [
            (top.ns.id, top.key, self._due_s[top] + wall_offset_s)
            for top in islice(lasting, SAVED_MAX)
        ]
        return partial(_save, saved, directory)

    async def _mark_up(self, old: Record, due_s: float) -> int:
        node: Record | None = old
        n = 0
        while node is not None and self._is_bare(node):
            if node in self._replacing or (node is not old and self._sessions.ends_at(node)):
                break
            if node not in self._due_s:
                self._mark(node, due_s)
            n += 1
            if n % SLICE == 0:
                await asyncio.sleep(0)
                if not (node.gone or node in self._due_s):
                    break  # it was used meanwhile
            node = node.parent
        return n

    def _is_bare(self, record: Record) -> bool:
        """Nothing that is not marked continues the blob, which is held."""
        return not record.gone and all(child in self._due_s for child in record.children())

    def _mark(self, record: Record, due_s: float) -> None:
        self._due_s[record] = due_s
        if record.ssd is not False:
            self._on_ssd.add(record, due_s, record.nbytes)
        self._tops[record] = None
        for child in record.children():
            self._tops.pop(child, None)
        self._changed = True
        self.on_marked(record)

    def _unmark(self, record: Record) -> None:
        del self._due_s[record]
        self._on_ssd.remove(record)
        self._tops.pop(record, None)
        self._tops.update((child, None) for child in record.children() if child in self._due_s)
        self._changed = True

    def _added(self, record: Record) -> None:
        """A new blob continues its parent, which lives therefore."""
        if self._due_s and record.parent is not None:
            self.used(record.parent)


def _save(saved: _Saved, directory: Path) -> None:
    try:
        write_sealed(directory / FILE_NAME, _KIND, _VERSION, msgspec.msgpack.encode(saved))
    except OSError as error:
        log.warning("superseded contexts are not saved: %s", error.strerror)

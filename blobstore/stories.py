"""What happened to single blobs of late, and why, so that a person can be told.

Bounded, whatever goes on: some events of each of the blobs that something happened to
last, also of those that are gone. Noting one costs about a microsecond; uses are not
events. Used on the event loop only.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blobstore.index import Record

BLOBS_MAX = 65_536
EVENTS_MAX = 8
"""Of one blob; the oldest are forgotten."""

_FIELDS = 3
_KEPT = _FIELDS * (EVENTS_MAX - 1)
"""Of what is remembered of a blob, so that another event finds room."""


class Stories:
    """Events by blob: when, what, and why."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, *, blobs_max: int = BLOBS_MAX
    ) -> None:
        self._clock = clock
        self._blobs_max = blobs_max
        self._events: OrderedDict[bytes, tuple[Any, ...]] = OrderedDict()
        """By namespace id and key, in the order of each blob's last event: when, what, why of
        one event after the other, in one tuple, which takes half the memory of several."""

    def __len__(self) -> int:
        return len(self._events)

    def note(self, record: Record, what: str, why: str = "") -> None:
        """Something happened to the blob.

        Args:
            record: the blob, known or already discarded.
            what: a crossing as counters have it ("dram>ssd"), "refused ssd", "put", …
            why: the reason as counters have it, or a detail in plain words.
        """
        blob = record.ns.id + record.key
        before = self._events.pop(blob, ())
        self._events[blob] = (*before[-_KEPT:], self._clock(), what, why)
        if len(self._events) > self._blobs_max:
            self._events.popitem(last=False)

    def of(self, namespace_id: bytes, key: bytes) -> list[dict[str, Any]]:
        """What is remembered of one blob, oldest first."""
        now_s = self._clock()
        told = self._events.get(namespace_id + key, ())
        return [
            {"ago_s": max(0.0, now_s - told[at]), "what": told[at + 1], "why": told[at + 2]}
            for at in range(0, len(told), _FIELDS)
        ]

"""Rebuilt blobs whose bytes are not those of before: taken, told of or refused, as is agreed.

A runner may compute the same tokens to bytes that differ in the last bits, on another GPU
or with another version of a kernel. Both are valid; whether both are welcome is for each
namespace to say. Used on the event loop only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from blobstore.counters import Counters
from blobstore.index import NamespaceState, Record
from blobstore.stories import Stories

REPORTS_MAX = 32
"""Divergences that are remembered with both digests."""


class Divergences:
    """Judges rebuilt blobs; `terms` says accept, report or reject of a namespace."""

    def __init__(
        self,
        terms: Callable[[NamespaceState], str],
        counters: Counters,
        stories: Stories,
        clock: Callable[[], float],
    ) -> None:
        self._terms = terms
        self._counters = counters
        self._stories = stories
        self._clock = clock
        self._reports: deque[tuple[float, dict[str, str]]] = deque(maxlen=REPORTS_MAX)

    def may_keep(self, record: Record, was: bytes, *, promised: bool = False) -> bool:
        """Whether `record`, sealed by a runner, may stand for bytes of the digest `was`.

        Not if these are held and were `promised` to be kept, whatever is agreed on.
        """
        if record.digest == was:
            return True
        terms = "reject" if promised else self._terms(record.ns)
        self._counters.diverged_blobs[terms] += 1
        if terms == "report":
            self._report(record, was)
        return terms != "reject"

    def stats(self) -> list[dict[str, Any]]:
        """The last reports, oldest first."""
        now_s = self._clock()
        return [{"ago_s": max(0.0, now_s - at_s), **report} for at_s, report in self._reports]

    def _report(self, record: Record, was: bytes) -> None:
        told = {"was": was.hex(), "is": record.digest.hex()}
        names = {"namespace": record.ns.id.hex(), "key": record.key.hex()}
        self._reports.append((self._clock(), {**names, **told}))
        self._stories.note(record, "diverged", f"digest {told['was']} before, {told['is']} now")

"""What the store has done since it started, by number. Used on the event loop only."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from blobstore.ages import Ages

if TYPE_CHECKING:
    from blobstore.index import Record

ByReason = defaultdict[str, Counter[str]]
"""Numbers by a place or a crossing, and by reason."""


NOWHERE = "none"
"""Where a crossing ends when a copy is given up."""

_NOT_COUNTED = {"counted": False}


def _by_reason() -> ByReason:
    return defaultdict(Counter)


@dataclass(slots=True)
class Counters:
    """Totals; the names are those of `stats`."""

    matches: int = 0
    gets: int = 0
    hit_blobs: Counter[str] = field(default_factory=Counter)
    """Blobs given out, by the tier that they came from."""
    hit_bytes: Counter[str] = field(default_factory=Counter)
    hit_tokens: Counter[str] = field(default_factory=Counter)
    missed_blobs: Counter[str] = field(default_factory=Counter)
    """Blobs asked for and not given, by reason."""
    put_blobs: Counter[str] = field(default_factory=Counter)
    """Blobs sealed, by result."""
    put_bytes: int = 0
    rebuilt_blobs: Counter[str] = field(default_factory=Counter)
    """Blobs sealed by model runners that made them again, by result."""
    diverged_blobs: Counter[str] = field(default_factory=Counter)
    """Of those, the ones with other bytes than before, by what is agreed on for these."""
    loaded_blobs: int = 0
    loaded_bytes: int = 0
    saved_blobs: int = 0
    saved_bytes: int = 0
    demoted: int = 0
    """Copies in DRAM given up; the blob stays on SSD."""
    dropped: int = 0
    """Blobs evicted from their last tier."""
    ssd_evicted: int = 0
    corrupt: int = 0
    """Copies that failed their digest; each was put aside and never returned."""
    ssd_errors: int = 0
    """Reads, writes and commits that the disk refused."""
    unsaved: int = 0
    """Blobs that could not be written to SSD and live in DRAM alone."""
    lost_unsaved: int = 0
    """Blobs that were to be on SSD, could not be written, and left DRAM."""
    expired_reservations: int = 0
    aborted_reservations: int = 0
    moved_blobs: ByReason = field(default_factory=_by_reason)
    """Blobs that crossed between places, by crossing ("dram>ssd") and reason."""
    moved_bytes: ByReason = field(default_factory=_by_reason)
    refused_blobs: ByReason = field(default_factory=_by_reason)
    """Blobs that were considered for a tier and not let in, by tier and reason."""
    refused_bytes: ByReason = field(default_factory=_by_reason)
    clock: Callable[[], float] = field(default=time.monotonic, metadata=_NOT_COUNTED)
    """That of `Record.last_used`."""
    ages: Ages = field(default_factory=Ages, metadata=_NOT_COUNTED)

    def moved(self, crossing: str, reason: str, record: Record) -> None:
        """Count a blob that crossed, and its age if it left for good.

        Args:
            crossing: as "dram>ssd"; "dram>none" where the copy in DRAM was given up, whatever
                other copies there are, and "ssd>none" likewise.
            reason: of `reasons.MOVED`.
            record: the blob; its time of last use must still be known.
        """
        self.moved_blobs[crossing][reason] += 1
        self.moved_bytes[crossing][reason] += record.nbytes
        tier, _, to = crossing.partition(">")
        if to == NOWHERE:
            self.ages.left(tier, self.clock() - record.last_used)

    def refused(self, tier: str, reason: str, record: Record) -> None:
        """Count a blob that was not let into `tier`, for a reason of `reasons.REFUSED`."""
        self.refused_blobs[tier][reason] += 1
        self.refused_bytes[tier][reason] += record.nbytes

    def as_dict(self) -> dict[str, Any]:
        """A copy as plain values."""
        return {
            f.name: _plain(getattr(self, f.name))
            for f in dataclasses.fields(self)
            if not f.metadata
        }


def _plain(value: Any) -> Any:
    if isinstance(value, defaultdict):
        return {name: dict(inner) for name, inner in value.items()}
    return dict(value) if isinstance(value, Counter) else value

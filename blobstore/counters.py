"""What the store has done since it started, by number. Used on the event loop only."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from typing import Any


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

    def as_dict(self) -> dict[str, Any]:
        """A copy as plain values."""
        return {
            f.name: dict(value) if isinstance(value, Counter) else value
            for f in dataclasses.fields(self)
            for value in (getattr(self, f.name),)
        }

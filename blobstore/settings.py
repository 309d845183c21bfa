"""What the store must be told: plain numbers, already checked against this machine.

People write sizes and `auto` in the configuration (config.py); sizing.py turns
them into these numbers. The store reads nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from blobstore.errors import InvalidRequest
from blobstore.terms import Terms
from blobstore.units import GIB, MIB, format_size

HUGE_PAGES = ("off", "auto", "require")

OWN_POLICY = "ours"
"""The order that is learned from this node's own past."""
POLICIES = (OWN_POLICY, "lru", "fifo", "lfu", "lfuda", "lru2", "arc", "s3fifo", "wtinylfu", "gdsf")
OBJECTIVES = ("tokens", "cost")

_POSITIVE = (
    "dram_bytes",
    "reservation_ttl_s",
    "io_threads",
    "max_leases_per_client",
    "max_clients",
)
_NOT_NEGATIVE = ("staging_bytes", "ssd_bytes", "lent_bytes_max", "scratch_bytes")
_TIERING_NOT_NEGATIVE = (
    "ssd_writes_per_day",
    "demote_rate",
    "promote_rate",
    "fetch_rate",
    "supersede_grace_s",
)


@dataclass(frozen=True, slots=True)
class TieringSettings:
    """What decides where blobs are kept, and how fast they may move. Limits of 0 are none.

    Raises InvalidRequest for values that contradict each other.
    """

    policy: str = OWN_POLICY
    """One of POLICIES."""
    objective: Literal["tokens", "cost"] = "tokens"
    """What a hit is worth: its tokens, or the cost of prefilling them, which grows with
    their position."""
    dram_low: float = 1 / 16
    """The share of DRAM that is free or may leave at once below which blobs are moved out."""
    dram_high: float = 1 / 8
    """The share at which that ends."""
    ssd_spare: float = 0.05
    """The share of SSD beyond which only what is worth it is written there."""
    ssd_writes_per_day: int = 0
    """Bytes that SSD may take in a day: the disk's endurance."""
    demote_rate: int = 0
    """Bytes per second on their way from DRAM to SSD."""
    promote_rate: int = 0
    """Bytes per second that are loaded ahead of their use."""
    fetch_rate: int = 0
    """Bytes per second that are read from SSD, whatever for: of a disk shared with others."""
    supersede_grace_s: float = 60.0
    """For so long blobs of a context that was replaced are kept like all others."""

    def __post_init__(self) -> None:
        for name, known in (("policy", POLICIES), ("objective", OBJECTIVES)):
            if getattr(self, name) not in known:
                raise InvalidRequest(
                    f"{name} must be one of {', '.join(known)}, found {getattr(self, name)!r}"
                )
        for name in _TIERING_NOT_NEGATIVE:
            if getattr(self, name) < 0:
                raise InvalidRequest(f"{name} must be at least 0, found {getattr(self, name)}")
        if not 0 < self.dram_low < self.dram_high < 1:
            raise InvalidRequest(
                "dram_low must be above 0 and below dram_high, which is below 1; found "
                f"{self.dram_low} and {self.dram_high}"
            )
        if not 0 <= self.ssd_spare < 1:
            raise InvalidRequest(f"ssd_spare must be from 0 to below 1, found {self.ssd_spare}")


@dataclass(frozen=True, slots=True)
class RebuildSettings:
    """What is kept of tokens, and how blobs come back from them.

    The first three hold for namespaces of which nothing else was told (terms.py). Raises
    InvalidRequest for values that are out of bounds.
    """

    text: str = "tokens"
    recall: str = "fastest"
    divergence: str = "accept"
    text_quota: int = GIB
    """Bytes of all texts: the oldest go for new ones."""
    text_retention_days: float = 90.0
    """A text that was not noted again for so long goes."""
    jobs_max: int = 1000
    """Rebuilds that wait or run."""

    def __post_init__(self) -> None:
        Terms(self.text, self.recall, self.divergence)
        for name in ("text_quota", "text_retention_days", "jobs_max"):
            if getattr(self, name) <= 0:
                raise InvalidRequest(f"{name} must be above 0, found {getattr(self, name)}")

    @property
    def terms(self) -> Terms:
        """Of all namespaces of which nothing else was told."""
        return Terms(self.text, self.recall, self.divergence)


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Sizes and bounds of one store.

    Raises InvalidRequest for values that contradict each other.
    """

    data_dir: Path
    """Where the SSD tier lives; one daemon owns it."""
    dram_bytes: int
    """The arena: allocated in full when the store opens."""
    staging_bytes: int = 0
    """Kept free for loads, so that a full cache never blocks one. 0: see `staging_quota_bytes`."""
    ssd_bytes: int = 0
    """Physical bound of the SSD tier, catalogue included. 0: there is no SSD tier."""
    lent_bytes_max: int = 0
    """Most that one client may have on loan for writing. 0: see `lent_quota_bytes`."""
    reservation_ttl_s: float = 60.0
    """A reservation that is not sealed by then expires as a whole."""
    io_threads: int = 4
    """Workers that move bytes between the arena and the disk."""
    max_leases_per_client: int = 4096
    max_clients: int = 1024
    arena_directory: Path | None = None
    """A directory for the arena's (unlinked) file, tmpfs for example; None: a memfd."""
    huge_pages: str = "off"
    """"off", "auto" (use them where offered) or "require"."""
    scratch_bytes: int = 0
    """Memory that may be taken for a moment while the arena is allocated."""
    tiering: TieringSettings = field(default_factory=TieringSettings)
    """Where blobs are kept, and how fast they may move."""
    rebuild: RebuildSettings = field(default_factory=RebuildSettings)
    """What is kept of tokens, and how blobs come back from them."""

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) <= 0:
                raise InvalidRequest(f"{name} must be above 0, found {getattr(self, name)}")
        for name in _NOT_NEGATIVE:
            if getattr(self, name) < 0:
                raise InvalidRequest(f"{name} must be at least 0, found {getattr(self, name)}")
        if self.huge_pages not in HUGE_PAGES:
            raise InvalidRequest(
                f"huge_pages must be one of {', '.join(HUGE_PAGES)}, found {self.huge_pages!r}"
            )
        if self.staging_bytes >= self.dram_bytes:
            raise InvalidRequest(
                f"staging_bytes ({format_size(self.staging_bytes)}) must be smaller than "
                f"dram_bytes ({format_size(self.dram_bytes)})"
            )

    @property
    def staging_quota_bytes(self) -> int:
        """The reserve in force: by default 1/16 of DRAM, at least 16 MiB, at most 1/4."""
        if self.staging_bytes:
            return self.staging_bytes
        return min(max(self.dram_bytes // 16, 16 * MIB), self.dram_bytes // 4)

    @property
    def lent_quota_bytes(self) -> int:
        """The cap in force: by default half of DRAM."""
        return self.lent_bytes_max or self.dram_bytes // 2

"""What the store must be told: plain numbers, already checked against this machine.

People write sizes and `auto` in the configuration (config.py); sizing.py turns
them into these numbers. The store reads nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from blobstore.errors import InvalidRequest
from blobstore.units import MIB, format_size

HUGE_PAGES = ("off", "auto", "require")

_POSITIVE = (
    "dram_bytes",
    "reservation_ttl_s",
    "io_threads",
    "max_leases_per_client",
    "max_clients",
)
_NOT_NEGATIVE = ("staging_bytes", "ssd_bytes", "lent_bytes_max", "scratch_bytes")


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

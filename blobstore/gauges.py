"""The tiers as numbers: what they hold, what they could, and what moves between them."""

from __future__ import annotations

from typing import Any

from blobstore.loader import Loader
from blobstore.settings import StoreSettings
from blobstore.tiering.dram import DramTier
from blobstore.tiering.ssd import SsdTier
from blobstore.writeback import Writeback


def of_dram(dram: DramTier, settings: StoreSettings) -> dict[str, Any]:
    """The arena."""
    return {
        "capacity_bytes": dram.capacity_bytes,
        "used_bytes": dram.used_bytes,
        "free_bytes": dram.free_bytes,
        "staging_bytes": dram.staging_bytes,
        "blobs": dram.n_extents,
        "largest_free_bytes": dram.largest_free_bytes,
        "fragmentation": dram.fragmentation,
        "huge_pages": settings.huge_pages,
    }


def of_ssd(ssd: SsdTier, writeback: Writeback | None) -> dict[str, Any]:
    """The disk, and what is on its way there."""
    return {
        "capacity_bytes": ssd.capacity_bytes,
        "used_bytes": ssd.used_bytes,
        "free_bytes": ssd.free_bytes,
        "dirty_bytes": writeback.dirty_bytes if writeback is not None else 0,
        **ssd.stats(),
    }


def of_moves(writeback: Writeback | None, loader: Loader | None) -> dict[str, Any]:
    """What is on its way between tiers; {} if there is but one."""
    if writeback is None or loader is None:
        return {}
    return {**writeback.mover.stats(), **loader.stats()}

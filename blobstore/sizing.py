"""From what was configured to what this machine can hold.

`auto` becomes a number here, and a size that would end in an out-of-memory kill
is refused here: before anything is allocated, with both numbers.
"""

from __future__ import annotations

from dataclasses import asdict

from blobstore import host
from blobstore.config import Config
from blobstore.config_values import AUTO
from blobstore.errors import NotEnough
from blobstore.settings import RebuildSettings, StoreSettings, TieringSettings
from blobstore.units import GIB, MIB, format_size

DRAM_SHARE = 0.6
"""Of the memory that is free: the rest is for the workers that this daemon serves."""
SSD_SHARE = 0.5
"""Of the disk that is free, or taken by this store already."""
SMALLEST_BYTES = 64 * MIB
"""Below this, `auto` refuses: a tier of a few blobs hides a machine that is too small."""

SCRATCH_BYTES_MAX = 8 * GIB
"""Zeroing it holds up the start by a second or two."""
SCRATCH_SHARE_MAX = 4
"""Times the arena: a small one starts quickly."""


def settings_for(config: Config) -> StoreSettings:
    """The store's settings on this machine, as it is now.

    Raises NotEnough when a size is above what the machine or its cgroup grants,
    InvalidRequest when sizes contradict each other.
    """
    memory = host.memory(config.host.root)
    dram = dram_bytes(config, memory)
    staging, lent = config.dram.staging, config.local.lent_max
    return StoreSettings(
        data_dir=config.store.data,
        dram_bytes=dram,
        staging_bytes=0 if staging == AUTO else staging,
        ssd_bytes=ssd_bytes(config),
        lent_bytes_max=0 if lent == AUTO else lent,
        reservation_ttl_s=config.times.reservation_s,
        io_threads=config.ssd.io_threads,
        max_leases_per_client=config.local.max_leases_per_client,
        max_clients=config.local.max_clients,
        arena_directory=config.dram.directory,
        huge_pages=config.dram.huge_pages,
        scratch_bytes=min(
            max(memory.room_bytes - dram, 0) // 2, SCRATCH_SHARE_MAX * dram, SCRATCH_BYTES_MAX
        ),
        tiering=TieringSettings(**asdict(config.tiering)),
        rebuild=RebuildSettings(**asdict(config.rebuild)),
    )


def dram_bytes(config: Config, memory: host.Memory) -> int:
    """The arena's size. Raises NotEnough as `settings_for` does."""
    wanted = config.dram.size
    if wanted != AUTO:
        _check_memory(wanted, memory)
        return wanted
    room = memory.room_bytes
    if memory.limit is not None:
        room = min(room, memory.limit.nbytes)
    place = config.dram.directory
    if place is not None:
        room = min(room, host.free_bytes(place))
    found = int(room * DRAM_SHARE) // MIB * MIB
    if found < SMALLEST_BYTES:
        raise NotEnough(
            f"dram.size = auto: {DRAM_SHARE} of {format_size(room)} free is less than the "
            f"{format_size(SMALLEST_BYTES)} that auto needs: free memory, or give --dram a size"
        )
    return found


def _check_memory(wanted: int, memory: host.Memory) -> None:
    limit = memory.limit
    if limit is not None and wanted > limit.nbytes:
        raise NotEnough(
            f"dram.size: wanted {format_size(wanted)}, but the memory limit is "
            f"{format_size(limit.nbytes)} ({limit.where}): lower --dram or raise the limit"
        )
    if wanted > memory.room_bytes:
        raise NotEnough(
            f"dram.size: wanted {format_size(wanted)}, but {format_size(memory.room_bytes)} of "
            f"memory are available: lower --dram or free memory"
        )


def ssd_bytes(config: Config) -> int:
    """The SSD tier's bound, 0 for none. A bound above the disk is allowed: full is full."""
    wanted = config.ssd.size
    if wanted != AUTO:
        return wanted
    data = config.store.data
    room = host.free_bytes(data) + host.used_bytes(data)
    found = int(room * SSD_SHARE) // MIB * MIB
    if found < SMALLEST_BYTES:
        raise NotEnough(
            f"ssd.size = auto: {SSD_SHARE} of {format_size(room)} free at {data} is less than the "
            f"{format_size(SMALLEST_BYTES)} that auto needs: free disk space, give --ssd a size, "
            "or --ssd off"
        )
    return found

"""The tiers of a store, made as its settings say."""

from __future__ import annotations

from blobstore.index import Record, identity
from blobstore.settings import StoreSettings
from blobstore.tiering.arena import Arena
from blobstore.tiering.dram import DramTier
from blobstore.tiering.plan import Plan, PlanSettings, make_plan
from blobstore.tiering.policy import PolicyTerms
from blobstore.tiering.ssd import SsdTier

MODEL_NAME = "model"
"""Of the file of what the plan has learned."""


def plan_of(settings: StoreSettings, dram: DramTier, ssd: SsdTier | None) -> Plan[Record]:
    """Who decides what stays in these tiers."""
    tiering = settings.tiering
    return make_plan(
        tiering.policy,
        PolicyTerms(dram.capacity_bytes, identity),
        PolicyTerms(ssd.capacity_bytes, identity) if ssd is not None else None,
        PlanSettings(
            objective=tiering.objective,
            ssd_writes_per_day=tiering.ssd_writes_per_day or None,
            ssd_spare=tiering.ssd_spare,
            model_path=settings.data_dir / MODEL_NAME if ssd is not None else None,
        ),
    )


def arena_of(settings: StoreSettings) -> Arena:
    """The memory of DRAM, allocated in full. Blocks; raises SetupError with nothing left behind."""
    arena = Arena.create(
        settings.dram_bytes,
        directory=settings.arena_directory,
        huge_pages=settings.huge_pages,
        scratch_bytes=settings.scratch_bytes,
    )
    try:
        arena.populate()
    except BaseException:
        arena.close()
        raise
    return arena

"""`blobstore bench tiers`: what each tier, and HTTP, gives beside its physical limit."""

from __future__ import annotations

from blobstore.bench import tiers_dram, tiers_http, tiers_ssd
from blobstore.bench.report import Row
from blobstore.bench.setup import Setup


def rows(setup: Setup) -> list[Row]:
    """The rows of all tiers of this node, and of what comes and goes over HTTP."""
    return [*tiers_dram.rows(setup), *tiers_ssd.rows(setup), *tiers_http.rows(setup)]

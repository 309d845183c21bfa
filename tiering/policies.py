"""The known policies by name: what ours is measured beside, and what it falls back to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from blobstore.tiering.arc import Arc
from blobstore.tiering.fifo import Fifo
from blobstore.tiering.gdsf import Gdsf, LfuDa
from blobstore.tiering.lfu import Lfu
from blobstore.tiering.lru import LeafLru
from blobstore.tiering.lru_k import LruK
from blobstore.tiering.policy import Policy, PolicyTerms
from blobstore.tiering.s3fifo import S3Fifo
from blobstore.tiering.wtinylfu import WTinyLfu

POLICIES: Mapping[str, Callable[[PolicyTerms[Any]], Policy[Any]]] = {
    "lru": lambda terms: LeafLru(),
    "fifo": lambda terms: Fifo(),
    "lfu": lambda terms: Lfu(),
    "lfuda": lambda terms: LfuDa(),
    "lru2": LruK,
    "arc": Arc,
    "s3fifo": S3Fifo,
    "wtinylfu": WTinyLfu,
    "gdsf": lambda terms: Gdsf(),
}
"""`lfu` counts without aging, `lfuda` with; for items of one size `gdsf` is `lfuda`."""

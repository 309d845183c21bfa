"""Least recently used first."""

from __future__ import annotations

from blobstore.tiering.keyed import KeyedPolicy
from blobstore.tiering.policy import T


class LeafLru(KeyedPolicy[T]):
    """Least recently used first; among equals, the one offered first."""

    def key(self, item: T, last_used: float) -> float:
        """As KeyedPolicy.key."""
        return last_used

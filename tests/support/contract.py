"""What the tests of the clients' contract do again and again, through a client of either kind."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

from blobstore.clients import BoundNamespace
from blobstore.units import MIB
from tests.support.blobs import chain, opaque
from tests.support.polling import poll_until

DRAM_BYTES = 32 * MIB
"""Of the daemon that the contract tests share: small, so that it is soon full."""

_FLOOD = opaque(MIB, "flood")
_FLOOD_BLOBS = 16
_seeds = count()


def flood(kv: Any, nbytes: int = 2 * DRAM_BYTES) -> None:
    """Put so many bytes of contexts that nobody will ask for."""
    ns = kv.namespace(_FLOOD)
    zeros = [bytes(MIB)] * _FLOOD_BLOBS
    for _ in range(nbytes // MIB // _FLOOD_BLOBS):
        keys = chain(_FLOOD, next(_seeds), _FLOOD_BLOBS)
        results = kv.put_from(ns, keys, zeros, retention="volatile")
        assert results == ["stored"] * _FLOOD_BLOBS


def make_cold(kv: Any, ns: BoundNamespace, keys: Sequence[bytes]) -> None:
    """Bring blobs to where only the SSD has them."""

    def cold() -> bool:
        kv.drop(ns, keys, "dram")
        return all(facts["tiers"] == ["ssd"] for facts in kv.stat(ns, keys))

    poll_until(cold, 10.0, "the blobs are on SSD alone")


def holds_nothing(kv: Any) -> bool:
    """Whether no client has a lease, a loan or a pin."""
    stats = kv.stats()
    return not any(
        stats[name]
        for name in ("leases", "reservations", "lent_bytes", "pinned_bytes", "waiting_for_room")
    )

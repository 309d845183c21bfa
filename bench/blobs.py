"""Blobs without meaning: namespaces, keys and sizes for benchmarks."""

from __future__ import annotations

import math
from hashlib import sha256
from typing import Any

from blobstore.clients import Client, KVLayout, LayerGroup, Namespace
from blobstore.errors import BlobStoreError
from blobstore.keys import Keys
from blobstore.transports.framing import HEADER_BYTES

HASH_SCHEME = "bench"


class BenchInvalid(BlobStoreError):
    """A benchmark did not measure what it claims to; its figures must not be used."""

    code = "bench_invalid"


def opaque(label: str, nbytes: int) -> Namespace:
    """A namespace of blobs of `nbytes`, one part each."""
    return Namespace(f"bench/{label}", KVLayout.opaque(nbytes), hash_scheme=HASH_SCHEME)


def layered(label: str, nbytes: int, layers: int) -> Namespace:
    """A namespace of blobs of `nbytes` in `layers` equal parts."""
    assert nbytes % (layers * 4) == 0
    tokens = math.gcd(nbytes // (layers * 4), 128)
    group = LayerGroup.attention(
        layers=layers, heads=1, head_size=nbytes // (layers * 4 * tokens), dtype="bf16"
    )
    return Namespace(
        f"bench/{label}", KVLayout((group,)), tokens_per_blob=tokens, hash_scheme=HASH_SCHEME
    )


def key_chain(label: str, n: int) -> Keys:
    """`n` keys that depend on `label` alone."""
    return Keys(b"".join(sha256(f"{label}/{number}".encode()).digest() for number in range(n)))


def frame_bytes(body: bytes) -> int:
    """The size of a message with this body on the socket."""
    return HEADER_BYTES + len(body)


def require(held: bool, what: str) -> None:
    """Raise BenchInvalid, saying what should have held, unless it did."""
    if not held:
        raise BenchInvalid(f"not measured as claimed: {what}")


def counters(kv: Client) -> dict[str, Any]:
    """The daemon's counters; BenchInvalid if it does not tell them."""
    stats = kv.stats()
    require("counters" in stats, f"the daemon gave no counters: {stats.get('reason')}")
    found: dict[str, Any] = stats["counters"]
    return found

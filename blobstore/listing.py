"""What is held, as facts for people and programs: namespaces, and the blobs of one.

Pages are in ascending order of id or key and go on after the last one of the page before,
so they need no memory of the reader and are not disturbed by what is put or dropped in
between: that may or may not be shown, all else is shown once. A page costs what is on
it, however much is held (measured: 2 ms for 1,000 blobs).
"""

from __future__ import annotations

from itertools import islice
from typing import Any

from blobstore.errors import InvalidRequest
from blobstore.index import Index, NamespaceState, Record
from blobstore.keys import KEY_BYTES_MAX

LIMIT_MAX = 1000
"""Of one page of blobs: bounds the reply, and how long others wait for it."""


def namespaces(index: Index, after: bytes, limit: int) -> list[dict[str, Any]]:
    """Facts about the namespaces whose ids come after `after`, `limit` of them at most."""
    _check_cursor(after)
    states = index.namespaces
    return [namespace_facts(states[ns_id]) for ns_id in islice(index.order.after(after), limit)]


def page_of_namespaces(index: Index, after: bytes, limit: int) -> dict[str, Any]:
    """The same for `limit` of 1 to LIMIT_MAX, and where the next page goes on ("next").

    The latter is empty if that was all.
    """
    check_limit(limit)
    found = namespaces(index, after, limit + 1)
    page = found[:limit]
    following = bytes.fromhex(page[-1]["id"]) if len(found) > limit else b""
    return {"namespaces": page, "next": following}


def blobs(
    state: NamespaceState, after: bytes, limit: int, now_s: float
) -> tuple[list[dict[str, Any]], bytes]:
    """Facts about the blobs whose keys come after `after`, and where the next page goes on.

    The latter is empty if that was all. Raises InvalidRequest for a `limit` that is not from
    1 to LIMIT_MAX.
    """
    check_limit(limit)
    _check_cursor(after)
    keys = list(islice(state.order.after(after), limit + 1))
    page = keys[:limit]
    return (
        [blob_facts(state.blobs[key], now_s) for key in page],
        page[-1] if len(keys) > limit else b"",
    )


def namespace_facts(state: NamespaceState) -> dict[str, Any]:
    """One namespace: what it is called, and what it takes. Bytes are payloads of its blobs."""
    namespace = state.namespace
    return {
        "id": state.id.hex(),
        "model": namespace.model,
        "revision": namespace.revision,
        "adapter": namespace.adapter,
        "tokens_per_blob": namespace.tokens_per_blob,
        "blob_bytes": state.full_bytes,
        "blobs": len(state.blobs),
        "dram_bytes": state.dram_bytes,
        "ssd_bytes": state.ssd_bytes,
    }


def blob_facts(record: Record, now_s: float) -> dict[str, Any]:
    """One blob: identity, sizes, and where its bytes are. `now_s` is by the store's clock."""
    tiers = []
    if record.packed:
        tiers.append("dram")
    if record.ssd is not False:
        tiers.append("ssd")
    return {
        "key": record.key.hex(),
        "parent": record.parent.key.hex() if record.parent is not None else "",
        "depth": record.depth,
        "tokens": record.tokens,
        "nbytes": record.nbytes,
        "digest": record.digest.hex(),
        "retention": record.retention.name.lower(),
        "tiers": tiers,
        "pins": record.pins,
        "dirty": record.dirty,
        "idle_s": max(0.0, now_s - record.last_used),
    }


def check_limit(limit: int) -> None:
    """InvalidRequest unless a page may have so many entries."""
    if not 1 <= limit <= LIMIT_MAX:
        raise InvalidRequest(f"limit={limit} is not from 1 to {LIMIT_MAX}")


def _check_cursor(after: bytes) -> None:
    if len(after) > KEY_BYTES_MAX:
        raise InvalidRequest(f"after has {len(after)} bytes, keys have {KEY_BYTES_MAX} at most")

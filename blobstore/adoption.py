"""The index of a store that starts, built from the rows of its SSD tier."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from blobstore.index import Index, Record, Retention
from blobstore.key_order import KeyOrder
from blobstore.namespace import Namespace
from blobstore.tiering.ssd import SsdTier

_RETENTION = {retention.name.lower(): retention for retention in Retention}


def adopt_rows(ssd: SsdTier, index: Index, wall_offset_s: float) -> None:
    """Fill an empty index with a record for every row, linked to its parent.

    `wall_offset_s` is the wall clock's reading less that of the store's clock.
    """
    for encoded in ssd.namespaces().values():
        index.declare(Namespace.decode(encoded))
    with _no_garbage_collection():
        children: list[tuple[Record, bytes]] = []
        for row in ssd.rows():
            state = index.namespaces[row.namespace]
            record = Record(state, row.key, None, row.nbytes, row.tokens)
            record.digest, record.pieces = row.digest, row.pieces
            if row.is_hole:
                record.hole = record.stub = True
                index.n_holes += 1
            else:
                record.retention = _RETENTION[row.retention]
                record.show_on_ssd(True if row.extent is None else row.extent)
            record.last_used = row.last_used_wall_s - wall_offset_s
            state.blobs[row.key] = record
            if row.parent:
                children.append((record, row.parent))
        for state in index.namespaces.values():
            state.order = KeyOrder(state.blobs)
        for record, parent_key in children:
            record.parent = record.ns.blobs[parent_key]
            record.parent.adopt(record)
        for record, _ in children:
            _measure_depth(record)


def _measure_depth(record: Record) -> None:
    """Set the depth of a record, and of ancestors that have none yet."""
    path = []
    node = record
    while node.parent is not None and node.depth == 1:
        path.append(node)
        node = node.parent
    depth = node.depth
    for below in reversed(path):
        depth += 1
        below.depth = depth


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collections would walk the growing index again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

"""Cutting a chain into windows, so that a context may exceed the arena."""

from __future__ import annotations

from collections.abc import Sequence

from blobstore.protocol import KEYS_MAX

WINDOW_BYTES = 32 << 20
"""Large against a round trip (50 µs), small against what the last window leaves unoverlapped."""


def windows(sizes: Sequence[int], lent_bytes_max: int, blobs_max: int = KEYS_MAX) -> list[range]:
    """Positions of consecutive blobs that are leased or lent at once: one, or up to a window.

    No window has more than `blobs_max`. Two windows are under way at a time, beside whatever
    else the caller holds of the `lent_bytes_max` that the daemon lends it.
    """
    limit = min(WINDOW_BYTES, lent_bytes_max // 4)
    cut = []
    first = taken = 0
    for at, nbytes in enumerate(sizes):
        if at > first and (taken + nbytes > limit or at - first == blobs_max):
            cut.append(range(first, at))
            first, taken = at, 0
        taken += nbytes
    if first < len(sizes):
        cut.append(range(first, len(sizes)))
    return cut

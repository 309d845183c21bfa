"""What can be believed of a catalogue and segment files that were found.

A row is dropped if its bytes fail their checksum, its payload cannot be whole,
its extent overlaps another's, or an ancestor of it is missing; everything else
stands. Payloads have digests of their own, checked by whoever loads them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from blobstore.tiering.catalogue import Catalogue
from blobstore.tiering.placement import HEADER_BYTES, blocks_of
from blobstore.tiering.row import is_sound, place_of
from blobstore.tiering.tier import Extent


@dataclass(slots=True)
class Findings:
    """The outcome of a survey: extents that stand, row keys to drop, and why."""

    extents: list[Extent] = field(default_factory=list)
    dropped: list[bytes] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)

    def drop(self, row_key: bytes, reason: str) -> None:
        """Enter a row that is not to be believed."""
        self.dropped.append(row_key)
        self.reasons[reason] += 1


def survey(catalogue: Catalogue, sizes: Mapping[int, int]) -> Findings:
    """Read the whole catalogue against the segment files of `sizes`; changes nothing.

    The extents found are disjoint and sorted by place and offset.
    """
    findings = Findings()
    inline = dict(catalogue.inline_sizes())
    parents: dict[bytes, bytes] = {}
    placed: list[tuple[int, int, int, bytes]] = []
    for row_key, record in catalogue.records():
        if catalogue.namespace_of(row_key) is None or not is_sound(row_key, record):
            inline.pop(row_key, None)
            findings.drop(row_key, "damaged")
            continue
        extent, nbytes, parent = place_of(row_key, record)
        if extent is None:
            if inline.pop(row_key, None) != nbytes:
                findings.drop(row_key, "cut")
                continue
        elif not _fits(extent, sizes):
            findings.drop(row_key, "cut")
            continue
        else:
            placed.append((extent.place, extent.offset, nbytes, row_key))
        parents[row_key] = parent
    for row_key in inline:
        findings.drop(row_key, "without_row")
    placed.sort()
    for row_key in _overlapping(placed):
        del parents[row_key]
        findings.drop(row_key, "overlapping")
    for row_key in _orphans(parents):
        del parents[row_key]
        findings.drop(row_key, "orphaned")
    findings.extents = [
        Extent(place, offset, nbytes)
        for place, offset, nbytes, row_key in placed
        if row_key in parents
    ]
    return findings


def _fits(extent: Extent, sizes: Mapping[int, int]) -> bool:
    end = extent.offset + blocks_of(extent.nbytes)
    return extent.offset >= HEADER_BYTES and end <= sizes.get(extent.place, 0)


def _overlapping(placed: list[tuple[int, int, int, bytes]]) -> set[bytes]:
    """Both rows of every pair that claims the same bytes: which one is right is unknown."""
    found = set()
    for (place, offset, nbytes, row_key), (next_place, next_offset, _, next_key) in pairwise(
        placed
    ):
        if place == next_place and offset + blocks_of(nbytes) > next_offset:
            found |= {row_key, next_key}
    return found


def _orphans(parents: Mapping[bytes, bytes]) -> list[bytes]:
    """Rows whose chain does not reach a root."""
    lost = [row_key for row_key, parent in parents.items() if parent and parent not in parents]
    if lost:
        children = defaultdict(list)
        for row_key, parent in parents.items():
            children[parent].append(row_key)
        for row_key in lost:  # grows while it is read
            lost.extend(children[row_key])
    return lost

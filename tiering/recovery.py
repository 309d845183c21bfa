"""What can be believed of a catalogue and segment files that were found.

A row is dropped if its bytes fail their checksum, its payload cannot be whole,
its extent overlaps another's, or an ancestor of it is missing; so is a hole that
nothing continues. Everything else stands. Payloads have digests of their own,
checked by whoever loads them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from blobstore.tiering.catalogue import Catalogue
from blobstore.tiering.placement import HEADER_BYTES, Spans, blocks_of
from blobstore.tiering.row import HOLE_PLACE, survey_row


@dataclass(slots=True)
class Findings:
    """The outcome of a survey: what stands, row keys to drop, and why."""

    spans: Spans = field(default_factory=lambda: np.empty((0, 3), np.int64))
    """Extents that stand, disjoint and sorted."""
    dropped: list[bytes] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)

    def drop(self, row_keys: Iterable[bytes], reason: str) -> None:
        """Enter rows that are not to be believed."""
        n_before = len(self.dropped)
        self.dropped += row_keys
        if len(self.dropped) > n_before:
            self.reasons[reason] += len(self.dropped) - n_before


def survey(catalogue: Catalogue, sizes: Mapping[int, int]) -> Findings:
    """Read the whole catalogue against the segment files of `sizes`; changes nothing."""
    findings = Findings()
    inline = dict(catalogue.inline_sizes())
    parents: dict[bytes, bytes] = {}
    placed: list[tuple[int, int, int]] = []
    placed_keys: list[bytes] = []
    damaged, cut = [], []
    holes: set[bytes] = set()
    for row_key, record in catalogue.records():
        found = survey_row(row_key, record)
        if found is None or catalogue.namespace_of(row_key) is None:
            damaged.append(row_key)
            inline.pop(row_key, None)
            continue
        place, offset, nbytes, parents[row_key] = found
        if place == HOLE_PLACE:
            holes.add(row_key)
        elif place:
            placed.append((place, offset, nbytes))
            placed_keys.append(row_key)
        elif inline.pop(row_key, None) != nbytes:
            cut.append(row_key)
    findings.drop(damaged, "damaged")
    findings.drop(inline, "without_row")
    spans = np.array(placed, np.uint64).astype(np.int64).reshape(-1, 3)
    fits = _fitting(spans, sizes)
    cut += (placed_keys[i] for i in np.flatnonzero(~fits))
    overlapping = {placed_keys[i] for i in _overlapping(spans, np.flatnonzero(fits))}
    for reason, row_keys in (("cut", cut), ("overlapping", overlapping)):
        findings.drop(row_keys, reason)
        for row_key in row_keys:
            del parents[row_key]
    orphans = _orphans(parents)
    findings.drop(orphans, "orphaned")
    if holes:
        for row_key in orphans:
            del parents[row_key]
        findings.drop(_bare(holes, parents), "bare_holes")
    if findings.dropped:
        gone = {*findings.dropped}
        spans = spans[[row_key not in gone for row_key in placed_keys]]
    findings.spans = spans[_order(spans)]
    return findings


def _order(spans: Spans) -> npt.NDArray[np.int64]:
    return np.lexsort((spans[:, 1], spans[:, 0]))


def _fitting(spans: Spans, sizes: Mapping[int, int]) -> npt.NDArray[np.bool_]:
    """Which extents lie whole in a segment file that is there."""
    places, which = np.unique(spans[:, 0], return_inverse=True)
    ends = np.array([sizes.get(int(place), 0) for place in places], np.int64)[which]
    offset, nbytes = spans[:, 1], spans[:, 2]
    # Compared without sums, which could overflow.
    return (offset >= HEADER_BYTES) & (offset <= ends) & (blocks_of(nbytes) <= ends - offset)


def _overlapping(spans: Spans, among: npt.NDArray[np.int64]) -> set[int]:
    """Both of each two that claim the same bytes: which one is right is unknown."""
    order = among[_order(spans[among])]
    place, offset, nbytes = spans[order].T
    reach = offset + blocks_of(nbytes)
    clash = np.flatnonzero((place[:-1] == place[1:]) & (reach[:-1] > offset[1:]))
    return {int(i) for i in order[clash]} | {int(i) for i in order[clash + 1]}


def _orphans(parents: Mapping[bytes, bytes]) -> list[bytes]:
    """Rows whose chain does not reach a root."""
    missing = set(parents.values()).difference(parents)
    missing.discard(b"")
    if not missing:
        return []
    children = defaultdict(list)
    for row_key, parent in parents.items():
        children[parent].append(row_key)
    lost = [row_key for parent in missing for row_key in children[parent]]
    for row_key in lost:  # grows while it is read
        lost.extend(children[row_key])
    return lost


def _bare(holes: Set[bytes], parents: Mapping[bytes, bytes]) -> list[bytes]:
    """Holes that nothing continues but other such holes."""
    children = Counter(parents.values())
    bare = [row_key for row_key in parents if row_key in holes and not children[row_key]]
    for row_key in bare:  # grows while it is read
        parent = parents[row_key]
        children[parent] -= 1
        if parent in holes and not children[parent]:
            bare.append(parent)
    return bare

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from blobstore.errors import Full, InvalidRequest
from blobstore.tiering.placement import HEADER_BYTES, NOWHERE, Placement, blocks_of
from blobstore.tiering.tier import Extent
from blobstore.units import KIB, MIB

SEGMENT_BYTES = HEADER_BYTES + 8 * MIB
SPARE_BYTES = MIB


def _placement(limit_bytes: int = 64 * MIB) -> Placement:
    return Placement(limit_bytes, segment_bytes=SEGMENT_BYTES, spare_bytes_max=SPARE_BYTES)


def _punch_surplus(placement: Placement, keep_bytes: int | None = None) -> list[int]:
    """Give back what is too much; the segments that are gone."""
    gone = []
    while (run := placement.surplus(keep_bytes)) is not None:
        if placement.punched(run):
            gone.append(run.place)
    return gone


def test_extents_follow_each_other_behind_the_header() -> None:
    placement = _placement()
    first, second = placement.allocate(70_000), placement.allocate(70_000)
    assert first == Extent(1, HEADER_BYTES, 70_000)
    assert second == Extent(1, HEADER_BYTES + blocks_of(70_000), 70_000)
    assert placement.live_bytes == 2 * blocks_of(70_000)


def test_a_freed_run_is_used_again_before_new_room() -> None:
    placement = _placement()
    kept = [placement.allocate(200 * KIB) for _ in range(4)]
    placement.release(kept[1])
    assert placement.allocate(200 * KIB) == kept[1]


def test_a_payload_longer_than_a_segment_has_one_of_its_own() -> None:
    placement = _placement()
    extent = placement.allocate(20 * MIB)
    assert placement.segments[extent.place] == HEADER_BYTES + 20 * MIB
    other = placement.allocate(MIB)
    assert other.place != extent.place


def test_the_limit_holds_whatever_is_asked_for() -> None:
    placement = _placement(8 * MIB)
    sizes = [placement.allocate(MIB).nbytes for _ in range(7)]
    assert sum(sizes) + SPARE_BYTES == placement.limit_bytes
    assert placement.free_bytes == 0
    with pytest.raises(Full, match="ssd: wanted 4 KiB, free are 0 B"):
        placement.allocate(1)


def test_room_set_aside_is_gone_until_it_is_given_back() -> None:
    placement = _placement(8 * MIB)
    free = placement.free_bytes
    assert not placement.set_aside(free + 1)
    assert placement.set_aside(free)
    with pytest.raises(Full):
        placement.allocate(1)
    assert placement.set_aside(-free)
    assert placement.free_bytes == free


def test_spare_room_beyond_the_bound_is_to_be_punched_and_counts_until_it_is() -> None:
    placement = _placement(8 * MIB)
    extents = [placement.allocate(MIB) for _ in range(7)]
    for extent in extents[:4]:
        placement.release(extent)
    assert placement.spare_bytes == 4 * MIB
    run = placement.surplus()
    assert run is not None
    assert placement.spare_bytes == 4 * MIB
    assert placement.free_bytes < 4 * MIB
    placement.punched(run)
    assert placement.surplus() is None
    assert placement.idle_bytes <= SPARE_BYTES
    assert placement.free_bytes == 4 * MIB


def test_a_run_that_could_not_be_punched_stays_spare() -> None:
    placement = _placement()
    extent = placement.allocate(4 * MIB)
    placement.release(extent)
    run = placement.surplus()
    assert run is not None
    placement.kept(run)
    assert placement.spare_bytes >= 4 * MIB
    assert placement.allocate(4 * MIB) == extent


def test_new_room_is_prepared_in_chunks_and_counts_as_spare() -> None:
    placement = _placement()
    extent = placement.allocate(8 * KIB)
    (chunk,) = placement.prepare()
    assert chunk == Extent(1, extent.offset, SPARE_BYTES // 4)
    assert placement.spare_bytes == chunk.nbytes - 8 * KIB
    assert placement.prepare() == []


def test_no_chunk_makes_more_spare_than_the_bound() -> None:
    placement = _placement()
    extents = [placement.allocate(MIB) for _ in range(3)]
    placement.release(extents[0])  # spare room is at its bound now
    placement.allocate(2 * MIB)
    assert placement.idle_bytes <= SPARE_BYTES + HEADER_BYTES
    assert placement.allocate(MIB) == extents[0]


def test_room_in_preparation_is_not_punched_meanwhile() -> None:
    placement = _placement()
    extent = placement.allocate(4 * MIB)
    (chunk,) = placement.prepare()
    placement.release(extent)
    assert placement.surplus(0) is None
    placement.prepared(chunk)
    assert placement.surplus(0) is not None


def test_room_that_was_punched_before_its_preparation_is_not_prepared() -> None:
    placement = _placement()
    placement.release(placement.allocate(4 * MIB))
    _punch_surplus(placement, 0)
    assert placement.prepare() == []


def test_a_segment_without_extents_goes_once_it_is_not_in_use() -> None:
    placement = _placement()
    extents = [placement.allocate(4 * MIB) for _ in range(3)]
    assert {extent.place for extent in extents} == {1, 2}
    for extent in extents[:2]:
        placement.release(extent)
    assert _punch_surplus(placement, 0) == [1]
    assert placement.segments.keys() == {2}
    placement.release(extents[2])
    assert _punch_surplus(placement, 0) == []  # the next extent goes there


def test_long_holes_are_filled_before_there_are_more_segments() -> None:
    placement = _placement()
    extents = [placement.allocate(MIB) for _ in range(20)]
    before = set(placement.segments)
    for extent in extents[1:6]:
        placement.release(extent)
    _punch_surplus(placement, 0)
    again = [placement.allocate(MIB) for _ in range(8)]
    assert {extent.place for extent in again} <= before


def test_freeing_twice_is_refused() -> None:
    placement = _placement()
    extent = placement.allocate(70_000)
    placement.release(extent)
    with pytest.raises(InvalidRequest, match="not allocated"):
        placement.release(extent)
    assert placement.live_bytes == 0


def test_empty_payloads_are_nowhere() -> None:
    placement = _placement()
    assert placement.allocate(0) == NOWHERE
    assert placement.segments == {}


def test_what_was_found_on_disk_is_taken_over() -> None:
    placement = _placement()
    held = [placement.allocate(size) for size in (MIB, 70_000, 2 * MIB, 100_000)]
    placement.release(held.pop(1))
    spans = np.array([(e.place, e.offset, e.nbytes) for e in held], np.int64)
    found = _placement()
    holes = found.adopt({1: SEGMENT_BYTES, 7: SEGMENT_BYTES}, spans)
    assert found.live_bytes == placement.live_bytes
    assert all(found.holds(extent) for extent in held)
    assert Extent(1, HEADER_BYTES + MIB, blocks_of(70_000)) in holes
    end = held[-1].offset + blocks_of(100_000)
    assert Extent(1, end, SEGMENT_BYTES - end) in holes
    # The numbers of old segments are never given again.
    assert found.allocate(MIB).place in {1, 7}
    assert found.allocate(30 * MIB).place == 8


@pytest.mark.parametrize("seed", range(3))
def test_random_use_never_overlaps_and_never_exceeds_the_limit(seed: int) -> None:
    rng = random.Random(seed)
    placement = _placement(24 * MIB)
    held: list[Extent] = []
    for _ in range(1500):
        if held and rng.random() < 0.48:
            placement.release(held.pop(rng.randrange(len(held))))
            if rng.random() < 0.7:
                _punch_surplus(placement)
        else:
            wanted = rng.choice((1, 70_000, 300_000, MIB + 1, 3 * MIB))
            try:
                held.append(placement.allocate(wanted))
            except Full:
                _punch_surplus(placement)  # spare runs too short for it, beyond the room kept
                if placement.free_bytes >= wanted + 4096:
                    held.append(placement.allocate(wanted))
        assert placement.live_bytes == sum(blocks_of(extent.nbytes) for extent in held)
        assert placement.live_bytes + SPARE_BYTES <= placement.limit_bytes
    ordered = sorted((e.place, e.offset, e.offset + blocks_of(e.nbytes)) for e in held)
    for (place, _, end), (next_place, start, _) in itertools.pairwise(ordered):
        assert place != next_place or end <= start
    for place, _, end in ordered:
        assert end <= placement.segments[place]
    _punch_surplus(placement, 0)
    assert placement.spare_bytes == 0

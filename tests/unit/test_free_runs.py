from __future__ import annotations

import random

from blobstore.tiering.free_runs import FreeRuns
from blobstore.tiering.tier import Extent


def test_neighbours_merge_on_both_sides_and_only_within_a_place() -> None:
    runs = FreeRuns([Extent(1, 0, 10), Extent(1, 20, 10), Extent(2, 10, 10)])
    assert runs.add(Extent(1, 10, 10)) == Extent(1, 0, 30)
    assert len(runs) == 2
    assert Extent(1, 0, 30) in runs
    assert Extent(2, 10, 10) in runs


def test_the_shortest_run_that_is_long_enough_is_cut_from_its_start() -> None:
    runs = FreeRuns([Extent(1, 0, 10), Extent(1, 50, 30), Extent(1, 100, 20)])
    assert runs.take(15) == Extent(1, 100, 15)
    assert Extent(1, 115, 5) in runs
    assert runs.take(31) is None
    assert runs.take(30) == Extent(1, 50, 30)
    assert runs.total_bytes == 15


def test_the_shortest_run_goes_whole_or_from_its_end() -> None:
    runs = FreeRuns([Extent(1, 0, 10), Extent(1, 50, 30)])
    assert runs.take_shortest(100) == Extent(1, 0, 10)
    assert runs.take_shortest(12) == Extent(1, 68, 12)
    assert Extent(1, 50, 18) in runs


def test_the_longest_run_goes_whole_if_it_is_long_enough() -> None:
    runs = FreeRuns([Extent(1, 0, 10), Extent(1, 50, 30)])
    assert runs.take_longest(31) is None
    assert runs.take_longest(30) == Extent(1, 50, 30)
    assert runs.take_longest(1) == Extent(1, 0, 10)
    assert FreeRuns().take_longest(0) is None


def _runs_of(free: set[tuple[int, int]]) -> set[Extent]:
    """Maximal runs of free units."""
    found = set()
    for place, offset in free:
        if (place, offset - 1) not in free:
            end = offset
            while (place, end) in free:
                end += 1
            found.add(Extent(place, offset, end - offset))
    return found


def test_random_use_agrees_with_a_set_of_units() -> None:
    rng = random.Random(1)
    free = {(place, unit) for place in (1, 2) for unit in range(200)}
    runs, held = FreeRuns(_runs_of(free)), list[Extent]()
    for _ in range(2000):
        if held and rng.random() < 0.5:
            run = held.pop(rng.randrange(len(held)))
            runs.add(run)
            free |= {(run.place, unit) for unit in range(run.offset, run.offset + run.nbytes)}
        else:
            wanted = rng.randint(1, 20)
            longest = max((run.nbytes for run in _runs_of(free)), default=0)
            taken = runs.take(wanted)
            assert (taken is None) == (longest < wanted)
            if taken is not None:
                units = {(taken.place, taken.offset + i) for i in range(wanted)}
                assert units <= free
                free -= units
                held.append(taken)
        expected = _runs_of(free)
        assert len(runs) == len(expected)
        assert all(run in runs for run in expected)
        assert runs.total_bytes == len(free)

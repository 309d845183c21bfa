"""The optimum is one: no way of keeping blocks serves more, and it fits what others found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blobstore.bench.future import Future
from blobstore.bench.optimum import OptimalCache
from blobstore.bench.trace import Request, Trace
from blobstore.errors import InvalidRequest


def trace_of(chains: Iterable[str]) -> Trace:
    """`abc` uses the blocks a, ab and abc."""
    numbers: dict[str, int] = {}
    requests = []
    for now_s, text in enumerate(chains):
        blocks = [numbers.setdefault(text[: n + 1], len(numbers)) for n in range(len(text))]
        requests.append(Request(float(now_s), blocks, len(blocks)))
    return Trace("test", 1, requests, len(numbers))


def n_hits(trace: Trace, capacity: int) -> int:
    cache = OptimalCache(trace, capacity)
    return sum(cache.use(request.blocks) for request in trace.requests)


def best_of_all(trace: Trace, capacity: int) -> int:
    """By trying every way: after each request any whole prefixes may stay."""
    best: dict[frozenset[int], int] = {frozenset(): 0}
    parents: dict[int, int] = {}
    for request in trace.requests:
        parents.update(zip(request.blocks[1:], request.blocks, strict=False))
        after: dict[frozenset[int], int] = {}
        for held, hits in best.items():
            n_held = next(
                (n for n, block in enumerate(request.blocks) if block not in held),
                len(request.blocks),
            )
            for kept in _prefixes(held.union(request.blocks), parents, capacity):
                after[kept] = max(after.get(kept, 0), hits + n_held)
        best = after
    return max(best.values())


def _prefixes(
    blocks: Iterable[int], parents: dict[int, int], capacity: int
) -> Iterable[frozenset[int]]:
    for n in range(capacity + 1):
        for kept in combinations(sorted(blocks), n):
            if all(parents.get(block, block) in kept for block in kept):
                yield frozenset(kept)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=8), st.integers(0, 4))
def test_no_way_of_keeping_blocks_serves_more(chains: list[str], capacity: int) -> None:
    trace = trace_of(chains)
    assert n_hits(trace, capacity) == best_of_all(trace, capacity)


def test_the_leaf_whose_next_use_is_furthest_goes() -> None:
    assert n_hits(trace_of(["a", "b", "c", "b", "a"]), 2) == 2


def test_what_is_done_goes_and_what_it_hangs_on_stays() -> None:
    assert n_hits(trace_of(["abc", "x", "a", "x"]), 2) == 2


def test_no_room_holds_nothing_and_all_room_holds_all() -> None:
    trace = trace_of(["abc", "abk", "abc", "x"])
    assert n_hits(trace, 0) == 0
    assert n_hits(trace, trace.n_blocks) == 5


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        OptimalCache(trace_of(["a"]), -1)


def test_the_future_is_told_block_by_block() -> None:
    trace = trace_of(["ab", "ac", "ab"])
    future = Future(trace)
    told: list[Sequence[int]] = []
    for _ in trace.requests:
        future.go_on()
        told.append([future.next_use(block) for block in range(3)])
    assert told == [[1, 2, 1], [2, 2, 3], [3, 3, 3]]
    assert future.never == 3

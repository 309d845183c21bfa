"""The references do on plain streams of blocks what an independent simulator says they do."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest

from blobstore.bench.optimum import OptimalCache
from blobstore.bench.trace import Request, Trace, load_trace
from blobstore.tiering.policies import POLICIES
from blobstore.tiering.policy import PolicyTerms, Use
from blobstore.tiering.shadow_cache import ShadowCache

libcachesim = pytest.importorskip("libcachesim")

TOLERANCE = 0.002
N_BLOCKS = 25_000
NEVER = 1 << 62
TRACES = ("lmcache_agents", "mooncake_conversation")
SIZES = (0.02, 0.2)

each_trace = pytest.mark.parametrize("trace", TRACES)
each_size = pytest.mark.parametrize("size", SIZES)


def stream_of(trace: str) -> list[int]:
    requests = load_trace(trace).requests
    return [*islice((block for request in requests for block in request.blocks), N_BLOCKS)]


def theirs(make: Callable[..., Any], stream: list[int], capacity: int) -> float:
    """Their hit ratio; a request says when its block is asked for next."""
    cache = make(capacity, hashpower=16)
    request = libcachesim.Request(obj_size=1)
    n_hits, next_uses = 0, next_use_of_each(stream)
    for at, block in enumerate(stream):
        request.obj_id, request.clock_time = block, at
        request.next_access_vtime = next_uses[at]
        n_hits += cache.get(request)
    return n_hits / len(stream)


def next_use_of_each(stream: list[int]) -> list[int]:
    found: list[int] = []
    next_use: dict[int, int] = {}
    for at in range(len(stream) - 1, -1, -1):
        found.append(next_use.get(stream[at], NEVER))
        next_use[stream[at]] = at
    return found[::-1]


@each_trace
@each_size
@pytest.mark.parametrize(
    ("name", "their_name"),
    [("lru", "LRU"), ("fifo", "FIFO"), ("lfu", "LFU"), ("arc", "ARC"), ("s3fifo", "S3FIFO")],
)
def test_a_reference_hits_as_often(name: str, their_name: str, trace: str, size: float) -> None:
    stream = stream_of(trace)
    capacity = int(size * len(set(stream)))
    cache = ShadowCache(
        capacity, POLICIES[name](PolicyTerms(capacity, lambda block: block)), lambda block: 1
    )
    n_hits = sum(cache.use(Use([block], 0, float(at))) for at, block in enumerate(stream))
    expected = theirs(getattr(libcachesim, their_name), stream, capacity)
    assert n_hits / len(stream) == pytest.approx(expected, abs=TOLERANCE)


@each_trace
@pytest.mark.parametrize("size", [0.05, 0.2])
def test_the_optimum_hits_as_often(trace: str, size: float) -> None:
    """Theirs takes in every block, ours need not: the smaller the cache, the more that tells."""
    stream = stream_of(trace)
    numbers: dict[int, int] = {}
    blocks = [numbers.setdefault(block, len(numbers)) for block in stream]
    requests = [Request(float(at), [block], 1) for at, block in enumerate(blocks)]
    capacity = int(size * len(numbers))
    cache = OptimalCache(Trace(trace, 1, requests, len(numbers)), capacity)
    ours = sum(cache.use(request.blocks) for request in requests) / len(stream)
    expected = theirs(libcachesim.Belady, blocks, capacity)
    assert ours == pytest.approx(expected, abs=TOLERANCE)

"""The head of a trace that is replayed with real bytes."""

from __future__ import annotations

from blobstore.bench.replay_live import live_head
from blobstore.bench.trace import made_trace

TRACE = made_trace()


def test_the_head_is_as_long_as_its_blocks_allow() -> None:
    head = live_head(TRACE, 100)
    n = len(head.requests)
    assert head.n_blocks <= 100
    assert max(TRACE.requests[n].blocks) >= 100


def test_a_small_trace_is_replayed_whole() -> None:
    assert live_head(TRACE) == TRACE


def test_there_may_be_no_head_at_all() -> None:
    assert live_head(TRACE, 1).n_blocks == 0

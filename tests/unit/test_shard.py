from __future__ import annotations

from typing import Any

import pytest

from blobstore.errors import InvalidRequest
from blobstore.shard import Shard


def test_heads_are_split_evenly() -> None:
    assert [Shard(rank, 4).own_heads(8) for rank in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 8)]


def test_neighbouring_ranks_hold_the_same_head_when_there_are_more_ranks_than_heads() -> None:
    assert [Shard(rank, 8).own_heads(2) for rank in range(8)] == [(0, 1)] * 4 + [(1, 2)] * 4
    assert [Shard(rank, 8).among_holders(2) for rank in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [Shard(rank, 8).holders(heads) for rank, heads in ((0, 1), (0, 8), (0, 16))] == [8, 1, 1]


def test_layers_are_split_evenly_or_as_stated() -> None:
    assert [Shard(pp_rank=rank, pp_size=3).own_layers(9) for rank in range(3)] == [
        (0, 3),
        (3, 6),
        (6, 9),
    ]
    assert Shard(pp_rank=1, pp_size=2, layers=(31, 61)).own_layers(61) == (31, 61)
    with pytest.raises(InvalidRequest, match="61 layers do not split evenly over pp_size=2"):
        Shard(pp_size=2).own_layers(61)
    with pytest.raises(InvalidRequest, match="the layout has 60 layers"):
        Shard(layers=(31, 61)).own_layers(60)


def test_heads_that_cannot_be_split_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="8 KV heads do not split evenly over tp_size=3"):
        Shard(0, 3).own_heads(8)


@pytest.mark.parametrize(
    "fields",
    [
        {"tp_rank": 1},
        {"tp_rank": -1},
        {"tp_size": 0},
        {"pp_rank": 2, "pp_size": 2},
        {"tp_size": "2"},
        {"tp_rank": True, "tp_size": 2},
        {"layers": (3, 3)},
        {"layers": (-1, 3)},
        {"layers": [0, 3]},
        {"layers": (0, 1, 2)},
    ],
)
def test_ranks_that_do_not_exist_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        Shard(**fields)


def test_only_the_sole_rank_is_whole() -> None:
    assert Shard().whole
    assert not any(s.whole for s in (Shard(0, 2), Shard(pp_size=2), Shard(layers=(0, 2))))

from __future__ import annotations

import copy
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from blobstore.errors import InvalidRequest
from blobstore.fields import pack
from blobstore.layout import KVLayout, LayerGroup, Shard
from tests.support.identities import layouts, repeatable
from tests.support.vectors import layout_of, load

TOKENS = 16
LLAMA = LayerGroup.attention(layers=4, heads=8, head_size=128)
WINDOWED = LayerGroup.sliding(layers=2, heads=8, head_size=128, window=40)
STATE = LayerGroup.state(layers=1, state_bytes=64)


def group_of(layout: KVLayout, layer: int) -> LayerGroup:
    """The group that has the layer; counts from the first group, as parts do."""
    for group in layout.groups:
        if layer < group.layers:
            return group
        layer -= group.layers
    raise AssertionError(layer)


def holds(shard: Shard, layout: KVLayout, layer: int, head: int) -> bool:
    """Whether a rank holds a head of a layer, computed apart from the code under test."""
    heads, stage = group_of(layout, layer).heads, layer * shard.pp_size // layout.n_layers
    if shard.tp_size <= heads:
        return stage == shard.pp_rank and head * shard.tp_size // heads == shard.tp_rank
    return stage == shard.pp_rank and shard.tp_rank * heads // shard.tp_size == head


def squares(layout: KVLayout, numbers: tuple[int, ...]) -> list[tuple[int, int]]:
    """Every (layer, head) in the parts of these numbers."""
    parts = layout.parts(TOKENS)
    return [
        (layer, head)
        for number in numbers
        for layer in range(*parts[number].layers)
        for head in range(*parts[number].heads)
    ]


def ranks(tp_size: int, pp_size: int) -> list[Shard]:
    return [Shard(tp, tp_size, pp, pp_size) for pp in range(pp_size) for tp in range(tp_size)]


@pytest.mark.parametrize("case", load("layouts"), ids=lambda case: case["name"])
def test_vectors(case: dict[str, Any]) -> None:
    layout, tokens = layout_of(case["layout"]), case["tokens"]
    assert layout.nbytes(tokens) == case["nbytes"]
    assert [
        {"layers": [*p.layers], "heads": [*p.heads], "offset": p.offset, "nbytes": p.nbytes}
        for p in layout.parts(tokens)
    ] == case["parts"]
    for view in case["shards"]:
        fields = view["shard"]
        if "layers" in fields:
            fields["layers"] = tuple(fields["layers"])
        assert list(layout.shard_parts(Shard(**fields))) == view["reads"]
        assert list(layout.shard_writes(Shard(**fields))) == view["writes"]
    for need in case["needed"]:
        parts = layout.needed_parts(
            need["blob"], need["n_blobs"], need["tokens_per_blob"], tail_tokens=need["tail_tokens"]
        )
        assert list(parts) == need["parts"]


@repeatable
@given(layouts(), st.integers(0, 300))
def test_parts_cover_the_payload_exactly_and_in_order(layout: KVLayout, tokens: int) -> None:
    end = 0
    for index, part in enumerate(layout.parts(tokens)):
        assert (part.index, part.offset) == (index, end)
        end += part.nbytes
    assert end == layout.nbytes(tokens)


@repeatable
@given(layouts())
def test_parts_hold_every_head_of_every_layer_once(layout: KVLayout) -> None:
    held = Counter(squares(layout, layout.shard_parts()))
    assert held == {
        (layer, head): 1
        for layer in range(layout.n_layers)
        for head in range(group_of(layout, layer).heads)
    }


@repeatable
@given(layouts())
def test_a_prefix_of_the_payload_is_a_prefix_of_the_layers(layout: KVLayout) -> None:
    parts = layout.parts(TOKENS)
    assert all(a.layers == b.layers or a.layers[1] == b.layers[0] for a, b in pairwise(parts))


@repeatable
@given(layouts())
def test_the_sizes_of_a_group_add_up(layout: KVLayout) -> None:
    expected = 0
    for group in layout.groups:
        expected += group.layers * group.heads * group.head_bytes(TOKENS)
    assert layout.nbytes(TOKENS) == expected


@repeatable
@given(layouts(), st.sampled_from([1, 2, 3, 4, 8, 12, 16, 24]), st.integers(1, 4))
def test_over_all_ranks_every_part_is_written_once_by_a_rank_that_holds_it(
    layout: KVLayout, tp_size: int, pp_size: int
) -> None:
    writes: Counter[int] = Counter()
    for shard in ranks(tp_size, pp_size):
        try:
            written = layout.shard_writes(shard)
        except InvalidRequest:
            assume(False)
        assert set(written) <= set(layout.shard_parts(shard))
        assert all(holds(shard, layout, *square) for square in squares(layout, written))
        writes.update(written)
    assert writes == dict.fromkeys(layout.shard_parts(), 1)


@repeatable
@given(layouts(), st.sampled_from([1, 2, 3, 4, 8, 12, 16, 24]), st.integers(1, 4))
def test_a_rank_reads_the_parts_that_hold_something_of_its_own_and_no_other(
    layout: KVLayout, tp_size: int, pp_size: int
) -> None:
    for shard in ranks(tp_size, pp_size):
        try:
            read = layout.shard_parts(shard)
        except InvalidRequest:
            assume(False)
        assert read == tuple(
            number
            for number in layout.shard_parts()
            if any(holds(shard, layout, *square) for square in squares(layout, (number,)))
        )


@repeatable
@given(layouts(), st.data())
def test_only_blobs_within_reach_are_needed(layout: KVLayout, data: st.DataObject) -> None:
    n_blobs = data.draw(st.integers(1, 9), "n_blobs")
    blob = data.draw(st.integers(0, n_blobs - 1), "blob")
    per_blob = data.draw(st.integers(1, 40), "tokens_per_blob")
    tail = data.draw(st.integers(0, per_blob - 1), "tail_tokens")
    end = n_blobs * per_blob - (per_blob - tail if tail else 0)
    tokens = range(blob * per_blob, min(end, (blob + 1) * per_blob))

    def is_needed(group: LayerGroup) -> bool:
        if group.kind == "state":
            return blob == n_blobs - 1
        return group.kind != "sliding" or tokens[-1] >= end - group.window

    needed = layout.needed_parts(blob, n_blobs, per_blob, tail_tokens=tail)
    assert needed == tuple(
        part.index for part in layout.parts(TOKENS) if is_needed(group_of(layout, part.layers[0]))
    )


def test_a_rank_needs_what_it_reads_and_what_is_within_reach() -> None:
    layout = KVLayout((WINDOWED, LLAMA, STATE), head_groups=8)
    shard = Shard(3, 8)
    assert set(layout.needed_parts(0, 9, 16, shard)) == set(layout.shard_parts(shard)) & set(
        layout.needed_parts(0, 9, 16)
    )
    assert layout.needed_parts(8, 9, 16, shard) == layout.shard_parts(shard)


def test_ranks_with_the_same_head_take_turns_by_layers() -> None:
    layout = KVLayout((LayerGroup.latent(layers=4, width=8),), head_groups=1)
    assert [layout.shard_writes(Shard(rank, 2)) for rank in range(2)] == [(0, 2), (1, 3)]
    assert [layout.shard_parts(Shard(rank, 2)) for rank in range(2)] == [(0, 1, 2, 3)] * 2


def test_a_reader_of_another_degree_reads_only_its_head_ranges() -> None:
    layout = KVLayout((LLAMA,), layers_per_part=4, head_groups=4)
    assert layout.shard_parts(Shard(1, 2)) == (2, 3)
    assert layout.shard_parts(Shard(5, 8)) == (2,)
    assert layout.shard_parts(Shard(9, 16)) == (2,)


@pytest.mark.parametrize(
    ("layout", "shard", "message"),
    [
        (KVLayout((LLAMA,), head_groups=8), Shard(0, 3), "8 KV heads do not split evenly"),
        (
            KVLayout((LayerGroup.attention(layers=1, heads=12, head_size=8),), head_groups=4),
            Shard(0, 6),
            "tp_size=6 neither divides the grid's head_groups=4 .*; head_groups=6 or 12 .* would",
        ),
        (
            KVLayout((LLAMA,)),
            Shard(0, 4),
            "holds 8 KV heads, a rank of tp_size=4 only 2.*; head_groups=4 or 8 .*would fit",
        ),
        (KVLayout((LLAMA,)), Shard(pp_size=3), "4 layers do not split evenly over pp_size=3"),
        (
            KVLayout((LLAMA,), layers_per_part=3),
            Shard(pp_size=2),
            "a part holds layers 0 to 3, this stage 0 to 2.*layers_per_part=1 always fits",
        ),
        (KVLayout.opaque(8), Shard(0, 2), "an opaque layout says nothing of ranks"),
        (KVLayout.opaque(8), Shard(pp_size=2), "an opaque layout says nothing of ranks"),
    ],
)
def test_a_rank_that_cannot_write_is_told_what_would_fit(
    layout: KVLayout, shard: Shard, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        layout.shard_writes(shard)


def test_a_rank_finer_than_the_grid_can_still_read() -> None:
    assert KVLayout((LLAMA,)).shard_parts(Shard(0, 4)) == (0, 1, 2, 3)
    assert KVLayout((LLAMA,), layers_per_part=3).shard_parts(Shard(pp_size=2)) == (0,)


def test_an_opaque_layout_is_one_part_of_a_fixed_size() -> None:
    layout = KVLayout.opaque(1000)
    assert layout.nbytes(1) == layout.nbytes(256) == 1000
    assert [(part.offset, part.nbytes) for part in layout.parts(7)] == [(0, 1000)]
    assert layout.shard_parts(Shard()) == layout.shard_writes(Shard()) == (0,)
    assert layout.needed_parts(0, 5, 16) == (0,)


def test_an_opaque_layout_may_be_empty() -> None:
    assert KVLayout.opaque(0).nbytes(256) == 0
    assert [part.nbytes for part in KVLayout.opaque(0).parts(256)] == [0]


@repeatable
@given(layouts())
def test_decoding_gives_the_layout_back(layout: KVLayout) -> None:
    decoded = KVLayout.decode(layout.encode())
    assert decoded == layout
    assert {decoded: 1}[layout] == 1
    assert copy.deepcopy(layout).parts(TOKENS) == layout.parts(TOKENS)


@pytest.mark.parametrize(
    "fields",
    [
        {"groups": ()},
        {"groups": LLAMA},
        {"groups": ("attention",)},
        {"groups": (LLAMA, KVLayout.opaque(4).groups[0])},
        {"groups": (LLAMA,) * 1025},
        {"layers_per_part": 0},
        {"layers_per_part": True},
        {"layers_per_part": 1.0},
        {"head_groups": 3},
        {"head_groups": 0},
        {"order": "x" * 257},
        {"order": None},
    ],
)
def test_layouts_that_contradict_themselves_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        KVLayout(**{"groups": (LLAMA,), **fields})


@pytest.mark.parametrize("nbytes", [-1, 1.5, True, 1 << 41, None])
def test_a_blob_has_a_sane_number_of_bytes(nbytes: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^nbytes of an opaque layout"):
        KVLayout.opaque(nbytes)


def test_a_grid_of_too_many_parts_is_refused_before_it_is_built() -> None:
    many = LayerGroup.attention(layers=4096, heads=4096, head_size=8)
    with pytest.raises(InvalidRequest, match="16777216 parts, at most 16384"):
        KVLayout((many,), head_groups=4096)


def test_a_layout_without_groups_is_not_decoded() -> None:
    with pytest.raises(InvalidRequest, match="4 or more fields, found 3"):
        KVLayout.decode(pack(b"blobstore/layout/1", 1, 1, "x"))


def test_blobs_out_of_the_context_are_refused() -> None:
    layout = KVLayout((LLAMA,))
    for blob, tail in ((-1, 0), (3, 0), (0, 16), (0, -1)):
        with pytest.raises(InvalidRequest):
            layout.needed_parts(blob, 3, 16, tail_tokens=tail)

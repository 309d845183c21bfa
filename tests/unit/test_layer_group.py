from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blobstore.errors import InvalidRequest
from blobstore.fields import pack
from blobstore.layer_group import LayerGroup
from tests.support.identities import groups, repeatable

ATTENTION = LayerGroup.attention(layers=2, heads=4, head_size=64)


@pytest.mark.parametrize(
    ("group", "nbytes"),
    [
        (ATTENTION, 2 * 10 * 64 * 2),
        (LayerGroup.attention(layers=1, heads=1, head_size=64, dtype="fp32"), 2 * 10 * 64 * 4),
        (LayerGroup.attention(layers=1, heads=1, head_size=6, dtype="int4"), 2 * 10 * 3),
        (LayerGroup.sliding(layers=1, heads=2, head_size=8, window=4, dtype="fp8"), 2 * 10 * 8),
        (LayerGroup.latent(layers=1, width=576), 10 * 576 * 2),
        (LayerGroup.state(layers=1, state_bytes=96), 96),
        (LayerGroup.state(layers=1, state_bytes=96, heads=4), 24),
    ],
)
def test_bytes_of_a_head(group: LayerGroup, nbytes: int) -> None:
    assert group.head_bytes(10) == nbytes


def test_how_far_back_a_reader_looks() -> None:
    assert LayerGroup.state(layers=1, state_bytes=1).reach == 1
    assert LayerGroup.sliding(layers=1, heads=1, head_size=8, window=512).reach == 512
    assert ATTENTION.reach > 1 << 60


@repeatable
@given(groups(st.sampled_from([1, 2, 8])))
def test_decoding_gives_the_group_back(group: LayerGroup) -> None:
    assert LayerGroup.decode(group.encode()) == group


@pytest.mark.parametrize(
    "fields",
    [
        {"layers": 0},
        {"layers": 5000},
        {"layers": True},
        {"heads": 0},
        {"heads": 2.0},
        {"head_size": 0},
        {"head_size": 1, "dtype": "int4"},
        {"dtype": "float128"},
        {"dtype": ""},
        {"window": 4},
        {"state_bytes": 4},
        {"kind": "sliding"},
        {"kind": "latent"},
        {"kind": "opaque"},
        {"kind": "state"},
        {"kind": "mamba"},
    ],
)
def test_values_that_the_kind_does_not_have_are_refused(fields: dict[str, Any]) -> None:
    good: dict[str, Any] = {
        "kind": "attention", "layers": 2, "heads": 4, "head_size": 64, "dtype": "bf16",
    }  # fmt: skip
    LayerGroup(**good)
    with pytest.raises(InvalidRequest):
        LayerGroup(**{**good, **fields})


def test_a_state_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="state_bytes=10 cannot be cut into heads=4"):
        LayerGroup.state(layers=1, state_bytes=10, heads=4)


def test_a_group_with_other_fields_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="7 fields, found 1"):
        LayerGroup.decode(pack(b"blobstore/layer-group/1", "attention"))

from __future__ import annotations

from typing import Any

import pytest

from blobstore.errors import InvalidRequest
from blobstore.hint import Hint


@pytest.mark.parametrize(
    ("hint", "fields"),
    [
        (Hint(), {}),
        (Hint(turn=0), {"turn": 0}),
        (
            Hint("s", 4, "main", "tool_use"),
            {"session": "s", "turn": 4, "kind": "main", "finish": "tool_use"},
        ),
    ],
)
def test_only_what_is_set_travels(hint: Hint, fields: dict[str, Any]) -> None:
    assert hint.as_dict() == fields
    assert Hint.from_dict(fields) == hint


def test_fields_of_a_newer_client_are_ignored() -> None:
    assert Hint.from_dict({"turn": 1, "mood": "good"}) == Hint(turn=1)


@pytest.mark.parametrize(
    "fields",
    [
        {"session": "x" * 257},
        {"session": 7},
        {"kind": None},
        {"finish": b"stop"},
        {"turn": -1},
        {"turn": "1"},
        {"turn": True},
        {"turn": 1 << 63},
    ],
)
def test_values_out_of_bounds_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        Hint(**fields)
    with pytest.raises(InvalidRequest):
        Hint.from_dict(fields)

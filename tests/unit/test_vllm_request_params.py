"""What one request asks of the store, and the turns of sessions."""

from __future__ import annotations

from typing import Any

import pytest

from blobstore.clients.vllm.request_params import RequestParams, Turns
from blobstore.errors import InvalidRequest
from blobstore.hint import Hint


def test_params_hold_what_a_request_says_and_the_engine_elsewhere() -> None:
    params = RequestParams.of(
        {"retention": "durable", "ttl": 5, "turn": 3, "remote_host": "of another connector"},
        retention="standard",
        kind="main",
        session="s",
    )
    assert (params.retention, params.ttl_s) == ("durable", 5.0)
    assert params.hint == Hint(session="s", turn=3, kind="main")
    assert RequestParams.of(None, retention="volatile", kind="") == RequestParams("volatile")


@pytest.mark.parametrize(
    "params",
    [
        {"retention": 3}, {"ttl_s": -1}, {"ttl_s": "5"}, {"ttl_s": True}, {"no_store": 1},
        {"no_load": "yes"}, {"session": 7}, {"turn": -1}, {"kind": "x" * 300},
        {"ttl_s": float("nan")},
    ],
)  # fmt: skip
def test_wrong_params_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        RequestParams.of(params, retention="standard", kind="")


def test_turns_count_on_from_what_a_request_says() -> None:
    turns = Turns()
    hints = [Hint(session="s"), Hint(session="t"), Hint(session="s", turn=7), Hint(session="s")]
    assert [turns.numbered(hint).turn for hint in hints] == [0, 0, 7, 8]
    assert turns.numbered(Hint(kind="k")) == Hint(kind="k")


@pytest.mark.parametrize("params", [["no", "mapping"], "text", 5])
def test_params_that_are_no_mapping_are_refused(params: Any) -> None:
    with pytest.raises(InvalidRequest, match="names with values"):
        RequestParams.of(params, retention="standard", kind="")

"""Options of the connector, checked when the engine starts."""

from __future__ import annotations

from typing import Any

import pytest

from blobstore.clients.vllm.options import Options
from blobstore.errors import InvalidRequest


def test_options_have_defaults() -> None:
    options = Options.of({"address": "unix:/tmp/b.sock", "timeout_s": 3})
    assert (options.address, options.timeout_s) == ("unix:/tmp/b.sock", 3.0)
    assert options.tokens_per_blob == 256


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"addr": "unix:/b"}, "did you mean address"),
        ({"nothing_alike": 1}, "there are address"),
        ({"tokens_per_blob": "256"}, "is of type int"),
        ({"tokens_per_blob": True}, "is of type int"),
        ({"tokens_per_blob": 0}, "1 or more"),
        ({"retention": "forever"}, "volatile, standard, durable"),
        ({"timeout_s": -1}, "from 0 to"),
        ({"address": "tcp://host"}, "not an address"),
        ({"address": "http://127.0.0.1:80"}, "not an address"),
        ({"kind": "x" * 300}, "kind"),
    ],
)
def test_wrong_options_are_refused_with_what_is_right(given: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        Options.of(given)

"""Hints and `explain` over HTTP, as a plain client says and sees them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.http_daemon import HttpDaemon, http_daemon, key, put

N = 8


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpDaemon]:
    with http_daemon(tmp_path_factory.mktemp("hints")) as door:
        yield door


def explained(door: HttpDaemon, ns: str, *keys: str) -> list[dict[str, Any]]:
    answer = door.post(f"{ns}/explain", {"keys": list(keys)})
    assert answer.status == 200
    blobs: list[dict[str, Any]] = answer.json["blobs"]
    return blobs


def test_headers_tell_of_the_session(door: HttpDaemon) -> None:
    ns = door.declare(N)
    path = f"{ns}/blobs/{key(1)}"
    hints = {"X-Blobstore-Session": "chat%20%C3%A4", "X-Blobstore-Turn": "7"}
    assert door.ask("PUT", path, bytes(N), hints).status == 201
    (told,) = explained(door, ns, key(1))
    assert told["session"]["session"] == "chat ä"
    assert told["session"]["turn"] == 7
    assert told["story"][0]["what"] == "put"
    hints = {"X-Blobstore-Session": "other", "X-Blobstore-Kind": "main"}
    assert door.ask("GET", path, None, hints).status == 200
    (told,) = explained(door, ns, key(1))
    assert told["session"]["session"] == "other"


@pytest.mark.parametrize(
    "hints",
    [
        {"X-Blobstore-Session": "x" * 257},
        {"X-Blobstore-Session": "%ff"},
        {"X-Blobstore-Turn": "-1"},
        {"X-Blobstore-Turn": "first"},
        {"X-Blobstore-Turn": str(2**63)},
        {"X-Blobstore-Kind": "k" * 257},
        {"X-Blobstore-Finish": "%C3" * 3},
    ],
)
def test_hints_out_of_bounds_are_refused(door: HttpDaemon, hints: dict[str, str]) -> None:
    ns = door.declare(N)
    path = f"{ns}/blobs/{key(2)}"
    refused = door.ask("PUT", path, bytes(N), hints)
    assert (refused.status, refused.error) == (400, "invalid_request")
    assert door.ask("GET", path, None, hints).status == 400
    assert door.ask("GET", path).status == 404


@pytest.mark.parametrize(
    ("hint", "status"),
    [
        ({}, 200),
        ({"session": "s", "turn": 3, "kind": "main", "finish": "stop", "mood": "good"}, 200),
        ({"turn": -1}, 400),
        ({"session": 5}, 400),
        ({"session": "x" * 257}, 400),
        ({"session": {}}, 400),
        ("s", 400),
    ],
)
def test_a_match_takes_a_hint_in_its_body(door: HttpDaemon, hint: object, status: int) -> None:
    ns = door.declare(N)
    body = {"keys": [key(1)], "hint": hint}
    assert door.post(f"{ns}/match", body).status == status


def test_explain_takes_a_few_keys_and_knows_what_there_is(door: HttpDaemon) -> None:
    ns = door.declare(N)
    assert put(door, f"{ns}/blobs/{key(3)}", bytes(N)).status == 201
    known, unknown = explained(door, ns, key(3), key(4))
    assert known["known"]
    assert "next" in known
    assert unknown == {}
    many = {"keys": [key(number) for number in range(101)]}
    assert door.post(f"{ns}/explain", many).status == 400

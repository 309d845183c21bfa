"""Ranges and conditional requests: the edges, and what is ignored."""

from __future__ import annotations

import pytest

from blobstore.http.conditions import (
    Unsatisfiable,
    etag_of,
    is_refused,
    is_unchanged,
    must_be_new,
    span_of,
)

TAG = etag_of(bytes(range(16)))
OTHER = etag_of(bytes(16))


def span(header: str, nbytes: int, **more: str) -> tuple[int, int] | None:
    headers = {"Range": header, **{name.replace("_", "-"): v for name, v in more.items()}}
    return span_of(headers, TAG, nbytes)


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("bytes=0-0", (0, 1)),
        ("bytes=0-9", (0, 10)),
        ("bytes=0-10", (0, 10)),
        ("bytes=0-", (0, 10)),
        ("bytes=9-", (9, 10)),
        ("bytes=9-9", (9, 10)),
        ("bytes=3-5", (3, 6)),
        ("bytes=-1", (9, 10)),
        ("bytes=-10", (0, 10)),
        ("bytes=-11", (0, 10)),
        ("bytes=5-" + "9" * 5000, (5, 10)),
        ("bytes=-" + "9" * 5000, (0, 10)),
        ("bytes=000000000000000000000000003-5", (3, 6)),
        ("Bytes = 1 - 2 ", (1, 3)),
    ],
)
def test_a_range_that_can_be_satisfied(header: str, expected: tuple[int, int]) -> None:
    assert span(header, 10) == expected


@pytest.mark.parametrize("header", ["bytes=10-", "bytes=10-11", "bytes=-0", f"bytes={'9' * 5000}-"])
def test_a_range_that_cannot(header: str) -> None:
    with pytest.raises(Unsatisfiable):
        span(header, 10)


@pytest.mark.parametrize("header", ["bytes=0-", "bytes=0-0", "bytes=-1", "bytes=-0"])
def test_an_empty_blob_has_no_range(header: str) -> None:
    with pytest.raises(Unsatisfiable):
        span(header, 0)


@pytest.mark.parametrize(
    "header",
    ["", "bytes", "bytes=", "bytes=-", "bytes=5-3", "bytes=0-1,3-4", "items=0-1", "bytes=a-b",
     "bytes=0x1-2", "bytes=+1-2", "bytes=-1-2", "bytes=1.0-2", "bytes=\u0661-2", "bytes=0--1"],
)  # fmt: skip
def test_what_is_no_single_range_of_bytes_is_ignored(header: str) -> None:
    assert span(header, 10) is None


def test_no_range_is_all() -> None:
    assert span_of({}, TAG, 10) is None


def test_if_range_decides_whether_a_range_counts() -> None:
    assert span("bytes=1-2", 10, If_Range=TAG) == (1, 3)
    assert span("bytes=1-2", 10, If_Range=OTHER) is None
    assert span("bytes=1-2", 10, If_Range=f"W/{TAG}") is None
    assert span("bytes=1-2", 10, If_Range="Wed, 21 Oct 2015 07:28:00 GMT") is None
    assert span("bytes=99-", 10, If_Range=OTHER) is None


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (TAG, True), (f"W/{TAG}", True), (f"{OTHER}, {TAG}", True), ("*", True), (" * ", True),
        (OTHER, False), ("", False), (TAG.strip('"'), False), (f"{OTHER},W/{OTHER}", False),
    ],
)  # fmt: skip
def test_if_none_match(header: str, expected: bool) -> None:
    assert is_unchanged({"If-None-Match": header}, TAG) is expected
    assert not is_unchanged({}, TAG)


@pytest.mark.parametrize(
    ("header", "refused"),
    [(TAG, False), ("*", False), (f"{OTHER}, {TAG}", False), (f"W/{TAG}", True), (OTHER, True)],
)
def test_if_match(header: str, refused: bool) -> None:
    assert is_refused({"If-Match": header}, TAG) is refused
    assert is_refused({"If-Match": header}, None)
    assert not is_refused({}, TAG)
    assert not is_refused({}, None)


def test_must_be_new() -> None:
    assert must_be_new({"If-None-Match": "*"})
    assert not must_be_new({"If-None-Match": TAG})
    assert not must_be_new({})

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blobstore.errors import InvalidRequest
from blobstore.fields import as_number, as_text, check_number, check_text, pack, unpack
from tests.support.identities import repeatable


def test_a_field_is_its_length_and_its_bytes() -> None:
    expected = b"\3\0\0\0tag" + b"\2\0\0\0\xc3\xa9" + b"\x08\0\0\0" + struct.pack("<Q", 7)
    assert pack(b"tag", "é", 7, b"") == expected + b"\0\0\0\0"


@repeatable
@given(st.lists(st.binary(max_size=9)), st.lists(st.binary(max_size=9)))
def test_borders_count(left: list[bytes], right: list[bytes]) -> None:
    assert (pack(b"t", *left) == pack(b"t", *right)) == (left == right)
    assert unpack(b"t", pack(b"t", *left)) == left


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\3\0\0",
        b"\3\0\0\0ta",
        pack(b"tag", "x")[:-1],
        pack(b"tag", "x") + b"\0",
        pack(b"tag", "x") + b"\xff\xff\xff\xff",
        pack(b"gat", "x"),
    ],
)
def test_what_is_not_framed_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest):
        unpack(b"tag", data)


def test_numbers_and_text_are_checked_when_read() -> None:
    assert as_number(struct.pack("<Q", (1 << 64) - 1)) == (1 << 64) - 1
    assert as_text("🦙".encode()) == "🦙"
    with pytest.raises(InvalidRequest, match="takes 8 bytes, found 4"):
        as_number(b"\0\0\0\0")
    with pytest.raises(InvalidRequest, match="not UTF-8"):
        as_text(b"\xff")


@pytest.mark.parametrize("value", [0, 11, True, 3.0, "3", None])
def test_numbers_out_of_bounds_are_refused_by_name(value: Any) -> None:
    check_number("turn", 1, 1, 10)
    check_number("turn", 10, 1, 10)
    with pytest.raises(InvalidRequest, match=r"^turn is"):
        check_number("turn", value, 1, 10)


@pytest.mark.parametrize("value", ["éé", "\ud800", b"a", 1, None])
def test_text_out_of_bounds_is_refused_by_name(value: Any) -> None:
    check_text("kind", "abc", max_bytes=3)
    with pytest.raises(InvalidRequest, match=r"^kind "):
        check_text("kind", value, max_bytes=3)

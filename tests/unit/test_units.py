from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blobstore.errors import InvalidRequest
from blobstore.units import GIB, KIB, MIB, format_size, parse_size
from tests.support.identities import repeatable


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4GiB", 4 * GIB),
        ("4GB", 4_000_000_000),
        ("1.5 MiB", 3 * MIB // 2),
        (" 64kib ", 64 * KIB),
        ("2TB", 2 * 10**12),
        ("1TiB", 1024 * GIB),
        ("500MB", 500_000_000),
        ("7B", 7),
        ("65536", 65536),
        ("0", 0),
        (65536, 65536),
        (0, 0),
    ],
)
def test_sizes_as_people_write_them(text: str | int, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "GiB", "-1", "-1GiB", "4 GiB x", "4XiB", "4G", "1e9", "0x10", "nan", "inf", "1.",
        ".5", "1,5GiB", "٤GiB", "9" * 5000, "9" * 400 + ".5", -1, True, None, 1.5e300,
    ],
)  # fmt: skip
def test_what_is_no_size_is_refused(text: Any) -> None:
    with pytest.raises(InvalidRequest):
        parse_size(text)


def test_an_unknown_unit_is_named_with_those_there_are() -> None:
    with pytest.raises(InvalidRequest, match=r"unknown unit 'GIG' in '4GIG'.*GiB.*GB"):
        parse_size("4GIG")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (300 * MIB, "300 MiB"),
        (5 * GIB, "5 GiB"),
        (5000 * 1024 * GIB, "5000 TiB"),
        (-1536, "-1.5 KiB"),
    ],
)
def test_sizes_are_printed_in_three_digits(nbytes: float, text: str) -> None:
    assert format_size(nbytes) == text


@repeatable
@given(st.integers(0, 1 << 50))
def test_a_printed_size_is_read_back_within_its_digits(nbytes: int) -> None:
    assert parse_size(format_size(nbytes)) == pytest.approx(nbytes, rel=0.006)

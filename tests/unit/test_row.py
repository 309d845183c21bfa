from __future__ import annotations

import struct
from typing import Any

import pytest
from xxhash import xxh3_64_intdigest

from blobstore.errors import InvalidRequest
from blobstore.tiering.row import Row, decode_row, encode_row, survey_row, with_last_use
from blobstore.tiering.tier import Extent
from tests.support.vectors import load

NAMESPACE = bytes(range(32))
NUMBER = struct.pack("<I", 3)
ROW = Row(
    NAMESPACE, b"k" * 32, b"p" * 32, 256, 70_000, b"d" * 16, b"e" * 16, Extent(2, 8192, 70_000),
    "durable", 50.0,
)  # fmt: skip
ROW_KEY = NUMBER + ROW.key
IDS = {NUMBER: NAMESPACE}


@pytest.mark.parametrize("case", load("disk_rows"), ids=lambda case: case["key"][:8])
def test_vectors(case: dict[str, Any]) -> None:
    raw = {name: bytes.fromhex(case[name]) for name in ("key", "parent", "digest", "pieces")}
    place, offset, nbytes = case["place"], case["offset"], case["nbytes"]
    row_key = struct.pack("<I", case["number"]) + raw["key"]
    body = struct.pack(
        "<dQIQIBB16s", case["last_used_wall_s"], nbytes, place, offset, case["tokens"],
        {"standard": 1, "durable": 2}[case["retention"]], len(raw["parent"]), raw["digest"],
    ) + raw["parent"] + raw["pieces"]  # fmt: skip
    expected = struct.pack("<Q", xxh3_64_intdigest(row_key + body)) + body
    assert row_key.hex() == case["row_key"]
    assert expected.hex() == case["record"]
    row = Row(
        NAMESPACE, raw["key"], raw["parent"], case["tokens"], nbytes, raw["digest"],
        raw["pieces"], Extent(place, offset, nbytes) if place else None, case["retention"],
        case["last_used_wall_s"],
    )  # fmt: skip
    assert encode_row(row, row_key) == expected
    assert decode_row(row_key, expected, {row_key[:4]: NAMESPACE}, 2e9) == row


def test_any_flipped_bit_costs_the_row() -> None:
    record = encode_row(ROW, ROW_KEY)
    for bit in range(8 * len(record)):
        flipped = bytearray(record)
        flipped[bit // 8] ^= 1 << bit % 8
        assert decode_row(ROW_KEY, bytes(flipped), IDS, 100.0) is None
        assert survey_row(ROW_KEY, bytes(flipped)) is None
        assert with_last_use(ROW_KEY, bytes(flipped), 1.0) is None


def test_a_row_under_another_key_or_cut_short_is_not_believed() -> None:
    record = encode_row(ROW, ROW_KEY)
    assert decode_row(NUMBER + b"x" * 32, record, IDS, 100.0) is None
    for length in (0, 8, 57, len(record) - 1):
        assert decode_row(ROW_KEY, record[:length], IDS, 100.0) is None
        assert survey_row(ROW_KEY, record[:length]) is None


def test_a_row_of_an_unknown_namespace_is_not_believed() -> None:
    assert decode_row(ROW_KEY, encode_row(ROW, ROW_KEY), {}, 100.0) is None


@pytest.mark.parametrize("used", [1e12, float("inf"), float("nan")])
def test_a_use_in_the_future_becomes_now(used: float) -> None:
    record = encode_row(ROW._replace(last_used_wall_s=used), ROW_KEY)
    row = decode_row(ROW_KEY, record, IDS, 100.0)
    assert row is not None
    assert row.last_used_wall_s == 100.0


def test_a_new_time_of_use_changes_nothing_else() -> None:
    record = with_last_use(ROW_KEY, encode_row(ROW, ROW_KEY), 77.0)
    assert record is not None
    assert decode_row(ROW_KEY, record, IDS, 100.0) == ROW._replace(last_used_wall_s=77.0)


def test_recovery_sees_where_a_row_lies_and_whom_it_continues() -> None:
    assert survey_row(ROW_KEY, encode_row(ROW, ROW_KEY)) == (2, 8192, 70_000, NUMBER + b"p" * 32)
    root = ROW._replace(parent=b"", extent=None)
    assert survey_row(ROW_KEY, encode_row(root, ROW_KEY)) == (0, 0, 70_000, b"")


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": -1},
        {"tokens": 2**32},
        {"retention": "for ever"},
        {"parent": bytes(256)},
        {"digest": b"short"},
    ],
)
def test_what_the_format_cannot_hold_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="cannot hold"):
        encode_row(ROW._replace(**change), ROW_KEY)

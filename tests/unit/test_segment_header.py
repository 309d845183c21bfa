from __future__ import annotations

import struct
from typing import Any

import pytest
from xxhash import xxh3_64_intdigest

from blobstore.errors import NewerFormat
from blobstore.tiering.segment_header import HEADER_USED_BYTES, Owner, encode_header, owner_of
from tests.support.vectors import load

STORE_ID = bytes(range(16))


@pytest.mark.parametrize("case", load("disk_headers"), ids=lambda case: str(case["number"]))
def test_vectors(case: dict[str, Any]) -> None:
    number, nbytes, store_id = case["number"], case["nbytes"], bytes.fromhex(case["store_id"])
    head = struct.pack("<8sIIQ16s", b"BLOBSEG\0", 1, number, nbytes, store_id)
    expected = head + struct.pack("<Q", xxh3_64_intdigest(head))
    header = encode_header(number, nbytes, store_id)
    assert header.hex() == expected.hex() == case["header"]
    assert owner_of(header.ljust(4096, b"\0"), number, store_id) is Owner.OURS


def test_headers_of_other_stores_and_numbers_are_foreign() -> None:
    header = encode_header(3, 1 << 30, STORE_ID)
    assert owner_of(header, 4, STORE_ID) is Owner.FOREIGN
    assert owner_of(header, 3, bytes(16)) is Owner.FOREIGN


def test_any_flipped_bit_is_damage() -> None:
    header = encode_header(3, 1 << 30, STORE_ID)
    assert len(header) == HEADER_USED_BYTES
    for bit in range(8 * len(header)):
        flipped = bytearray(header)
        flipped[bit // 8] ^= 1 << bit % 8
        assert owner_of(bytes(flipped), 3, STORE_ID) is Owner.DAMAGED


def test_a_later_format_is_refused() -> None:
    head = struct.pack("<8sIIQ16s", b"BLOBSEG\0", 2, 3, 1 << 30, STORE_ID)
    header = head + struct.pack("<Q", xxh3_64_intdigest(head))
    with pytest.raises(NewerFormat, match="format 2, this program knows up to 1"):
        owner_of(header, 3, STORE_ID)

from __future__ import annotations

import random
import struct
from typing import Any

import pytest
from xxhash import xxh3_128

from blobstore.digest import (
    DIGEST_BYTES,
    PIECE_BYTES,
    first_bad_piece,
    n_pieces,
    payload_digest,
    piece_digests,
)
from tests.support.vectors import load


@pytest.mark.parametrize("case", load("digests"), ids=lambda case: f"{case['nbytes']} bytes")
def test_vectors(case: dict[str, Any]) -> None:
    nbytes, pattern = case["nbytes"], bytes.fromhex(case["repeat"])
    payload = (pattern * (nbytes // len(pattern) + 1))[:nbytes]
    expected = b"".join(
        xxh3_128(payload[start : start + 1048576]).digest() for start in range(0, nbytes, 1048576)
    )
    pieces = piece_digests(memoryview(payload))
    assert pieces.hex() == expected.hex() == case["pieces"]
    whole = xxh3_128(struct.pack("<Q", nbytes) + expected).digest()
    assert payload_digest(nbytes, pieces).hex() == whole.hex() == case["digest"]


@pytest.mark.parametrize(
    ("nbytes", "count"),
    [(0, 0), (1, 1), (PIECE_BYTES, 1), (PIECE_BYTES + 1, 2), (5 * PIECE_BYTES, 5)],
)
def test_a_payload_has_as_many_pieces_as_it_takes(nbytes: int, count: int) -> None:
    assert n_pieces(nbytes) == count
    assert len(piece_digests(memoryview(bytes(nbytes)))) == count * DIGEST_BYTES


def test_length_counts_where_bytes_do_not() -> None:
    digests = {
        payload_digest(nbytes, piece_digests(memoryview(bytes(nbytes)))) for nbytes in range(64)
    }
    assert len(digests) == 64


def test_order_of_pieces_counts() -> None:
    a, b = bytes([1]) * PIECE_BYTES, bytes([2]) * PIECE_BYTES
    ab, ba = (piece_digests(memoryview(payload)) for payload in (a + b, b + a))
    assert payload_digest(2 * PIECE_BYTES, ab) != payload_digest(2 * PIECE_BYTES, ba)


@pytest.mark.parametrize("position", [0, PIECE_BYTES - 1, PIECE_BYTES, 2 * PIECE_BYTES + 6])
def test_one_flipped_bit_is_found_in_its_piece(position: int) -> None:
    payload = bytearray(random.Random(1).randbytes(2 * PIECE_BYTES + 7))
    pieces = piece_digests(memoryview(payload))
    assert first_bad_piece(memoryview(payload), 0, pieces) is None
    payload[position] ^= 0x10
    assert first_bad_piece(memoryview(payload), 0, pieces) == position // PIECE_BYTES


def test_pieces_are_checked_from_any_border_on() -> None:
    payload = bytearray(random.Random(2).randbytes(3 * PIECE_BYTES + 5))
    pieces = piece_digests(memoryview(payload))
    rest = memoryview(payload)[PIECE_BYTES:]
    assert first_bad_piece(rest, 1, pieces) is None
    assert first_bad_piece(rest[:PIECE_BYTES], 1, pieces) is None
    assert first_bad_piece(rest, 0, pieces) == 0
    payload[-1] ^= 1
    assert first_bad_piece(rest, 1, pieces) == 3


def test_more_bytes_than_the_payload_has_are_bad() -> None:
    pieces = piece_digests(memoryview(bytes(PIECE_BYTES)))
    assert first_bad_piece(memoryview(bytes(PIECE_BYTES + 1)), 0, pieces) == 1


def test_a_cut_last_piece_is_bad() -> None:
    payload = bytes(PIECE_BYTES + 9)
    pieces = piece_digests(memoryview(payload))
    assert first_bad_piece(memoryview(payload)[:-1], 0, pieces) == 1


def test_an_empty_payload_has_a_digest_and_no_bad_piece() -> None:
    assert first_bad_piece(memoryview(b""), 0, b"") is None
    assert len(payload_digest(0, b"")) == DIGEST_BYTES


def test_the_wrong_number_of_pieces_is_a_programming_error() -> None:
    with pytest.raises(AssertionError):
        payload_digest(PIECE_BYTES + 1, bytes(DIGEST_BYTES))

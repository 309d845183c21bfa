"""What the door reads: digests, keys, JSON."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from concurrent.futures import ThreadPoolExecutor

import pytest

from blobstore.errors import InvalidRequest
from blobstore.http.bodies import HASH_STEP_BYTES, Sha256, declared_sha256, decode
from blobstore.http.context import bounded, hex_bytes, unpacked
from blobstore.http.verbs import Chain

DIGEST = hashlib.sha256(b"x").digest()
MEMBER = f"sha-256=:{base64.b64encode(DIGEST).decode()}:"


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        ([], None), ([""], None), (["md5=:AAAA:"], None), ([MEMBER], DIGEST),
        ([f"sha-512=:AAAA:, {MEMBER}"], DIGEST), (["md5=:AAAA:", MEMBER], DIGEST),
        ([MEMBER.replace("sha", "SHA")], DIGEST), ([f" {MEMBER} ,"], DIGEST),
    ],
)  # fmt: skip
def test_a_declared_digest(headers: list[str], found: bytes | None) -> None:
    assert declared_sha256(headers) == found


@pytest.mark.parametrize(
    "header",
    ["sha-256", "sha-256=", "sha-256=abc", "sha-256=::", "sha-256=:AAAA:", "sha-256=:A:", "=:AAAA:",
     MEMBER[:-1], MEMBER.replace("=:", ":", 1), "sha-256=:====:", f"{MEMBER};q=1"],
)  # fmt: skip
def test_a_digest_that_is_none(header: str) -> None:
    with pytest.raises(InvalidRequest, match="Repr-Digest"):
        declared_sha256([header])


@pytest.mark.parametrize("size", [0, 1, 1000, HASH_STEP_BYTES - 1, HASH_STEP_BYTES * 5 // 2])
@pytest.mark.parametrize("piece", [7000, 256 << 10, 3 << 20])
async def test_the_digest_of_a_body_in_pieces(size: int, piece: int) -> None:
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    with ThreadPoolExecutor(1) as pool:
        sha256 = Sha256(pool)
        for start in range(0, size, piece):
            await sha256.update(data[start : start + piece])
            await asyncio.sleep(0)
        assert await sha256.digest() == hashlib.sha256(data).digest()


def test_keys_in_hex() -> None:
    assert hex_bytes("00ff" * 4, "a key") == b"\x00\xff" * 4
    assert unpacked(["00" * 8, "ff" * 8], "a key") == (bytes(8) + b"\xff" * 8, 8)


@pytest.mark.parametrize(
    "texts",
    [[], [""], ["00" * 7], ["00" * 65], ["0" * 17], ["FF" * 8], ["0g" * 8], ["00 " * 6 + "00"],
     ["00" * 8, "00" * 9], ["0" * 15, "0" * 17], ["\u0660" * 16], ["\ud800" * 16], [" " * 16]],
)  # fmt: skip
def test_keys_that_are_none(texts: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="a key"):
        unpacked(texts, "a key")


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), 3601.0])
def test_times_out_of_bounds(seconds: float) -> None:
    with pytest.raises(InvalidRequest, match="timeout_s"):
        bounded(seconds, "timeout_s")


def test_json_is_checked_where_it_is_read() -> None:
    assert decode(b'{"keys": ["00"]}', Chain).keys == ["00"]
    for body in (b"", b"{}", b'{"keys": []}', b'{"keys": [0]}', b"\xff", b"[" * 10_000):
        with pytest.raises(InvalidRequest, match="the body"):
            decode(body, Chain)

from __future__ import annotations

import random
import struct
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blobstore.errors import FrameTooLarge, ProtocolError
from blobstore.transports.framing import (
    HEADER_BYTES,
    MAGIC,
    MAX_BODY_BYTES,
    FrameReader,
    pack,
    unpack_header,
)
from tests.support.identities import repeatable
from tests.support.vectors import load

frames_of = st.lists(
    st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), st.binary(max_size=80)),
    max_size=8,
)


def header(length: int, magic: bytes = MAGIC) -> bytes:
    return struct.pack("<4sIQQ", magic, 7, 9, length)


def split(stream: bytes, sizes: random.Random, most: int) -> list[bytes]:
    """`stream` in reads of random sizes, as a socket gives it."""
    reads, at = [], 0
    while at < len(stream):
        size = sizes.randint(1, most)
        reads.append(stream[at : at + size])
        at += size
    return reads


def read_all(reader: FrameReader, reads: list[bytes]) -> list[tuple[int, int, bytes]]:
    return [(r, b, bytes(body)) for data in reads for r, b, body in reader.feed(data)]


@pytest.mark.parametrize("case", load("frames"), ids=lambda case: f"request {case['request_id']}")
def test_vectors(case: dict[str, Any]) -> None:
    request_id, boot_id = case["request_id"], int(case["boot_id"])
    body, frame = bytes.fromhex(case["body"]), bytes.fromhex(case["frame"])
    assert pack(request_id, boot_id, body) == frame
    assert frame == b"BSF1" + struct.pack("<IQQ", request_id, boot_id, len(body)) + body
    assert read_all(FrameReader(), [frame]) == [(request_id, boot_id, body)]


@repeatable
@given(frames_of, st.integers(0, 2**32), st.sampled_from([1, 3, HEADER_BYTES, 50, 1000]))
def test_frames_are_whole_however_the_stream_is_cut(
    frames: list[tuple[int, int, bytes]], seed: int, most: int
) -> None:
    stream = b"".join(pack(*frame) for frame in frames)
    assert read_all(FrameReader(), split(stream, random.Random(seed), most)) == frames


def test_a_large_body_arrives_in_reads_of_1000_bytes() -> None:
    body = random.Random(3).randbytes(5 << 20)
    stream = pack(1, 2, body) + pack(3, 4, b"next")
    reads = [stream[at : at + 1000] for at in range(0, len(stream), 1000)]
    assert read_all(FrameReader(), reads) == [(1, 2, body), (3, 4, b"next")]


def test_bodies_stay_as_they_were() -> None:
    reader = FrameReader()
    stream = pack(1, 0, b"first") + pack(2, 0, b"second")
    bodies = [body for read in (stream[:30], stream[30:]) for _, _, body in reader.feed(read)]
    reader.feed(pack(3, 0, b"x" * 100))
    assert [bytes(body) for body in bodies] == [b"first", b"second"]
    assert all(body.readonly for body in bodies)


@pytest.mark.parametrize("length", [0, 2**31, 2**32 - 1, 2**32 + 5, 2**63, 2**64 - 1])
def test_a_header_carries_any_length(length: int) -> None:
    assert unpack_header(header(length)) == (7, 9, length)


@pytest.mark.parametrize("length", [MAX_BODY_BYTES + 1, 2**31, 2**32 + 5, 2**64 - 1])
@pytest.mark.parametrize("cut", [HEADER_BYTES, 1])
def test_a_frame_over_the_limit_is_refused_before_anything_is_allocated(
    length: int, cut: int
) -> None:
    reader, stream = FrameReader(), header(length)
    tracemalloc.start()
    try:
        with pytest.raises(FrameTooLarge, match=f"{length} bytes exceeds the limit of 8388608"):
            read_all(reader, [stream[:cut], stream[cut:]])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_the_limit_is_the_readers() -> None:
    assert read_all(FrameReader(4), [pack(1, 0, b"1234")]) == [(1, 0, b"1234")]
    with pytest.raises(FrameTooLarge):
        FrameReader(4).feed(pack(1, 0, b"12345"))


@pytest.mark.parametrize(
    "stream", [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", bytes(24), header(4, b"BSF2")]
)
def test_another_protocol_is_refused(stream: bytes) -> None:
    for reads in ([stream], [stream[:5], stream[5:]]):
        with pytest.raises(ProtocolError, match="not a blobstore frame"):
            read_all(FrameReader(), reads)


def test_a_short_header_is_refused() -> None:
    with pytest.raises(ProtocolError, match="24 bytes, found 23"):
        unpack_header(header(4)[:23])


def test_a_partial_frame_waits_for_the_rest() -> None:
    reader, frame = FrameReader(), pack(1, 2, b"body")
    assert reader.feed(frame[:-1]) == []
    assert reader.feed(b"") == []
    assert read_all(reader, [frame[-1:]]) == [(1, 2, b"body")]


@repeatable
@given(frames_of, st.data())
def test_damaged_streams_raise_only_what_the_reader_says(
    frames: list[tuple[int, int, bytes]], data: st.DataObject
) -> None:
    stream = bytearray(b"".join(pack(*frame) for frame in frames) + pack(1, 2, b"last"))
    for _ in range(data.draw(st.integers(1, 4))):
        stream[data.draw(st.integers(0, len(stream) - 1))] = data.draw(st.integers(0, 255))
    reads = split(bytes(stream), random.Random(data.draw(st.integers(0, 999))), 64)
    try:
        received = read_all(FrameReader(), reads)
    except (FrameTooLarge, ProtocolError):
        return
    # What was accepted is what was sent, byte for byte; the rest is still waited for.
    assert stream.startswith(b"".join(pack(*frame) for frame in received))


@repeatable
@given(st.binary(max_size=200))
def test_garbage_raises_only_what_the_reader_says(stream: bytes) -> None:
    try:
        FrameReader().feed(stream)
    except (FrameTooLarge, ProtocolError):
        return
    assert len(stream) < HEADER_BYTES or stream.startswith(MAGIC)

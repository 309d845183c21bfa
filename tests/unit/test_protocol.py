from __future__ import annotations

import math
import random
import resource
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blobstore import protocol
from blobstore.protocol import (
    AnyReply,
    AnyRequest,
    Match,
    Release,
    Report,
    Reserve,
    Wait,
    decode_reply,
    decode_request,
    encode,
)
from tests.support.identities import repeatable
from tests.support.vectors import load

REQUESTS, REPLIES = get_args(AnyRequest), get_args(AnyReply)
NESTED = b"\x91" * 100_000 + b"\x00"


def plain(value: Any) -> Any:
    """A field as the vectors hold it."""
    if isinstance(value, dict) and set(value) == {"hex"}:
        return bytes.fromhex(value["hex"])
    return [plain(item) for item in value] if isinstance(value, list) else value


def decode(kind: type, body: bytes) -> Any:
    return decode_request(body) if kind in REQUESTS else decode_reply(body)


CASES = load("messages")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_vectors(case: dict[str, Any]) -> None:
    kind = getattr(protocol, case["name"])
    fields = {name: plain(value) for name, value in case["fields"].items()}
    message, body = kind(**fields), bytes.fromhex(case["body"])
    assert list(fields) == [field.name for field in msgspec.structs.fields(kind)]
    assert encode(message) == body
    assert decode(kind, body) == message


def test_every_message_has_a_vector() -> None:
    assert {case["name"] for case in CASES} == {kind.__name__ for kind in REQUESTS + REPLIES}


def test_a_field_left_out_at_the_end_has_its_default() -> None:
    assert decode_request(b"\x92\x07\x91\x05") == Release([5])


def test_fields_of_a_newer_peer_at_the_end_are_ignored() -> None:
    assert decode_request(b"\x94\x07\x91\x05\x90\xa3new") == Release([5])


def test_requests_and_replies_are_not_taken_for_each_other() -> None:
    matched = encode(protocol.Matched(2, 1, 0.5))
    with pytest.raises(msgspec.ValidationError):
        decode_request(matched)


@pytest.mark.parametrize(
    "message",
    [
        Match(b"", b"", -1),
        Release([-1]),
        Release([], [4096, -4096]),
        Wait(1, -1, 0, 1, 1.0),
        Wait(1, 0, -5, 1, 1.0),
        protocol.Seal(1, [], [-1]),
        protocol.SealParts(1, 0, [-1]),
        Reserve(b"", b"", 8, b"", -1, "standard", 1.0),
        Reserve(b"", b"", 8, b"", 0, "standard", 1.0, "g", -1),
    ],
)
def test_negative_positions_are_refused(message: Any) -> None:
    with pytest.raises(msgspec.ValidationError, match=">= 0"):
        decode_request(encode(message))


def test_numbers_of_64_bits_are_kept() -> None:
    assert decode_request(encode(Release([2**64 - 1], [protocol.NO_EXTENT]))) == Release(
        [2**64 - 1], [2**64 - 1]
    )


def test_a_hint_is_flat() -> None:
    match = encode(Match(b"", b"", 8))
    assert match.endswith(b"\x80")
    for value in (NESTED, b"\x80", b"\xc0", b"\xd4\x05\x00"):
        with pytest.raises(msgspec.ValidationError):
            decode_request(match[:-1] + b"\x81\xa1a" + value)


def test_a_report_nested_too_deeply_is_no_message() -> None:
    with pytest.raises(msgspec.DecodeError, match="nested too deeply"):
        decode_reply(encode(Report({}))[:-1] + b"\x81\xa1a" + NESTED)


def test_a_deep_but_sane_report_is_read() -> None:
    body: dict[str, Any] = {}
    for _ in range(50):
        body = {"a": [body]}
    assert decode_reply(encode(Report(body))) == Report(body)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x92\x07\xdd\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff\x07",
        b"\x92\x02\xc6\xff\xff\xff\xff",
        encode(Reserve(b"", b"", 8, b"", 0, "standard", 1.0))[:-1] + b"\xdf\xff\xff\xff\xff",
    ],
)
def test_lengths_beyond_the_body_are_refused_before_anything_is_allocated(body: bytes) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(msgspec.DecodeError):
        decode_request(body)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def test_not_a_number_is_a_number() -> None:
    """Deadlines are checked by whoever waits: the decoder lets them through."""
    request = decode_request(encode(Wait(1, 0, 0, 1, math.nan)))
    assert isinstance(request, Wait)
    assert math.isnan(request.timeout_s)


@repeatable
@given(st.binary(max_size=120))
def test_garbage_raises_only_decode_errors(body: bytes) -> None:
    for decoder in (decode_request, decode_reply):
        try:
            message = decoder(body)
        except msgspec.MsgspecError:
            continue
        assert isinstance(message, REQUESTS + REPLIES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_damaged_messages_raise_only_decode_errors(case: dict[str, Any]) -> None:
    chance, body = random.Random(case["name"]), bytes.fromhex(case["body"])
    refused = 0
    for _ in range(300):
        damaged = bytearray(body)
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(damaged))
            damaged[at : at + chance.randint(0, 2)] = chance.randbytes(chance.randint(1, 3))
        for decoder in (decode_request, decode_reply):
            try:
                decoder(bytes(damaged))
            except msgspec.MsgspecError:
                refused += 1
    assert refused

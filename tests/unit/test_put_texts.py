"""What is to be kept of tokens that were told with a put, or after it."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from blobstore.drafts import Answer, Draft, Reservation, Slot
from blobstore.errors import InvalidRequest
from blobstore.holder import Holder
from blobstore.index import Index, NamespaceState, Record, Retention
from blobstore.put_texts import check_tokens, check_told, entries_of, entries_told
from blobstore.turns import Turns
from tests.support.clock import FakeClock
from tests.support.texts import NAMESPACE, NBYTES, TOKENS, run_of

CHAIN = run_of(4)
KEYS = list(CHAIN)
IDS = b"".join(entry.tokens for entry in CHAIN.values())


@pytest.fixture
def ns() -> NamespaceState:
    return Index().declare(NAMESPACE)


def held(ns: NamespaceState, n: int, retention: Retention = Retention.STANDARD) -> list[Record]:
    """Records of the first blobs, as if they were on SSD."""
    made: list[Record] = []
    for key in KEYS[:n]:
        record = Record(ns, key, made[-1] if made else None, NBYTES, TOKENS)
        record.digest, record.ssd, record.retention = key[:16], True, retention
        ns.blobs[key] = record
        made.append(record)
    return made


def reservation(ns: NamespaceState, tokens: bytes, text: str = "") -> Reservation:
    holder = Holder(object(), 1, "test", Turns(FakeClock(), 10))
    made = Reservation(1, holder, ns, Retention.STANDARD, 1e9)
    made.tokens, made.text = tokens, text
    return made


def written(record: Record) -> Slot:
    return Slot(Draft(record, set(), None, 0.0), None, "")


@pytest.mark.parametrize("n_ids", [1, TOKENS - 1, TOKENS + 1])
def test_another_number_of_ids_is_refused_with_both(n_ids: int) -> None:
    check_told(b"", "", TOKENS)
    check_told(bytes(4 * TOKENS), "x" * (1 << 20), TOKENS)
    with pytest.raises(InvalidRequest, match=rf"{n_ids} token ids .* {TOKENS} tokens"):
        check_told(bytes(4 * n_ids), "", TOKENS)


def test_half_an_id_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"15\.5 token ids"):
        check_told(bytes(62), "", TOKENS)


def test_a_long_text_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="1048576"):
        check_told(b"", "é" * ((1 << 19) + 1), TOKENS)


class TestWithAPut:
    def test_each_blob_has_its_own_tokens(self, ns: NamespaceState) -> None:
        made = reservation(ns, IDS, "said")
        made.slots = [written(record) for record in held(ns, 4)]
        answers: list[Answer] = [
            ("stored", ""),
            ("exists", ""),
            ("refused", "full"),
            ("stored", ""),
        ]
        stored, existed = entries_of(made, answers)
        assert list(stored) == [KEYS[0], KEYS[3]]
        assert list(existed) == [KEYS[1]]
        assert existed[KEYS[1]] == CHAIN[KEYS[1]]
        assert stored[KEYS[3]] == CHAIN[KEYS[3]]
        assert (stored[KEYS[0]].text, stored[KEYS[3]].text) == ("said", "")

    def test_nothing_of_what_was_not_told_or_is_volatile(self, ns: NamespaceState) -> None:
        made = reservation(ns, b"")
        made.slots = [written(record) for record in held(ns, 1)]
        assert entries_of(made, [("stored", "")]) == ({}, {})
        made = reservation(ns, IDS[: 4 * TOKENS])
        made.slots = [written(record) for record in held(ns, 1, Retention.VOLATILE)]
        assert entries_of(made, [("stored", "")]) == ({}, {})


class TestAfterIt:
    def test_of_blobs_that_are_held(self, ns: NamespaceState) -> None:
        held(ns, 2)
        told = entries_told(ns, KEYS, IDS, "said")
        assert list(told) == KEYS[:2]
        assert [entry.text for entry in told.values()] == ["said", ""]
        assert told[KEYS[1]] == CHAIN[KEYS[1]]
        check_tokens(NAMESPACE, told)

    def test_an_unknown_last_blob_may_be_a_tail(self, ns: NamespaceState) -> None:
        held(ns, 2)
        for spare in range(TOKENS):
            assert len(entries_told(ns, KEYS, IDS[: len(IDS) - 4 * spare], "")) == 2
        for n in (len(IDS) - 4 * TOKENS, len(IDS) + 4, 0):
            with pytest.raises(InvalidRequest):
                entries_told(ns, KEYS, bytes(n) or b"1234", "")

    def test_what_is_held_has_a_length(self, ns: NamespaceState) -> None:
        held(ns, 4)
        with pytest.raises(InvalidRequest, match="63 token ids"):
            entries_told(ns, KEYS, IDS[:-4], "")

    def test_a_long_text_is_refused(self, ns: NamespaceState) -> None:
        held(ns, 4)
        with pytest.raises(InvalidRequest, match="1048576"):
            entries_told(ns, KEYS, IDS, "x" * ((1 << 20) + 1))

    def test_tokens_of_others_are_refused(self, ns: NamespaceState) -> None:
        held(ns, 4)
        ids = np.frombuffer(IDS, "<u4") + 1
        with pytest.raises(InvalidRequest, match=f"not those of blob {KEYS[0].hex()[:12]}"):
            check_tokens(NAMESPACE, entries_told(ns, KEYS, ids.tobytes(), ""))

    def test_what_lost_its_bytes_is_not_held(self, ns: NamespaceState) -> None:
        held(ns, 2)[1].ssd = False
        assert list(entries_told(ns, KEYS, IDS, "")) == KEYS[:1]


def test_keys_are_those_of_the_chain() -> None:
    assert KEYS[0] == hashlib.sha256(b"blobstore/key/1\0" + NAMESPACE.id + IDS[:64]).digest()

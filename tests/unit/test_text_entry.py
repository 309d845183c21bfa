from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from blobstore.layout import KVLayout
from blobstore.namespace import Namespace
from blobstore.text_entry import TextEntry, decode, encode
from tests.support.texts import NAMESPACE, run_of, texts_of

COMPRESSOR = zstandard.ZstdCompressor()

entries = st.builds(
    TextEntry,
    parent=st.binary(max_size=64),
    position=st.integers(0, 2**63),
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=300).map(
        lambda ids: np.array(ids, "<u4").tobytes()
    ),
    nbytes=st.integers(0, 2**40),
    digest=st.binary(max_size=16),
    text=st.text(max_size=100),
)


@given(entries)
def test_what_was_encoded_is_decoded(entry: TextEntry) -> None:
    assert decode(encode(entry, COMPRESSOR), entry.parent, entry.nbytes) == entry


@given(st.binary(max_size=80))
def test_other_bytes_are_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match="not an entry"):
        decode(body, b"", 0)


def test_what_is_cut_short_is_refused() -> None:
    (entry,) = run_of(1).values()
    body = encode(entry, COMPRESSOR)
    for end in range(len(body)):
        with pytest.raises(ValueError, match="not an entry"):
            decode(body[:end], entry.parent, entry.nbytes)


def test_token_ids_of_a_vocabulary_shrink() -> None:
    ids = np.random.default_rng(1).zipf(1.3, 256) % 49_152
    (entry,) = texts_of(ids, namespace=replace(NAMESPACE, tokens_per_blob=256)).values()
    assert len(encode(entry, COMPRESSOR)) < 0.55 * len(entry.tokens)


def test_tokens_belong_to_the_key_that_they_hash_to() -> None:
    chain = run_of(3)
    for key, entry in chain.items():
        assert entry.belongs_to(NAMESPACE, key)
        assert not entry.belongs_to(NAMESPACE, key[::-1])
        assert not replace(entry, tokens=entry.tokens[::-1]).belongs_to(NAMESPACE, key)
        assert not replace(entry, parent=bytes(32)).belongs_to(NAMESPACE, key)
    root = next(iter(chain))
    assert not chain[root].belongs_to(replace(NAMESPACE, salt="s"), root)


def test_keys_of_an_engine_are_believed() -> None:
    own = Namespace("m", KVLayout.opaque(10), hash_scheme="engine")
    assert TextEntry(b"", 0, b"\1\0\0\0", 10, b"").belongs_to(own, b"whatever")


def test_it_tells_no_tokens_of_itself() -> None:
    (entry,) = texts_of(range(77, 93), text="secret").values()
    assert repr(entry) == "<TextEntry of 16 tokens at 0>"

"""By what rule block hashes are made, and that none begins with random bytes."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from blobstore.clients.vllm.hashing import none_hash_of, random_hashes, scheme_of
from blobstore.errors import InvalidRequest
from tests.support.vllm_engine import installed


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return installed(monkeypatch)


def test_the_first_hash_is_the_one_that_vllm_begins_with(vllm: ModuleType) -> None:
    assert none_hash_of("sha256") == vllm.NONE_HASH


def test_a_random_one_is_refused_with_the_line_that_mends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(InvalidRequest) as found:
        none_hash_of("xxhash")
    assert str(found.value) == str(random_hashes("block hashes by 'xxhash'"))
    assert "export PYTHONHASHSEED=0 for every engine" in str(found.value)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert len(none_hash_of("xxhash")) == 16


def test_releases_without_a_rule_of_their_own_follow_the_environment(
    vllm: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    del vllm.resolve_none_hash_seed
    with pytest.raises(InvalidRequest, match="begin with random bytes"):
        none_hash_of("sha256")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert none_hash_of("sha256")


def test_what_is_pickled_is_of_one_python() -> None:
    python = f"/py3.{sys.version_info.minor}"
    assert scheme_of("sha256", b"first", 16).endswith(f"/16{python}")
    assert scheme_of("sha256_cbor", b"first", 16).endswith("/16")
    assert scheme_of("sha256", b"first", 16) != scheme_of("sha256", b"other", 16)

"""What sets each of the known policies apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from blobstore.tiering import lru_k, wtinylfu
from blobstore.tiering.policies import POLICIES
from blobstore.tiering.policy import Policy, PolicyTerms, Use
from blobstore.tiering.shadow_cache import ShadowCache


def identity(item: str) -> int:
    return int.from_bytes(item.encode(), "big")


class Cache:
    """A cache of a policy by name; items are roots unless they are told as a chain."""

    def __init__(
        self, name: str, capacity: int, nbytes: Callable[[str], int] | None = None
    ) -> None:
        self.policy: Policy[str] = POLICIES[name](PolicyTerms(capacity, identity))
        self._cache = ShadowCache(capacity, self.policy, nbytes or (lambda item: 1))
        self._now_s = 0.0

    def use(self, *chains: str) -> None:
        for text in chains:
            self._now_s += 1
            items = [text[: n + 1] for n in range(len(text))]
            self._cache.use(Use(items, self._cache.n_held(items), self._now_s))

    def holds(self, items: str) -> str:
        return "".join(item for item in items if item in self._cache)


def test_fifo_lets_no_use_count() -> None:
    cache = Cache("fifo", 3)
    cache.use(*"abcaaad")
    assert cache.holds("abcd") == "bcd"


def test_lfu_keeps_what_was_used_often_and_then_what_was_used_last() -> None:
    cache = Cache("lfu", 3)
    cache.use(*"aabcd")
    assert cache.holds("abcd") == "acd"
    cache.use(*"xyz")
    assert cache.holds("axyz") == "ayz"


def test_lfu_without_aging_keeps_yesterdays_favourite_and_with_it_lets_go() -> None:
    for name, kept in (("lfu", "a"), ("lfuda", "")):
        cache = Cache(name, 2)
        cache.use(*"aaaa", *"bcdefghijkl")
        assert cache.holds("a") == kept


def test_gdsf_lets_the_large_go_before_the_small_that_is_used_as_much() -> None:
    cache = Cache("gdsf", 10, lambda item: 7 if item == "Q" else 1)
    cache.use(*"abQ", *"cdx")
    assert cache.holds("abcdxQ") == "abcdx"
    equal = Cache("lfuda", 10, lambda item: 7 if item == "Q" else 1)
    equal.use(*"abQ", *"cdx")
    assert "Q" in equal.holds("Q")


def test_lru2_lets_what_was_used_once_go_before_what_was_used_twice() -> None:
    cache = Cache("lru2", 3)
    cache.use(*"aabcd")
    assert cache.holds("abcd") == "acd"


def test_lru2_knows_again_what_had_left() -> None:
    cache = Cache("lru2", 2)
    cache.use(*"abc", "a", *"de")
    assert cache.holds("acde") == "ae"


def test_lru2_forgets_what_left_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lru_k, "_GHOSTS_MIN", 2)
    monkeypatch.setattr(lru_k, "_GHOSTS_PER_ITEM", 1)
    cache = Cache("lru2", 2)
    cache.use(*"abcdefgh", "a", *"xy")
    assert cache.holds("axy") == "xy"


def test_arc_keeps_what_was_used_again_through_a_scan() -> None:
    cache = Cache("arc", 4)
    cache.use(*"abab", *"123456789")
    assert cache.holds("ab") == "ab"


def test_arc_gives_recency_more_room_when_that_was_missed() -> None:
    cache = Cache("arc", 4)
    cache.use(*"abab", *"cde", *"cd")  # c and d had just left, used once
    assert cache.holds("abcde") == "bcde"


def test_arc_gives_frequency_more_room_when_that_was_missed() -> None:
    cache = Cache("arc", 4)
    cache.use(*"abab", *"cde", *"cd", "a")  # a had left, used often
    cache.use("x")
    assert cache.holds("acdex") == "acdx"


def test_s3fifo_sieves_out_what_is_used_once_and_moves_on_what_is_not() -> None:
    cache = Cache("s3fifo", 10)
    cache.use(*"0123456789", "a", *"aa", *"bcdefghijklm")
    assert cache.holds("a") == "a"


def test_s3fifo_takes_what_left_lately_into_the_main_queue() -> None:
    cache = Cache("s3fifo", 10)
    cache.use(*"0123456789", *"abc", "a", *"defg")
    assert cache.holds("a") == "a"
    assert cache.holds("bc") == ""


def test_wtinylfu_lets_in_only_what_is_asked_for_more() -> None:
    cache = Cache("wtinylfu", 10)
    cache.use(*"abcdefghij" * 3, *"0123456789")
    assert len(cache.holds("abcdefghij")) == 9
    cache.use(*"xxxxxxyz")
    assert cache.holds("xyz") == "xz"


def test_wtinylfu_halves_its_counts_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wtinylfu, "_USES_MIN", 20)
    monkeypatch.setattr(wtinylfu, "_USES_PER_ITEM", 1)
    cache = Cache("wtinylfu", 4)
    cache.use(*"a" * 20, *"bcdefgh" * 9)
    cache.use(*"bc" * 10)
    assert "a" not in cache.holds("a")


@pytest.mark.parametrize("name", POLICIES)
def test_a_use_told_a_second_time_counts_for_what_is_new_only(name: str) -> None:
    told: list[list[str]] = []
    again = Use(["a"], 1, 3.0)
    for use in (None, replace(again, continues=True), again):
        policy: Policy[str] = POLICIES[name](PolicyTerms(4, identity))
        for item, now_s in (("a", 1.0), ("b", 2.0)):
            policy.use(Use([item], 0, now_s))
            policy.enter(item, 1)
            policy.offer(item, now_s, 1)
        if use is not None:
            policy.use(use)
        policy.offer("a", 1.0, 1)
        policy.offer("b", 2.0, 1)
        told.append(list(policy.victims()))
    assert told[1] == told[0]
    if name not in ("lru", "fifo", "s3fifo", "wtinylfu"):  # of which one use changes nothing
        assert told[2] == told[0][::-1]


def test_a_chain_goes_leaf_first_whatever_its_root_has_seen() -> None:
    for name in POLICIES:
        cache = Cache(name, 4)
        cache.use("a", "ab", "abc", "x", *"yz")
        kept = [item for item in ("a", "ab", "abc") if item in cache._cache]
        assert kept == ["a", "ab", "abc"][: len(kept)]

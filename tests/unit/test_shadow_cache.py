"""A cache without bytes: what it holds, and what its policy hears in which order."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from blobstore.tiering.lru import LeafLru
from blobstore.tiering.policy import Use
from blobstore.tiering.shadow_cache import ShadowCache


def one(item: str) -> int:
    return 1


def chain(text: str) -> list[str]:
    """`abc` is the chain a, ab, abc: an item stands for its whole prefix."""
    return [text[: n + 1] for n in range(len(text))]


def use(text: str, now_s: float) -> Use[str]:
    return Use(chain(text), 0, now_s)


def lru(capacity: int) -> ShadowCache[str]:
    return ShadowCache(capacity, LeafLru(), one)


def held(cache: ShadowCache[str], *texts: str) -> list[int]:
    return [cache.n_held(chain(text)) for text in texts]


def test_a_hit_is_as_long_as_the_prefix_that_is_held() -> None:
    cache = lru(10)
    assert cache.use(use("abc", 1)) == 0
    assert cache.use(use("abk", 2)) == 2
    assert cache.use(use("abke", 3)) == 3
    assert len(cache) == 5
    assert "abc" in cache


def test_the_tail_that_was_used_least_recently_goes_first() -> None:
    cache = lru(4)
    cache.use(use("ab", 1))
    cache.use(use("xy", 2))
    cache.use(use("ab", 3))
    cache.use(use("q", 4))
    assert held(cache, "ab", "xy", "q") == [2, 1, 1]
    cache.use(use("r", 5))
    assert held(cache, "ab", "xy", "r") == [2, 0, 1]


def test_a_chain_is_never_cut_in_its_middle() -> None:
    cache = lru(3)
    cache.use(use("abc", 1))
    cache.use(use("a", 2))  # only the root is used, and it still cannot go
    cache.use(use("x", 3))
    assert held(cache, "abc", "x") == [2, 1]


def test_a_parent_is_as_recent_as_the_children_that_left() -> None:
    cache = lru(3)
    cache.use(use("a", 1))
    cache.use(use("x", 2))
    cache.use(use("ab", 3))
    cache.use(use("q", 4))
    assert held(cache, "ab", "x", "q") == [2, 0, 1]
    cache.use(use("r", 5))
    cache.use(use("s", 6))
    assert held(cache, "ab", "q", "r", "s") == [0, 1, 1, 1]


def tree_use(items: str, now_s: float) -> Use[str]:
    """A chain of single letters, each of which may come after others elsewhere."""
    return Use(list(items), 0, now_s)


def test_an_item_that_comes_after_another_one_is_held_once() -> None:
    cache = lru(6)
    cache.use(tree_use("abc", 1))
    cache.use(tree_use("xyc", 2))
    assert (len(cache), cache.used_bytes) == (5, 5)
    assert list(cache.lineage("c")) == ["c", "b", "a"]
    cache.use(tree_use("xzcd", 3))
    assert list(cache.lineage("d")) == ["d", "c", "b", "a"]
    assert (len(cache), cache.used_bytes) == (6, 6)
    cache.use(tree_use("pqrstu", 4))
    assert "".join(cache._nodes) == "pqrstu"
    assert cache.used_bytes == 6


def test_an_item_that_has_to_leave_for_its_own_chain_comes_in_anew() -> None:
    cache = lru(3)
    cache.use(tree_use("abc", 1))
    cache.use(tree_use("xyc", 2))
    assert cache.used_bytes == len(cache) == len(cache._nodes)
    assert cache.used_bytes <= 3


@given(st.lists(st.lists(st.sampled_from("abcdefgh"), unique=True, min_size=1), max_size=30))
def test_what_is_used_is_what_is_held_whatever_trees_come(chains: list[list[str]]) -> None:
    cache: ShadowCache[str] = ShadowCache(5, LeafLru(), one)
    for now_s, items in enumerate(chains):
        cache.use(Use(items, 0, float(now_s)))
        nodes = cache._nodes
        assert cache.used_bytes == len(nodes) <= 5
        below = [node.parent.item for node in nodes.values() if node.parent is not None]
        assert all(node.n_children == below.count(item) for item, node in nodes.items())
        assert set(below) <= set(nodes)
        leaves = {item for item, node in nodes.items() if not node.n_children}
        assert set(cache._policy.victims()) == leaves


def test_what_does_not_fit_stays_out_tail_first() -> None:
    cache = lru(3)
    cache.use(use("xy", 1))
    assert cache.use(use("abcdef", 2)) == 0
    assert held(cache, "abcdef", "xy") == [3, 0]
    assert cache.use(use("abcdef", 3)) == 3
    assert cache.used_bytes == 3


def test_nothing_fits_into_a_cache_without_room() -> None:
    cache = lru(0)
    for now_s in range(3):
        assert cache.use(use("ab", now_s)) == 0
    assert len(cache) == cache.used_bytes == cache.n_evicted == 0


def test_the_chain_in_use_is_not_evicted_for_its_own_end() -> None:
    cache = lru(3)
    cache.use(use("ab", 1))
    cache.use(use("x", 2))
    cache.use(use("abc", 3))  # ab is the coldest leaf, and it is where this chain goes on
    assert held(cache, "abc", "x") == [3, 0]


def test_a_parent_in_use_whose_children_go_is_kept() -> None:
    cache = lru(3)
    cache.use(use("ab", 1))
    cache.use(use("ac", 2))
    cache.use(use("axy", 3))
    assert held(cache, "axy", "ab", "ac") == [3, 1, 1]


def test_items_take_what_they_take() -> None:
    cache: ShadowCache[str] = ShadowCache(10, LeafLru(), lambda item: {"a": 6, "b": 4}.get(item, 3))
    cache.use(use("a", 1))
    cache.use(use("b", 2))
    assert cache.used_bytes == 10
    cache.use(use("c", 3))
    assert held(cache, "a", "b", "c") == [0, 1, 1]
    assert cache.used_bytes == 7


def test_an_evicted_item_is_told_with_its_parent_and_its_last_use() -> None:
    told: list[tuple[str, str | None, float]] = []
    policy: LeafLru[str] = LeafLru()
    cache = ShadowCache(2, policy, one, lambda *what: told.append(what))
    cache.use(use("ab", 1))
    cache.use(use("xy", 2))
    assert told == [("ab", "a", 1), ("a", None, 1)]
    assert cache.n_evicted == 2


def test_lineage_goes_up_to_the_root() -> None:
    cache = lru(5)
    cache.use(use("abc", 1))
    assert list(cache.lineage("abc")) == ["abc", "ab", "a"]


def test_taking_in_continues_what_is_held_and_is_no_use() -> None:
    cache = lru(4)
    cache.use(use("ab", 5))
    assert cache.take_in(["ab", "abc", "abcd"], 1) == 2
    cache.use(use("x", 6))
    assert held(cache, "abcd", "x") == [3, 1]
    assert cache.take_in(["abc"], 7) == 0


def test_touching_refreshes_what_is_held_and_takes_in_nothing() -> None:
    cache = lru(2)
    cache.use(use("a", 1))
    cache.use(use("b", 2))
    assert cache.touch(chain("ax"), 3) == 1
    cache.use(use("c", 4))
    assert held(cache, "a", "b") == [1, 0]
    assert cache.touch(chain("z"), 5) == 0
    assert len(cache) == 2


class Recorder(LeafLru[str]):
    """What a policy hears."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def use(self, use: Use[str]) -> None:
        self.calls.append(f"use {use.items[-1]}")

    def enter(self, item: str, nbytes: int) -> None:
        self.calls.append(f"enter {item}")

    def leave(self, item: str) -> None:
        self.calls.append(f"leave {item}")

    def offer(self, item: str, last_used: float, nbytes: int) -> None:
        self.calls.append(f"offer {item} {last_used:g}")
        super().offer(item, last_used, nbytes)

    def withdraw(self, item: str) -> None:
        self.calls.append(f"withdraw {item}")
        super().withdraw(item)

    def victims(self) -> Iterator[str]:
        self.calls.append("victims")
        return super().victims()


def test_the_calls_of_a_use_come_in_the_order_of_the_seam() -> None:
    policy = Recorder()
    cache = ShadowCache(4, policy, one)
    cache.use(use("ab", 1))
    cache.use(use("xy", 2))
    policy.calls.clear()
    cache.use(use("xyz", 3))
    assert policy.calls == [
        "use xyz",
        "withdraw xy",
        "victims", "withdraw ab", "leave ab", "offer a 1",
        "enter xyz",
        "offer xyz 3",
    ]  # fmt: skip


def test_a_parent_is_offered_with_the_last_use_of_a_child_that_left() -> None:
    policy = Recorder()
    cache = ShadowCache(3, policy, one)
    cache.use(use("abc", 1))
    cache.use(use("abc", 5))
    policy.calls.clear()
    cache.use(use("x", 6))
    assert "offer ab 5" in policy.calls


class NaiveLru:
    """The rule of replay, written down plainly: all blocks refreshed, tails older than heads."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used: dict[str, tuple[float, int]] = {}

    def use(self, text: str, now_s: float) -> int:
        items = chain(text)
        n_held = next((n for n, item in enumerate(items) if item not in self.used), len(items))
        pinned = set(items[:n_held])
        for item in pinned:
            self.used[item] = (now_s, -len(item))
        while len(self.used) > max(self.capacity - len(items) + n_held, len(pinned)):
            del self.used[min(self.used.keys() - pinned, key=self.used.__getitem__)]
        for item in items[n_held : n_held + self.capacity - len(self.used)]:
            self.used[item] = (now_s, -len(item))
        return n_held


@given(
    st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=60),
    st.integers(0, 12),
)
def test_lru_holds_what_the_rule_of_replay_says(texts: list[str], capacity: int) -> None:
    cache, naive = lru(capacity), NaiveLru(capacity)
    for now_s, text in enumerate(texts):
        assert cache.use(use(text, now_s)) == naive.use(text, now_s)
        assert len(cache) == len(naive.used)
        assert all(item in cache for item in naive.used)

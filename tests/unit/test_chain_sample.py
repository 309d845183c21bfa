"""A share of all conversations, each as a whole."""

from __future__ import annotations

import random

from blobstore.tiering.chain_sample import ChainSample

SHARE = 0.25


def _itself(item: int) -> int:
    return item


def _sample(share: float = SHARE, seed: int = 0) -> ChainSample[int]:
    return ChainSample(share, _itself, seed)


def _chain(conversation: int, n: int, head: tuple[int, ...] = ()) -> list[int]:
    return [*head, *range(conversation * 1000, conversation * 1000 + n)]


def test_the_share_of_conversations_is_about_what_was_asked() -> None:
    sample = _sample()
    n = sum(sample.picks(_chain(conversation, 5)) for conversation in range(1, 2001))
    assert 430 < n < 570


def test_a_share_of_one_is_everything() -> None:
    sample = _sample(1.0)
    assert all(sample.picks(_chain(conversation, 3)) for conversation in range(1, 100))


def test_a_conversation_is_in_or_out_however_long_it_gets() -> None:
    sample = _sample()
    for conversation in range(1, 200):
        picks = set()
        for n in range(1, 20):
            sample.note(_chain(conversation, n), n - 1)
            picks.add(sample.picks(_chain(conversation, n)))
        assert len(picks) == 1


def test_conversations_that_share_their_head_are_told_apart_below_it() -> None:
    sample = _sample()
    head = (7, 8, 9)
    for conversation in range(1, 50):
        sample.note(_chain(conversation, 5, head), 3)
    n = sum(sample.picks(_chain(conversation, 5, head)) for conversation in range(1, 1001))
    assert 190 < n < 310


def test_the_deepest_head_counts() -> None:
    sample = _sample()
    for group in range(1, 10):
        for conversation in range(1, 10):
            chain = [5, group * 10_000, *_chain(group * 100 + conversation, 4)]
            sample.note(chain, 1 if conversation == 1 else 2)
    picks = {
        sample.picks([5, 10_000, *_chain(100 + conversation, 4)]) for conversation in range(1, 40)
    }
    assert picks == {True, False}


def test_a_conversation_that_branches_a_little_stays_whole() -> None:
    sample = _sample()
    trunk = _chain(3, 10)
    branches = [[*trunk, 10**6 + branch] for branch in range(7)]
    for branch in branches:
        sample.note(branch, 10)
    assert len({sample.picks(branch) for branch in branches}) == 1


def test_one_branch_that_comes_again_and_again_makes_no_head() -> None:
    sample = _sample()
    for _ in range(100):
        sample.note([1, 2, 3], 1)
    chains = [[1, at, 3] for at in range(2, 50)]
    assert len({sample.picks(chain) for chain in chains}) == 1


def test_memory_is_bounded_under_once_only_chains() -> None:
    sample = _sample()
    rng = random.Random(1)
    for conversation in range(20_000):
        chain = _chain(conversation + 1, 3)
        sample.note(chain, 1)
        if rng.random() < 0.5:
            sample.note(_chain(conversation + 1, 5), 3)
    assert len(sample._continued) <= 4096
    assert len(sample._heads) <= 1024


def test_what_is_gone_is_forgotten() -> None:
    sample = _sample()
    for conversation in range(1, 50):
        sample.note(_chain(conversation, 5, (7,)), 1)
    assert sample._heads
    sample.forget(7)
    assert not sample._heads
    sample.note([1, 2], 1)
    sample.forget(1)
    assert not sample._continued


def test_seeds_give_different_samples() -> None:
    chains = [_chain(conversation, 2) for conversation in range(1, 200)]
    one, other = _sample(seed=1), _sample(seed=2)
    assert [one.picks(c) for c in chains] != [other.picks(c) for c in chains]

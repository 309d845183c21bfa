"""Falling back to a reference, and letting go of it."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from functools import partial

import pytest

from blobstore.tiering import fallback as module
from blobstore.tiering import switched_order
from blobstore.tiering.fallback import Fallback
from blobstore.tiering.lru import LeafLru
from blobstore.tiering.policies import POLICIES
from blobstore.tiering.policy import PolicyTerms, Use
from blobstore.tiering.prefill_cost import prefill_cost
from blobstore.tiering.shadow_cache import ShadowCache
from blobstore.tiering.switched_order import SwitchedOrder
from tests.support.stand_in_learner import NewestFirst, StandInLearner

CAPACITY = 200
LENGTH = 4
NAMES = ("ours", "lru", "lru2")


def _itself(item: int) -> int:
    return item


class _Tier:
    """A tier of CAPACITY items under a Fallback whose learned order is newest first."""

    def __init__(self, capacity: int = CAPACITY, *, inline: bool = True) -> None:
        terms = PolicyTerms(capacity, _itself)
        self.order: SwitchedOrder[int] = SwitchedOrder(
            {"ours": NewestFirst, **{name: partial(POLICIES[name], terms) for name in NAMES[1:]}},
            "lru",
        )
        self.learner: StandInLearner[int] = StandInLearner(_itself)
        self.fallback = Fallback(self.order, terms, self.learner, NAMES, inline=inline)
        self.cache = ShadowCache(capacity, self.order, lambda item: 1)
        self.now_s = 0.0
        self.in_force: list[str] = []

    def run(self, chains: Iterator[int], n: int) -> float:
        """Use `n` chains; the share of items that were hit."""
        hits = 0
        for _ in range(n):
            chain = next(chains)
            items = list(range(chain * LENGTH, (chain + 1) * LENGTH))
            self.now_s += 1.0
            use = Use(items, self.cache.n_held(items), self.now_s)
            self.order.tell(use)
            self.fallback.note(use)
            hits += self.cache.use(use)
            self.fallback.tick()
            if self.order.in_force not in self.in_force[-1:]:
                self.in_force.append(self.order.in_force)
        return hits / (n * LENGTH)


def _rounds(n: int) -> Iterator[int]:
    """Chains that come round and round: LRU saves nothing of them if they do not fit."""
    while True:
        yield from range(n)


def _drift(seed: int) -> Iterator[int]:
    """Chains used a few times each, soon after another: the newest first is the worst order."""
    rng = random.Random(seed)
    chain = 1000
    while True:
        chain += rng.random() < 0.3
        yield chain - min(int(rng.expovariate(0.1)), 40)


def test_until_there_is_a_fit_the_first_reference_is_in_force() -> None:
    tier = _Tier()
    tier.run(_rounds(80), 2000)
    assert tier.in_force == ["lru"]


def test_the_learned_order_takes_over_with_the_first_fit_and_stays_while_it_is_better() -> None:
    tier = _Tier()
    tier.run(_rounds(80), 100)
    tier.fallback.fitted()
    assert tier.order.in_force == "ours"
    assert tier.run(_rounds(80), 2000) > 0.3
    assert tier.in_force == ["lru", "ours"]
    assert tier.fallback.n_switches == 0


def test_a_pattern_that_flips_engages_the_fallback_and_lets_go_of_it() -> None:
    tier = _Tier()
    tier.fallback.fitted()
    tier.run(_rounds(80), 1500)
    tier.run(_drift(1), 1500)
    assert tier.in_force == ["ours", "lru"] or tier.in_force == ["ours", "lru2"]
    tier.run(_rounds(80), 1500)
    assert tier.order.in_force == "ours"
    assert tier.fallback.n_switches == 2


def test_shadows_that_start_while_an_order_is_being_built_judge_the_one_that_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(switched_order, "BUILD_ITEMS", 1)
    tier = _Tier()
    tier.run(_rounds(80), 20)
    tier.fallback.fitted()
    assert (tier.order.in_force, tier.order.wanted) == ("lru", "ours")
    tier.run(_rounds(80), 20)  # the tier is half full: shadows start
    assert tier.order.in_force == "lru"
    tier.run(_rounds(80), 2000)
    assert tier.in_force == ["lru", "ours"]
    assert tier.fallback.n_switches == 0


def test_falling_back_costs_little_against_the_reference_itself() -> None:
    tier = _Tier()
    tier.fallback.fitted()
    alone = ShadowCache(CAPACITY, POLICIES["lru"](PolicyTerms(CAPACITY, _itself)), lambda item: 1)
    found = tier.run(_drift(2), 4000)
    chains, hits = _drift(2), 0
    for second in range(4000):
        chain = next(chains)
        items = list(range(chain * LENGTH, (chain + 1) * LENGTH))
        hits += alone.use(Use(items, 0, float(second)))
    assert found > hits / (4000 * LENGTH) - 0.05


def test_later_fits_leave_the_front_alone() -> None:
    tier = _Tier()
    tier.fallback.fitted()
    tier.run(_drift(1), 1500)
    assert tier.order.in_force != "ours"
    tier.fallback.fitted()
    assert tier.order.in_force != "ours"


def test_nothing_runs_before_the_tier_is_half_full() -> None:
    tier = _Tier(capacity=10_000)
    tier.run(_rounds(1200), 1200)
    assert tier.learner.n_shadows == 0
    tier.run(iter(range(1200, 1400)), 200)
    assert tier.learner.n_shadows == 1


def test_a_large_tier_is_sampled_and_the_shadows_stay_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SHADOW_ITEMS_MIN", 100)
    monkeypatch.setattr(module, "SHADOW_ITEMS_MAX", 400)
    tier = _Tier(capacity=4000)
    tier.fallback.fitted()
    tier.run(_rounds(1600), 1600)
    shares = tier.fallback.stats()["sample"]
    assert shares == 0.1
    tier.run(_rounds(1600), 6400)
    assert max(len(shadow) for shadow in tier.fallback._shadows) < 900
    assert tier.order.in_force == "ours"
    ratios = tier.fallback.stats()["shadows"]
    assert isinstance(ratios, dict)
    assert ratios["ours"] > ratios["lru"] + 0.2
    tier.run(_drift(3), 8000)
    assert tier.order.in_force != "ours"


def test_items_of_another_size_start_the_sample_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHADOW_ITEMS_MIN", 20)
    tier = _Tier(capacity=200)
    tier.run(_rounds(80), 200)
    assert tier.fallback.stats()["sample"] == 0.125
    for item in list(tier.order.victims()):
        tier.order.enter(item, 40)
    tier.run(_rounds(80), 2)
    assert tier.fallback.stats()["sample"] == 1.0


def test_an_emptied_tier_leaves_the_shadows_as_they_are() -> None:
    tier = _Tier()
    tier.run(_rounds(80), 200)
    before = tier.fallback.stats()["sample"]
    for item in range(80 * LENGTH):
        tier.order.withdraw(item)
        tier.order.leave(item)
    assert tier.order.n_items == 0
    tier.fallback.tick()
    assert tier.fallback.stats()["sample"] == before


def test_shadows_that_fail_start_anew(caplog: pytest.LogCaptureFixture) -> None:
    tier = _Tier()
    tier.run(_rounds(80), 200)

    def broken(use: Use[int]) -> int:
        raise KeyError(use.items[0])

    tier.fallback._shadows[1].use = broken  # type: ignore[method-assign]
    tier.run(_rounds(80), 1)
    assert "start anew" in caplog.text
    tier.run(_rounds(80), 200)
    assert tier.fallback.stats()["shadows"]
    assert caplog.text.count("start anew") == 1


def test_what_is_stored_after_a_miss_counts_no_second_request() -> None:
    tier = _Tier()
    tier.run(_rounds(80), 200)
    before = tier.fallback._race.ratios()
    tier.fallback.note(Use([1, 2, 3], 3, 300.0, continues=True))
    tokens = tier.fallback._race._tokens
    tier.fallback.note(Use([10**6, 10**6 + 1], 0, 301.0))
    tier.fallback.note(Use([10**6, 10**6 + 1, 10**6 + 2], 2, 302.0, continues=True))
    assert tier.fallback._race._tokens < tokens + 2.01
    after = tier.fallback._race.ratios()
    assert after["lru"] <= before["lru"]


def test_regret_is_what_the_best_reference_saves_more() -> None:
    tier = _Tier()
    tier.fallback.fitted()
    tier.run(_drift(1), 1500)
    stats = tier.fallback.stats()
    shadows = stats["shadows"]
    assert isinstance(shadows, dict)
    assert stats["regret"] == max(shadows["lru"], shadows["lru2"]) - shadows["ours"]
    assert stats["regret"] > 0  # type: ignore[operator]


def test_shadows_see_uses_at_the_next_tick_and_no_more_than_there_is_time_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock) / 1000)  # 1 ms a look
    tier = _Tier(inline=False)
    tier.run(_rounds(80), 100)
    race = tier.fallback._race
    before = race.n_requests
    for chain in range(100):
        tier.fallback.note(Use([10**6 + chain], 0, 200.0))
    assert race.n_requests == before
    tier.fallback.tick()
    assert before < race.n_requests <= before + 5
    for _ in range(100):
        tier.fallback.tick()
    assert race.n_requests <= before + 64


def test_a_fallback_works_by_ticks_too() -> None:
    tier = _Tier(inline=False)
    tier.fallback.fitted()
    tier.run(_rounds(80), 1500)
    tier.run(_drift(1), 1500)
    assert tier.order.in_force != "ours"


def test_where_costs_count_late_tokens_weigh_more() -> None:
    terms = PolicyTerms(4, _itself)
    order: SwitchedOrder[int] = SwitchedOrder(dict.fromkeys(NAMES, LeafLru), "lru")
    fallback = Fallback(
        order, terms, StandInLearner(_itself), NAMES, inline=True, weigh=prefill_cost
    )
    for item in range(4):
        order.enter(item, 1)
    for now_s in (1.0, 2.0):
        fallback.note(Use([1, 2], 0, now_s, item_tokens=53_900, prompt_tokens=4 * 53_900))
    [ratio] = set(fallback._race.ratios().values())
    assert round(ratio, 3) == round(4 / (12 + 12), 3)

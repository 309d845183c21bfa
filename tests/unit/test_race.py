"""Who leads, and when that is more than chance."""

from __future__ import annotations

import random

from blobstore.tiering.race import Race

NAMES = ("ours", "lru", "lru2")


def _race() -> Race:
    return Race(NAMES, margin=0.002)


def _run(race: Race, n: int, chances: tuple[float, float, float], seed: int = 0) -> int:
    """`n` requests of 100 tokens, saved with these chances; how often the front changed.

    What one saves, those with a better chance save too, as caches do.
    """
    rng = random.Random(seed)
    changes = 0
    for _ in range(n):
        luck = rng.random()
        race.note([100.0 if luck < chance else 0.0 for chance in chances], 100.0)
        changes += race.judge()
    return changes


def test_the_wanted_one_is_in_front_at_first() -> None:
    assert _race().in_front == "ours"


def test_equals_never_overtake() -> None:
    race = _race()
    assert _run(race, 5000, (0.5, 0.5, 0.5)) == 0
    assert race.in_front == "ours"


def test_who_saves_much_more_takes_over_soon() -> None:
    race = _race()
    _run(race, 300, (0.4, 0.5, 0.45))
    assert race.in_front == "lru"


def test_the_best_of_those_that_lead_takes_over() -> None:
    race = _race()
    _run(race, 400, (0.3, 0.4, 0.6))
    assert race.in_front == "lru2"


def test_who_saves_a_little_more_takes_over_in_the_long_run() -> None:
    race = _race()
    assert _run(race, 150, (0.5, 0.51, 0.5)) == 0
    _run(race, 8000, (0.5, 0.51, 0.5))
    assert race.in_front == "lru"


def test_within_the_margin_nobody_takes_over() -> None:
    race = _race()
    assert _run(race, 20_000, (0.5, 0.5015, 0.5)) == 0


def test_few_requests_decide_nothing() -> None:
    race = _race()
    _run(race, 127, (0.0, 1.0, 0.0))
    assert race.in_front == "ours"
    _run(race, 1, (0.0, 1.0, 0.0))
    assert race.in_front == "lru"


def test_a_pattern_that_flips_changes_the_front_and_flips_it_back() -> None:
    race = _race()
    _run(race, 5000, (0.6, 0.5, 0.5), seed=1)
    assert race.in_front == "ours"
    _run(race, 1000, (0.3, 0.5, 0.4), seed=2)
    assert race.in_front == "lru"
    _run(race, 1000, (0.6, 0.5, 0.5), seed=3)
    assert race.in_front == "ours"


def test_noise_alone_changes_the_front_seldom() -> None:
    """Contenders that save as much, of different requests: no reason to change at all."""
    changes = 0
    for seed in range(20):
        race, rng = _race(), random.Random(seed)
        for _ in range(3000):
            race.note([100.0 * (rng.random() < 0.5) for _ in NAMES], 100.0)
            changes += race.judge()
    assert changes <= 8


def test_single_requests_change_nothing_however_large() -> None:
    race = _race()
    _run(race, 1000, (0.5, 0.5, 0.5))
    race.note([0.0, 1e6, 0.0], 1e6)
    assert not race.judge()


def test_ratios_are_shares_of_all_tokens() -> None:
    race = _race()
    for _ in range(100):
        race.note([50.0, 25.0, 0.0], 100.0)
    ratios = race.ratios()
    assert [round(ratios[name], 6) for name in NAMES] == [0.5, 0.25, 0.0]
    assert _race().ratios() == dict.fromkeys(NAMES, 0.0)

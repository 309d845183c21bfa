"""All decisions of one node, put together."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from blobstore.errors import InvalidRequest
from blobstore.tiering.plan import (
    POLICY_NAMES,
    Plan,
    PlanSettings,
    make_learned_plan,
    make_plan,
)
from blobstore.tiering.policy import PolicyTerms, Use
from blobstore.tiering.shadow_cache import ShadowCache
from tests.support.stand_in_learner import METHOD, StandIns

DRAM, SSD = 40, 400
INLINE = PlanSettings(inline=True)


def _itself(item: int) -> int:
    return item


def _terms(capacity: int) -> PolicyTerms[int]:
    return PolicyTerms(capacity, _itself)


def _learned(stand_ins: StandIns, settings: PlanSettings = INLINE) -> Plan[int]:
    return make_learned_plan(stand_ins, METHOD, _terms(DRAM), _terms(SSD), settings)


class _Node:
    """Both tiers without bytes, driven as the service drives them; the SSD holds whole chains."""

    def __init__(self, plan: Plan[int]) -> None:
        assert plan.ssd is not None
        self.plan = plan
        self.dram = ShadowCache(DRAM, plan.dram, lambda item: 1)
        self.ssd = ShadowCache(SSD, plan.ssd, lambda item: 1)
        self.now_s = 0.0
        self.reasons: dict[str, int] = {}

    def use(self, items: list[int]) -> None:
        self.now_s += 1.0
        held = max(self.dram.n_held(items), self.ssd.n_held(items))
        use = Use(items, held, self.now_s)
        self.plan.use(use)
        self.dram.use(use)
        missing = items[self.ssd.n_held(items) :]
        if missing:
            free = SSD - self.ssd.used_bytes
            verdict = self.plan.admission.decide(missing, len(missing), free, self.now_s)
            self.reasons[verdict.reason] = self.reasons.get(verdict.reason, 0) + 1
            if verdict.admit:
                self.plan.admission.wrote(len(missing), self.now_s)
                self.ssd.use(use)
        self.plan.tick(self.now_s)

    def run(self, n: int, seed: int = 1) -> None:
        rng = random.Random(seed)
        for _ in range(n):
            chain = int(rng.paretovariate(0.5)) % 1000
            self.use([chain * 10 + at for at in range(rng.randint(1, 6))])


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_every_policy_makes_a_plan_that_works(name: str) -> None:
    plan = make_plan(name, _terms(DRAM), _terms(SSD), INLINE)
    node = _Node(plan)
    node.run(500)
    assert 0 < len(node.dram) <= DRAM
    assert 0 < len(node.ssd) <= SSD
    assert plan.stats()["wanted"] == name
    assert plan.explain(10, node.now_s)["policy"] == plan.stats()["policy"]
    plan.close()


def test_a_plan_without_an_ssd_has_no_order_for_one() -> None:
    plan = make_plan("lru", _terms(DRAM))
    assert plan.ssd is None
    assert plan.stats()["ssd"] == {}
    assert not plan.admission.decide([1], 1, 0, 0.0).admit
    plan.close()


def test_an_unknown_name_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(InvalidRequest, match=r"'lfru'.*ours.*lru2"):
        make_plan("lfru", _terms(DRAM))


def test_a_learned_plan_is_lru_until_it_has_learned() -> None:
    plan = _learned(StandIns(fit_every=100))
    node = _Node(plan)
    node.run(90)
    assert plan.stats()["policy"] == "lru"
    assert plan.stats()["fallback"] is True
    assert "too little" in str(plan.explain(1, node.now_s)["policy_why"])
    node.run(20)
    assert plan.stats()["policy"] == "ours"
    assert plan.stats()["fallback"] is False
    assert plan.explain(1, node.now_s)["policy_why"] == ""
    plan.close()


def test_a_learned_plan_falls_back_in_each_tier_for_itself() -> None:
    plan = _learned(StandIns())
    node = _Node(plan)
    node.run(3000)
    stats: dict[str, Any] = plan.stats()
    assert stats["policy"] != "ours"  # newest first is bad at this
    assert stats["regret"] > 0
    assert set(stats["shadows"]) == {"ours", "lru", "lru2"}
    assert set(stats["ssd"]) >= {"policy", "shadows", "regret", "switches"}
    assert "saved more" in str(plan.explain(1, node.now_s)["policy_why"])
    plan.close()


def test_every_use_is_told_once_and_what_is_gone_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_ins = StandIns()
    plan = _learned(stand_ins)
    node = _Node(plan)
    node.run(50)
    told: list[int] = []
    for fallback in plan._fallbacks:
        monkeypatch.setattr(fallback, "forget", told.append)
    plan.forget(7)
    assert told == [7, 7]
    [learner] = stand_ins.made
    assert learner.n_uses == 50
    assert learner.forgotten == [7]
    plan.close()


def test_the_unlikely_are_kept_out_once_the_ssd_is_full_and_a_fit_says_so() -> None:
    stand_ins = StandIns()
    node = _Node(_learned(stand_ins))
    stand_ins.made[0].odds = 0.01
    node.run(3000)
    assert node.reasons["room"] > 0
    assert node.reasons["unlikely"] > node.reasons["room"]
    assert "worth" not in node.reasons


def test_an_explanation_tells_what_is_known_and_what_would_be_decided() -> None:
    plan = _learned(StandIns())
    node = _Node(plan)
    node.run(1000)
    node.use([1, 2, 3])
    told = plan.explain(3, node.now_s)
    assert told["class"] == "a stand-in"
    assert told["floor"] == {"dram": 1.0, "ssd": 1.0}
    assert told["admission"] == {
        "verdict": "admit",
        "reason": "worth",
        "p_reuse": 0.5,
        "threshold": 0.25,
    }
    plan.close()


def test_a_write_budget_is_kept_and_told() -> None:
    plan = make_plan(
        "lru", _terms(DRAM), _terms(SSD), PlanSettings(ssd_writes_per_day=80, inline=True)
    )
    node = _Node(plan)
    node.run(500)
    assert node.reasons["budget"] > 400
    budget: Any = plan.stats()["write_budget"]
    assert budget["day_bytes"] == pytest.approx(80)
    assert budget["day_left_bytes"] < 5
    unlimited: Any = make_plan("lru", _terms(DRAM), _terms(SSD)).stats()["write_budget"]
    assert unlimited == {"day_left_bytes": None, "day_bytes": None}


def test_a_restart_starts_warm_and_with_the_learned_order_in_force(tmp_path: Path) -> None:
    settings = PlanSettings(model_path=tmp_path / "model", inline=True)
    plan = _learned(StandIns(), settings)
    _Node(plan).run(20)
    plan.close()
    stand_ins = StandIns()
    again = _learned(stand_ins, settings)
    stats: dict[str, Any] = again.stats()
    assert stats["model"]["source"] == "warm"
    assert stats["policy"] == "ours"
    assert stand_ins.made[0].adopted
    again.close()


def test_a_plan_learns_on_a_thread_of_its_own_and_ends_it() -> None:
    plan = _learned(StandIns(), PlanSettings())
    node = _Node(plan)
    node.run(200)
    plan.close()  # the leak check looks for the thread
    plan.close()


def test_millions_of_once_only_keys_leave_bounded_traces() -> None:
    plan = _learned(StandIns(fit_every=1 << 30))
    node = _Node(plan)
    for chain in range(6_000):
        node.use([chain * 10, chain * 10 + 1])
    for fallback in plan._fallbacks:
        assert all(len(shadow) <= SSD for shadow in fallback._shadows)
        assert len(fallback._sample._continued) <= 4096
    assert plan._dram.n_items <= DRAM
    plan.close()


def test_what_the_classifier_learned_is_kept_and_a_damaged_file_is_said(tmp_path: Path) -> None:
    path = tmp_path / "model"
    settings = PlanSettings(model_path=path, inline=True)
    plan = make_plan("ours", _terms(DRAM), _terms(SSD), settings)
    assert plan.stats()["policy"] == "lru"
    _Node(plan).run(160)
    assert plan.stats()["fits"] == 1
    plan.close()
    again: dict[str, Any] = make_plan("ours", _terms(DRAM), _terms(SSD), settings).stats()
    assert again["model"]["source"] == "warm"
    assert again["policy"] == again["ssd"]["policy"] == "ours"
    path.write_bytes(path.read_bytes()[:-9])
    cold: dict[str, Any] = make_plan("ours", _terms(DRAM), _terms(SSD), settings).stats()
    assert cold["model"]["source"] == "cold"
    assert "damaged" in cold["model"]["why"]
    assert cold["policy"] == "lru"


def test_the_learned_plan_is_deterministic() -> None:
    def run() -> list[object]:
        plan = make_plan("ours", _terms(DRAM), _terms(SSD), INLINE)
        node = _Node(plan)
        node.run(220)
        return [node.reasons, sorted(node.dram._nodes), sorted(node.ssd._nodes)]

    assert run() == run()


def test_costs_can_be_the_objective() -> None:
    settings = PlanSettings(objective="cost", inline=True)
    node = _Node(make_plan("ours", _terms(DRAM), _terms(SSD), settings))
    node.run(160)
    assert node.plan.stats()["fits"] == 1

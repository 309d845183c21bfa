"""Metrics of moves, ages, and the policy in force, from what `Store.stats()` may say."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.core import CollectorRegistry, Metric
from prometheus_client.registry import Collector

from blobstore.ages import Ages
from blobstore.http.tiering_metrics import tiering_metrics
from blobstore.reasons import MOVED, REFUSED
from blobstore.tiering.plan import PlanSettings, make_plan
from blobstore.tiering.policy import PolicyTerms
from tests.support.plan_stats import PLAN


class Told(Collector):
    """The metrics of one answer of stats."""

    def __init__(self, stats: dict[str, Any]) -> None:
        self._stats = stats

    def collect(self) -> list[Metric]:
        return list(tiering_metrics(self._stats))


class Page:
    """What would be scraped."""

    def __init__(self, **stats: Any) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(Told({"ages": Ages().as_dict(), "plan": PLAN} | stats))

    def value(self, name: str, **labels: str) -> float | None:
        return self._registry.get_sample_value(f"blobstore_{name}", labels)


def test_every_reason_begins_at_0() -> None:
    page = Page()
    for crossing, reasons in MOVED.items():
        for reason in reasons:
            assert page.value("moved_blobs_total", crossing=crossing, reason=reason) == 0
            assert page.value("moved_bytes_total", crossing=crossing, reason=reason) == 0
    for tier, reasons in REFUSED.items():
        for reason in reasons:
            assert page.value("refused_blobs_total", tier=tier, reason=reason) == 0


def test_moves_are_told_by_crossing_and_reason() -> None:
    page = Page(
        counters={
            "moved_blobs": {"dram>ssd": {"worth": 3, "new": 1}},
            "refused_bytes": {"ssd": {"budget": 10}},
        }
    )
    assert page.value("moved_blobs_total", crossing="dram>ssd", reason="worth") == 3
    assert page.value("moved_blobs_total", crossing="dram>ssd", reason="new") == 1
    assert page.value("moved_blobs_total", crossing="ssd>dram", reason="get") == 0
    assert page.value("refused_bytes_total", tier="ssd", reason="budget") == 10


def test_ages_are_cumulative_histograms() -> None:
    ages = Ages()
    for gap_s in (0.05, 2.0, 1e7):
        ages.reused(gap_s)
    ages.left("ssd", 50.0)
    page = Page(ages=ages.as_dict())
    assert page.value("reuse_gap_seconds_bucket", le="0.1") == 1
    assert page.value("reuse_gap_seconds_bucket", le="3.0") == 2
    assert page.value("reuse_gap_seconds_bucket", le="+Inf") == 3
    assert page.value("reuse_gap_seconds_sum") == pytest.approx(1e7 + 2.05)
    assert page.value("age_at_eviction_seconds_count", tier="ssd") == 1
    assert page.value("age_at_eviction_seconds_count", tier="dram") == 0


def test_the_policy_in_force_in_each_tier_and_how_it_does() -> None:
    page = Page()
    about = {"wanted": "ours", "model": "warm"}
    assert page.value("policy_info", tier="dram", in_force="lru2", **about) == 1
    assert page.value("policy_info", tier="ssd", in_force="ours", **about) == 1
    for tier, fallback, switches, regret in (("dram", 1, 3, 0.02), ("ssd", 0, 1, -0.1)):
        assert page.value("policy_fallback", tier=tier) == fallback
        assert page.value("policy_switches_total", tier=tier) == switches
        assert page.value("shadow_regret_ratio", tier=tier) == regret
    assert page.value("shadow_sample_ratio", tier="dram") == 0.25
    assert page.value("shadow_sample_ratio", tier="ssd") == 1.0
    assert page.value("shadow_saved_ratio", tier="dram", policy="lru2") == 0.52
    assert page.value("shadow_saved_ratio", tier="ssd", policy="ours") == 0.7


def test_a_store_without_ssd_has_no_policy_there() -> None:
    page = Page(plan=PLAN | {"ssd": {}})
    assert page.value("policy_fallback", tier="dram") == 1
    assert page.value("policy_fallback", tier="ssd") is None


def test_a_reference_that_was_asked_for_has_no_model_and_no_shadows() -> None:
    plan = {"policy": "lru", "wanted": "lru", "write_budget": {}, "ssd": {"policy": "lru"}}
    page = Page(plan=plan)
    assert page.value("policy_info", tier="dram", in_force="lru", wanted="lru", model="") == 1
    assert page.value("policy_fallback", tier="ssd") == 0
    assert page.value("model_fits_total") is None


def test_what_the_classifier_costs() -> None:
    page = Page()
    assert page.value("model_fits_total") == 7
    assert page.value("model_failed_fits_total") == 0
    assert page.value("model_fit_seconds_total") == 1.5
    assert page.value("ssd_admission_threshold_ratio") == 0.125


def test_no_limit_is_no_number() -> None:
    assert Page().value("ssd_write_budget_left_bytes") is None
    limited = PLAN | {"write_budget": {"day_left_bytes": 5}}
    assert Page(plan=limited).value("ssd_write_budget_left_bytes") == 5


def test_the_plan_tells_nothing_that_is_not_rendered() -> None:
    terms: PolicyTerms[int] = PolicyTerms(1000, lambda item: item)
    plan = make_plan("ours", terms, terms, PlanSettings(inline=True))
    try:
        told = plan.stats()
    finally:
        plan.close()
    assert told.keys() <= PLAN.keys()
    for name in ("ssd", "model", "write_budget", "admission"):
        inner = told[name]
        assert isinstance(inner, dict)
        assert inner.keys() <= PLAN[name].keys(), name

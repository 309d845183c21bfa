"""Metrics of what moves between tiers and why, and of the policy that decides it."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import HistogramMetricFamily, InfoMetricFamily, Metric

from blobstore.ages import histograms
from blobstore.http.families import (
    PREFIX,
    Crossed,
    One,
    Tree,
    at,
    buckets,
    crossed,
    family,
    ones,
)
from blobstore.reasons import MOVED, REFUSED

CROSSED = (
    Crossed(
        "moved_blobs_total",
        "counters.moved_blobs",
        ("crossing", "reason"),
        "Blobs that crossed between tiers, or left one (to none), by reason.",
        MOVED,
    ),
    Crossed(
        "moved_bytes_total",
        "counters.moved_bytes",
        ("crossing", "reason"),
        "Bytes of blobs that crossed between tiers, or left one (to none), by reason.",
        MOVED,
    ),
    Crossed(
        "refused_blobs_total",
        "counters.refused_blobs",
        ("tier", "reason"),
        "Blobs that were considered for a tier and not let in, by reason.",
        REFUSED,
    ),
    Crossed(
        "refused_bytes_total",
        "counters.refused_bytes",
        ("tier", "reason"),
        "Bytes of blobs that were considered for a tier and not let in, by reason.",
        REFUSED,
    ),
)

PLAN_ONES = (
    One("model_fits_total", "plan.fits", "Times that the classifier was fitted."),
    One("model_failed_fits_total", "plan.fits_failed", "Fits that ended with an error."),
    One("model_fit_seconds_total", "plan.train_s", "Processor time spent on fits."),
    One("model_last_fit_seconds", "plan.last_fit_s", "Processor time of the last fit."),
    One("model_age_seconds", "plan.model.age_s", "Since the model in use was fitted."),
    One("model_samples", "plan.samples", "Uses that the classifier watches to learn from."),
    One("model_classes", "plan.classes", "Classes of blobs that the model tells apart."),
    One("model_known_blobs", "plan.identities", "Blobs that the classifier knows, held or not."),
    One("model_ghost_blobs", "plan.ghosts", "Blobs that are held no more and still known."),
    One("model_sessions", "plan.sessions", "Sessions that the classifier follows."),
    One(
        "ssd_write_budget_bytes",
        "plan.write_budget.day_bytes",
        "Bytes that may be written to SSD in a day; none if there is no limit.",
    ),
    One(
        "ssd_write_budget_left_bytes",
        "plan.write_budget.day_left_bytes",
        "Bytes that may be written to SSD at once; none if there is no limit.",
    ),
    One(
        "ssd_admission_threshold_ratio",
        "plan.admission.threshold",
        "Chance of another use from which on blobs are let onto SSD.",
    ),
)

TIER_GAUGES = {
    "shadow_regret_ratio": (
        "regret",
        "Share of tokens that the best reference saves, less that of the policy, in shadows.",
    ),
    "shadow_sample_ratio": ("sample", "Share of chains that the shadows are told of."),
    "policy_switches_total": ("switches", "How often the policy in force has changed."),
}
"""By metric: its name among the stats of a tier's policy, and its help."""


def tiering_metrics(stats: Tree) -> Iterator[Metric]:
    """All that `stats` has of them."""
    yield from crossed(stats, CROSSED)
    yield from ones(stats, PLAN_ONES)
    yield from _ages(stats["ages"])
    yield from _policies(stats["plan"])


def _policies(plan: Tree) -> Iterator[Metric]:
    """Who decides in each tier, and how well."""
    tiers = {"dram": plan, **({"ssd": plan["ssd"]} if plan["ssd"] else {})}
    policy = InfoMetricFamily(
        f"{PREFIX}policy", "The policy that decides who leaves a tier.", labels=("tier",)
    )
    for tier, facts in tiers.items():
        about = {"in_force": facts["policy"], "wanted": plan["wanted"]}
        policy.add_metric((tier,), about | {"model": at(plan, "model.source") or ""})
    yield policy
    behind = [((tier,), float(t["policy"] != plan["wanted"])) for tier, t in tiers.items()]
    yield family("policy_fallback", "1 while a reference is in force.", behind, ("tier",))
    for name, (key, help_text) in TIER_GAUGES.items():
        found = [((tier,), float(t[key])) for tier, t in tiers.items() if t.get(key) is not None]
        yield family(name, help_text, found, ("tier",))
    ratios = [
        ((tier, name), float(ratio))
        for tier, facts in tiers.items()
        for name, ratio in facts.get("shadows", {}).items()
    ]
    help_text = "Share of tokens that each policy saves in its shadow, of late."
    yield family("shadow_saved_ratio", help_text, ratios, ("tier", "policy"))


def _ages(ages: Tree) -> Iterator[Metric]:
    gaps = HistogramMetricFamily(
        f"{PREFIX}reuse_gap_seconds",
        "How long the deepest blob that a request found had not been used.",
    )
    left = HistogramMetricFamily(
        f"{PREFIX}age_at_eviction_seconds",
        "How long a copy that was given up had not been used.",
        labels=("tier",),
    )
    for tier, plain in histograms(ages):
        counts = buckets(ages["bounds_s"], plain["counts"])
        if tier:
            left.add_metric((tier,), counts, plain["sum_s"])
        else:
            gaps.add_metric((), counts, plain["sum_s"])
    yield gaps
    yield left

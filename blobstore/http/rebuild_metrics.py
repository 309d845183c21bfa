"""Metrics of what model runners make again."""

from __future__ import annotations

from blobstore.http.families import One, Split

REBUILD_ONES = (
    One("rebuild_runners", "rebuild.runners", "Model runners that are registered."),
    One("rebuild_runners_able", "rebuild.able", "Those that are alive and have not just failed."),
    One("rebuild_jobs", "rebuild.jobs", "Rebuilds that wait or run."),
    One("rebuild_jobs_running", "rebuild.running", "Rebuilds that runners are at work on."),
    One("rebuild_waiters", "rebuild.waiting", "Requests that wait for rebuilds."),
    One("rebuild_text_bytes", "rebuild.text_bytes", "Memory that the texts of rebuilds take."),
    One("rebuild_made_blobs_total", "rebuild.blobs", "Blobs that runners made in their jobs."),
    One("rebuild_made_tokens_total", "rebuild.tokens", "Tokens that these stand for."),
    One("rebuild_seconds_total", "rebuild.seconds", "Seconds that it took to compute them."),
    One(
        "rebuild_estimate_error_ratio",
        "rebuild.estimates.rebuild.error",
        "By what part the time of rebuilds was last misjudged, in the median.",
    ),
    One(
        "rebuild_estimate_runners",
        "rebuild.estimates.rebuild.runners",
        "Runners whose speed is known, for each namespace.",
    ),
    One(
        "fetch_estimate_error_ratio",
        "rebuild.estimates.fetch.error",
        "By what part the time of loads was last misjudged, in the median.",
    ),
    One(
        "fetch_estimate_loads",
        "rebuild.estimates.fetch.loads",
        "Loads that the estimate of the next one rests on.",
    ),
)

REBUILD_SPLITS = (
    Split(
        "rebuild_jobs_ended_total",
        "rebuild.ended",
        "reason",
        "Rebuilds that ended: made, or why not.",
        ("made", "failed", "late"),
    ),
    Split(
        "rebuilt_blobs_total",
        "counters.rebuilt_blobs",
        "result",
        "Blobs sealed by model runners.",
        ("stored", "exists", "refused"),
    ),
    Split(
        "diverged_blobs_total",
        "counters.diverged_blobs",
        "terms",
        "Rebuilt blobs with other bytes than before, by what their namespaces make of that.",
        ("accept", "report", "reject"),
    ),
)

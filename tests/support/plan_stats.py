"""All that the stats of a plan may say."""

from __future__ import annotations

from typing import Any

PLAN: dict[str, Any] = {
    "policy": "lru2",
    "wanted": "ours",
    "fallback": True,
    "switches": 3,
    "sample": 0.25,
    "shadows": {"ours": 0.5, "lru2": 0.52},
    "regret": 0.02,
    "samples": 1000,
    "classes": 400,
    "identities": 5000,
    "ghosts": 900,
    "sessions": 3,
    "fits": 7,
    "train_s": 1.5,
    "fits_failed": 0,
    "model": {"source": "warm", "why": "", "age_s": 60.0},
    "last_fit_s": 0.2,
    "write_budget": {"day_bytes": None, "day_left_bytes": None},
    "admission": {"threshold": 0.125},
    "ssd": {
        "policy": "ours",
        "shadows": {"ours": 0.7},
        "regret": -0.1,
        "sample": 1.0,
        "switches": 1,
    },
}

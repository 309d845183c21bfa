"""What the connector does, counted between two looks of the engine.

Plain numbers and lists under the metrics' names, so that they travel between the engine's
processes as they are. What becomes of them in vLLM is in `metrics`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Data = dict[str, dict[str, Any]]
"""Metric -> label value ("" where the metric has no label) -> a sum, or a list of seconds."""

SAMPLES_MAX = 256
"""Durations kept of each kind between two looks; the sums beside them are of all."""

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """A counter with at most one label, or with `buckets` a histogram."""

    help: str
    label: str = ""
    buckets: tuple[float, ...] = ()


FOUND = "hit_tokens"
MISSED = "misses"
WAITED = "wait_seconds"
LOADED, LOADED_BYTES, LOAD_SECONDS = "loaded_tokens", "loaded_bytes", "load_seconds"
SAVED, SAVED_BYTES, SAVE_SECONDS = "saved_tokens", "saved_bytes", "save_seconds"
UNSAVED = "unsaved_blobs"

METRICS: Mapping[str, Metric] = {
    FOUND: Metric("Tokens found in the store for requests, by the tier they were in.", "tier"),
    MISSED: Metric("Requests for which nothing was found or loaded, by the reason.", "reason"),
    WAITED: Metric("How long requests waited for the store's answers.", buckets=_SECONDS),
    LOADED: Metric("Tokens whose keys and values were read from the store."),
    LOADED_BYTES: Metric("Bytes read from the store, by all ranks."),
    LOAD_SECONDS: Metric("How long the loads of requests took.", buckets=_SECONDS),
    SAVED: Metric("Tokens whose keys and values were written to the store."),
    SAVED_BYTES: Metric("Bytes written to the store, by all ranks."),
    SAVE_SECONDS: Metric("How long saves took, from the forward to the seal.", buckets=_SECONDS),
    UNSAVED: Metric("Blobs that could not be written to the store, by the reason.", "reason"),
}


class Recorder:
    """Counts, from any thread.

    Of ranks that load or save the same tokens the first one tells of tokens, misses and blobs
    that were not saved; all tell of bytes and durations. What fails at another rank only is
    in that rank's log, not here.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._data: Data = {}

    def found(self, tier: str, tokens: int) -> None:
        """A request will read `tokens` that are in `tier` now."""
        with self._lock:
            self._add(FOUND, tokens, tier)

    def missed(self, reason: str, n: int = 1) -> None:
        """Nothing was found for a request, or what was found could not be loaded."""
        with self._lock:
            self._add(MISSED, n, reason)

    def waited(self, seconds: float) -> None:
        """A request has its answer, `seconds` after it was first asked for."""
        with self._lock:
            self._observe(WAITED, seconds)

    def loaded(self, tokens: int, nbytes: int, seconds: float) -> None:
        """The load of a request is done. `tokens` are 0 on all ranks but the first."""
        with self._lock:
            self._add(LOADED, tokens)
            self._add(LOADED_BYTES, nbytes)
            self._observe(LOAD_SECONDS, seconds)

    def saved(self, tokens: int, nbytes: int, seconds: float) -> None:
        """Blobs are sealed. `tokens` are 0 on all ranks but the first."""
        with self._lock:
            self._add(SAVED, tokens)
            self._add(SAVED_BYTES, nbytes)
            self._observe(SAVE_SECONDS, seconds)

    def unsaved(self, reason: str, blobs: int = 1) -> None:
        """Blobs were not saved; being held already is no reason."""
        with self._lock:
            self._add(UNSAVED, blobs, reason)

    def take(self) -> Data | None:
        """What was counted since the last call; None if nothing was."""
        with self._lock:
            data, self._data = self._data, {}
        return data or None

    def _add(self, name: str, n: int, label: str = "") -> None:
        if n:
            sums = self._data.setdefault(name, {})
            sums[label] = sums.get(label, 0) + n

    def _observe(self, name: str, seconds: float) -> None:
        samples = self._data.setdefault(name, {}).setdefault("", [])
        if len(samples) < SAMPLES_MAX:
            samples.append(seconds)


def merge(into: Data, other: Data) -> None:
    """Add what `other` counted to `into`, which shares nothing with it afterwards."""
    for name, by_label in other.items():
        held = into.setdefault(name, {})
        for label, value in by_label.items():
            if isinstance(value, list):
                samples = held.setdefault(label, [])
                samples.extend(value[: SAMPLES_MAX - len(samples)])
            else:
                held[label] = held.get(label, 0) + value


def summary(data: Data) -> dict[str, int | float]:
    """One number for each sum, and for durations how many and their mean: a line of a log."""
    line: dict[str, int | float] = {}
    for name in METRICS:
        for label, value in sorted(data.get(name, {}).items()):
            shown = f"{name}[{label}]" if label else name
            if not isinstance(value, list):
                line[shown] = value
            elif value:
                line[f"{shown}_count"] = len(value)
                line[f"{shown}_mean"] = round(sum(value) / len(value), 6)
    return line

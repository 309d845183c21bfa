"""What a Recorder counted, as vLLM takes it: summed over ranks, logged, and for Prometheus."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from blobstore.clients.vllm.recorder import METRICS, Data, merge, summary

PREFIX = "vllm:blobstore_"  # vLLM clears away what begins with its own name when it starts anew


class BlobStoreStats(KVConnectorStats):
    """Counted between two looks, in any process: `data` is a Recorder's, and plain."""

    def __init__(self, data: Data | None = None) -> None:
        self.data: Data = {} if data is None else data

    def reset(self) -> None:
        """Begin anew."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add what another rank, or the scheduler, has counted."""
        merge(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """A line of the log."""
        return summary(self.data)

    def is_empty(self) -> bool:
        """Nothing was counted."""
        return not self.data


class BlobStorePromMetrics(KVConnectorPromMetrics):
    """The metrics of `recorder.METRICS`, one series per engine and label."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._engines = per_engine_labelvalues
        self._metrics: dict[str, Any] = {}
        for name, metric in METRICS.items():
            named = {
                "name": PREFIX + name,
                "documentation": metric.help,
                "labelnames": [*labelnames, *filter(None, [metric.label])],
            }
            if metric.buckets:
                made = metric_types[Histogram](**named, buckets=metric.buckets)
            else:
                made = metric_types[Counter](**named)
            self._metrics[name] = made

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take in what one engine has counted since the last time."""
        engine = self._engines[engine_idx]
        for name, by_label in transfer_stats_data.items():
            metric = self._metrics.get(name)
            if metric is None:  # of another version, in a cluster that is being upgraded
                continue
            for label, value in by_label.items():
                series = metric.labels(*engine, *filter(None, [label]))
                if isinstance(value, list):
                    for seconds in value:
                        series.observe(seconds)
                else:
                    series.inc(value)

"""vLLM's own classes take what the connector counts: through its processes, its log, Prometheus."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from blobstore.clients.vllm.recorder import METRICS, Recorder
from tests.vllm.of_vllm import (
    BlobStorePromMetrics,
    BlobStoreStats,
    KVConnectorFactory,
    KVConnectorLogging,
    unregister_vllm_metrics,
)

CONFIG: Any = SimpleNamespace(kv_transfer_config=None)
TYPES: Any = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}


def counted() -> BlobStoreStats:
    recorder = Recorder()
    recorder.found("dram", 512)
    recorder.missed("absent")
    recorder.waited(0.004)
    recorder.loaded(512, 4096, 0.25)
    recorder.loaded(512, 4096, 0.75)
    recorder.saved(256, 2048, 0.5)
    recorder.unsaved("no_room", 3)
    return BlobStoreStats(recorder.take())


@pytest.fixture
def metrics() -> Iterator[BlobStorePromMetrics]:
    engines: dict[int, list[object]] = {0: ["m", "0"], 1: ["m", "1"]}
    yield BlobStorePromMetrics(CONFIG, TYPES, ["model_name", "engine"], engines)
    unregister_vllm_metrics()
    left = [name for name in REGISTRY._collector_to_names.values() if "blobstore" in str(name)]
    assert not left, "vLLM has to clear them away when an engine is made anew"


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"vllm:blobstore_{name}", {"model_name": "m", **labels})


def test_stats_travel_between_processes_and_add_up() -> None:
    stats = counted()
    over_the_wire = msgspec.msgpack.decode(msgspec.msgpack.encode(stats.to_dict()))
    again = BlobStoreStats(over_the_wire)
    assert again.data == stats.data
    total = copy.deepcopy(again).aggregate(stats)
    assert isinstance(total, BlobStoreStats)
    assert total.data["loaded_tokens"] == {"": 2048}
    assert total.reduce()["load_seconds_mean"] == 0.5
    total.reset()
    assert total.is_empty()
    assert not stats.is_empty()
    assert BlobStoreStats().is_empty()


def test_every_metric_reaches_prometheus_by_engine(metrics: BlobStorePromMetrics) -> None:
    metrics.observe(counted().data, 0)
    metrics.observe(counted().data, 0)
    metrics.observe(counted().data, 1)
    assert value("hit_tokens_total", engine="0", tier="dram") == 1024
    assert value("hit_tokens_total", engine="1", tier="dram") == 512
    assert value("misses_total", engine="0", reason="absent") == 2
    assert value("unsaved_blobs_total", engine="0", reason="no_room") == 6
    assert value("loaded_tokens_total", engine="0") == 2048
    assert value("loaded_bytes_total", engine="0") == 16384
    assert value("saved_tokens_total", engine="1") == 256
    assert value("saved_bytes_total", engine="1") == 2048
    for name, n, seconds in (("load", 4, 2.0), ("save", 2, 1.0), ("wait", 2, 0.008)):
        assert value(f"{name}_seconds_count", engine="0") == n
        assert value(f"{name}_seconds_sum", engine="0") == pytest.approx(seconds)


def test_what_a_newer_worker_counts_is_left_out(metrics: BlobStorePromMetrics) -> None:
    metrics.observe({"nobody_knows": {"": 1}, "saved_tokens": {"": 5}}, 0)
    assert value("saved_tokens_total", engine="0") == 5


def test_every_metric_says_what_it_is(metrics: BlobStorePromMetrics) -> None:
    documented = {family.name: family.documentation for family in REGISTRY.collect()}
    for name, metric in METRICS.items():
        assert documented[f"vllm:blobstore_{name}"] == metric.help


def test_vllm_logs_one_line_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    connector = SimpleNamespace(build_kv_connector_stats=BlobStoreStats)
    monkeypatch.setattr(KVConnectorFactory, "get_connector_class", lambda config: connector)
    logging = KVConnectorLogging(SimpleNamespace(kv_connector="BlobStoreConnector"))
    logging.observe(counted().data)
    logging.observe(counted().data)
    lines: list[str] = []
    logging.log(lambda form, *values: lines.append(form % values))
    (line,) = lines
    assert "hit_tokens[dram]=1024" in line
    assert "load_seconds_count=4, load_seconds_mean=0.5" in line
    logging.log(lambda form, *values: lines.append(form))
    assert len(lines) == 1

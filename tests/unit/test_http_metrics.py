from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families

from blobstore.ages import Ages
from blobstore.http.families import Crossed
from blobstore.http.loop_lag import LoopLag
from blobstore.http.metrics import (
    DISK_ERRORS,
    ONES,
    OPENMETRICS_TYPE,
    SPLITS,
    TEXT_TYPE,
    TIER_GAUGES,
    Metrics,
)
from blobstore.http.rebuild_metrics import REBUILD_ONES, REBUILD_SPLITS
from blobstore.http.text_metrics import TEXT_ONES
from blobstore.http.tiering_metrics import CROSSED, tiering_metrics
from blobstore.latencies import Latencies
from blobstore.units import KIB
from tests.support.clock import FakeClock
from tests.support.plan_stats import PLAN
from tests.support.polling import poll_until_async
from tests.support.sim_store import SimStore
from tests.support.store_client import StoreClient, chain, content, opaque

DOCS = Path(__file__).parents[2] / "docs"
NBYTES = 64 * KIB
TOKENS = 16
NO_NUMBERS = {
    "boot_id", "tiers.dram.huge_pages", "sessions.why_cold", "rebuild.divergences",
    "texts.ratio", "texts.disk_bytes",
}  # fmt: skip
"""Told by blobstore_boot_info, or for people alone."""
TIERING = {"ages", "plan"}
"""Told by metrics that have tests of their own."""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[SimStore]:
    with SimStore(tmp_path) as made:
        yield made


def families(metrics: Metrics) -> dict[str, Metric]:
    """What is rendered, by the name that its samples begin with."""
    body, _ = metrics.render()
    return {family.name: family for family in text_string_to_metric_families(body.decode())}


def values(metrics: Metrics, name: str, label: str) -> dict[str, float]:
    """The values of one metric by the value of `label`, without zeros."""
    samples = families(metrics)[name.removesuffix("_total")].samples
    return {s.labels[label]: s.value for s in samples if s.name == name and s.value}


def by_both(metrics: Metrics, metric: Crossed) -> dict[str, dict[str, float]]:
    """The values of a metric by both of its labels, without zeros."""
    found: dict[str, dict[str, float]] = {}
    for sample in families(metrics)[f"blobstore_{metric.name}".removesuffix("_total")].samples:
        if sample.name.endswith("_total") and sample.value:
            outer, inner = (sample.labels[label] for label in metric.labels)
            found.setdefault(outer, {})[inner] = sample.value
    return found


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    whole = {metric.path for metric in (*SPLITS, *REBUILD_SPLITS, *CROSSED)} | TIERING
    for name, value in tree.items():
        if isinstance(value, Mapping) and f"{prefix}{name}" not in whole:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def named_in(text: str) -> set[str]:
    """All metrics that are mentioned."""
    return set(re.findall(r"\b(?:blobstore|process)_[a-z0-9_]+", text))


def samples_of(metrics: Metrics) -> set[str]:
    """Names of all that is rendered."""
    return {sample.name for family in families(metrics).values() for sample in family.samples}


def of_a_full_plan() -> set[str]:
    """Names of what a plan may tell, which a young one does not tell yet."""
    limited = PLAN | {"write_budget": {"day_bytes": 2, "day_left_bytes": 1}}
    found = tiering_metrics({"ages": Ages().as_dict(), "plan": limited})
    return {sample.name for family in found for sample in family.samples}


def play(world: SimStore) -> None:
    """The fixed script: puts of every result, look-ups that hit and miss in every way."""
    ns, client = world.declare(opaque(NBYTES)), world.client()
    payloads = [content(number, NBYTES) for number in range(4)]
    keys, absent = chain(4), chain(6, "absent")
    world.put_cold(client, ns, keys, payloads)  # 4 on SSD alone
    again = world.run(client.put(ns, keys[:1], payloads[:1], timeout_s=5.0))
    assert again == [("exists", "")]
    for asked in (
        keys,  # 4 from SSD
        keys,  # 4 from DRAM
        keys[:2],  # 2 from DRAM
        [*keys, *absent[:2]],  # 4 from DRAM, 2 missed
        absent,  # 6 missed
    ):
        world.run(client.get(ns, asked)).release()
    client.match(ns, keys)
    client.match(ns, absent)
    client.exists(ns, absent)
    world.finish_all()


class TestAccounting:
    def test_a_fixed_script_of_look_ups_adds_up_exactly(self, world: SimStore) -> None:
        play(world)
        metrics = Metrics(world.store)
        assert values(metrics, "blobstore_hit_blobs_total", "tier") == {"dram": 10, "ssd": 4}
        assert values(metrics, "blobstore_hit_bytes_total", "tier") == {
            "dram": 10 * NBYTES,
            "ssd": 4 * NBYTES,
        }
        assert values(metrics, "blobstore_hit_tokens_total", "tier") == {
            "dram": 10 * TOKENS,
            "ssd": 4 * TOKENS,
        }
        assert values(metrics, "blobstore_missed_blobs_total", "reason") == {"absent": 8}
        assert values(metrics, "blobstore_put_blobs_total", "result") == {"stored": 4, "exists": 1}
        for name, wanted in (
            ("gets_total", 5),
            ("matches_total", 2),
            ("put_bytes_total", 4 * NBYTES),
            ("saved_blobs_total", 4),
            ("loaded_blobs_total", 4),
            ("loaded_bytes_total", 4 * NBYTES),
            ("demoted_blobs_total", 4),
            ("blobs", 4),
            ("namespaces", 1),
            ("clients", 1),
            ("leases", 0),
        ):
            assert metrics.value(f"blobstore_{name}") == wanted, name

    def test_a_get_that_waits_and_turns_to_another_writer_is_counted_once(
        self, world: SimStore
    ) -> None:
        ns, reader = world.declare(opaque(NBYTES)), world.client("reader")
        one, two, key = world.client("one"), world.client("two"), chain(1)
        first, second = (world.run(c.reserve(ns, key, timeout_s=1.0)) for c in (one, two))
        waiting = world.sim.start(reader.get(ns, key, timeout_s=60.0, wait_for_writers=True))
        world.rest()
        world.call(first.abort)
        world.rest()
        assert not waiting.done()
        assert world.store.counters.hit_blobs.total() == 0
        second.write(0, content(1, NBYTES))
        world.run(second.seal())
        world.finish_all()
        waiting.result().release()
        counters = world.store.counters
        assert counters.gets == 1
        assert counters.hit_blobs == {"writer": 1}
        assert counters.missed_blobs.total() == 0

    def test_what_is_refused_before_it_begins_is_no_look_up(self, world: SimStore) -> None:
        ns, client = world.declare(opaque(NBYTES)), world.client()
        before = world.store.counters.as_dict()
        with pytest.raises(ValueError, match="keys"):
            world.run(client.get(ns, [b"short"]))
        assert world.store.counters.as_dict() == before

    def test_every_number_of_stats_is_rendered_and_the_same(self, world: SimStore) -> None:
        play(world)
        metrics, stats = Metrics(world.store), world.store.stats()
        ones = {one.path: f"blobstore_{one.name}" for one in (*ONES, *TEXT_ONES, *REBUILD_ONES)}
        splits = {split.path: split for split in (*SPLITS, *REBUILD_SPLITS)}
        crossings = {metric.path: metric for metric in CROSSED}
        errors = {f"tiers.ssd.{name}": operation for operation, name in DISK_ERRORS.items()}
        gauges = {
            f"tiers.{tier}.{name}": (f"blobstore_tier_{name}", tier)
            for tier in stats["tiers"]
            for name, _ in TIER_GAUGES
        }
        for path, value in leaves(stats):
            if path in NO_NUMBERS | TIERING:
                continue
            if path in crossings:
                assert by_both(metrics, crossings[path]) == value
            elif path in splits:
                name, label = f"blobstore_{splits[path].name}", splits[path].label
                assert values(metrics, name, label) == {k: n for k, n in value.items() if n}
            elif path in gauges:
                name, tier = gauges[path]
                assert metrics.value(name, {"tier": tier}) == value, path
            elif path in errors:
                name = "blobstore_ssd_io_errors_total"
                assert metrics.value(name, {"operation": errors[path]}) == value, path
            else:
                assert metrics.value(ones[path]) == value, path  # KeyError: it is not rendered

    def test_every_metric_has_a_place_in_stats(self, world: SimStore) -> None:
        known = dict(leaves(world.store.stats()))
        ones = (*ONES, *TEXT_ONES, *REBUILD_ONES)
        assert [one.path for one in ones if one.path not in known] == []
        more = (*SPLITS, *REBUILD_SPLITS, *CROSSED)
        assert [metric.path for metric in more if metric.path not in known] == []

    def test_a_store_without_ssd_has_no_metrics_of_one(self, tmp_path: Path) -> None:
        with SimStore(tmp_path, ssd_bytes=0) as world:
            metrics = Metrics(world.store)
            assert metrics.value("blobstore_tier_capacity_bytes", {"tier": "dram"}) is not None
            assert metrics.value("blobstore_tier_capacity_bytes", {"tier": "ssd"}) is None
            assert [
                name for name in families(metrics) if name.startswith("blobstore_ssd_seg")
            ] == []


class TestNames:
    def test_names_follow_the_conventions_of_prometheus(self, world: SimStore) -> None:
        for name, family in families(everything(world)).items():
            assert re.fullmatch(r"(blobstore|process)_[a-z0-9_]+", name), name
            assert family.documentation.endswith("."), name
            for sample in family.samples:
                assert (family.type == "counter") == sample.name.endswith("_total"), sample.name
                assert not re.search(r"_(s|ms|kib|mib|count_total)$", name), name

    def test_names_and_labels_are_unique(self, world: SimStore) -> None:
        body, _ = everything(world).render()
        series = [
            line.rsplit(" ", 1)[0]
            for line in body.decode().splitlines()
            if not line.startswith("#")
        ]
        assert len(series) == len(set(series))

    def test_what_counts_begins_at_0_for_the_labels_that_are_known(self, world: SimStore) -> None:
        metrics = Metrics(world.store)
        for tier in ("dram", "ssd", "writer"):
            assert metrics.value("blobstore_hit_blobs_total", {"tier": tier}) == 0
        assert metrics.value("blobstore_missed_blobs_total", {"reason": "absent"}) == 0

    def test_a_scraper_that_wants_openmetrics_gets_it_valid(self, world: SimStore) -> None:
        play(world)
        body, content_type = everything(world).render("application/openmetrics-text; version=1.0.0")
        assert content_type == OPENMETRICS_TYPE
        parsed = parse_openmetrics(body.decode())  # type: ignore[no-untyped-call]
        assert "blobstore_hit_blobs" in {family.name for family in parsed}

    @pytest.mark.parametrize(
        "accept", ["", "*/*", ";;,", "text/plain;version=0.0.4", "application/json"]
    )
    def test_others_get_the_plain_text_format(self, world: SimStore, accept: str) -> None:
        assert Metrics(world.store).render(accept)[1] == TEXT_TYPE

    @pytest.mark.parametrize("version", ["1.0.0", "abc", "9.9.9; x=y", ""])
    def test_no_version_that_is_asked_for_is_echoed(self, world: SimStore, version: str) -> None:
        accept = f"application/openmetrics-text; version={version}"
        assert Metrics(world.store).render(accept)[1] == OPENMETRICS_TYPE

    def test_every_metric_of_the_grafana_dashboard_exists(self, world: SimStore) -> None:
        dashboard = json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))
        expressions = [
            target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())
        ]
        expressions += [
            v["definition"] for v in dashboard["templating"]["list"] if "definition" in v
        ]
        used = named_in(" ".join(expressions))
        assert len(used) >= 20
        assert used - samples_of(everything(world)) - of_a_full_plan() == set()

    def test_every_metric_of_the_documentation_exists(self, world: SimStore) -> None:
        used = named_in((DOCS / "METRICS.md").read_text(encoding="utf-8"))
        known = samples_of(everything(world)) | of_a_full_plan()
        known |= {f"blobstore_{one.name}" for one in REBUILD_ONES}  # some come with the first job
        histograms = {name.removesuffix("_bucket") for name in known if name.endswith("_bucket")}
        assert len(used) >= 20
        assert used - known - histograms == set()


class TestDoors:
    def test_latencies_are_cumulative_histograms_by_door_and_verb(self, world: SimStore) -> None:
        clock = FakeClock()
        latencies = Latencies(clock)
        for seconds in (0.0, 0.003, 0.003, 100.0):
            started_s = clock()
            clock.advance(seconds)
            latencies.note("http", "get", started_s, "busy" if seconds > 1 else "")
        metrics = Metrics(world.store, latencies=latencies)
        name, labels = "blobstore_operation_duration_seconds", {"door": "http", "verb": "get"}
        for bound, n in (("2.5e-05", 1), ("0.0025", 1), ("0.005", 3), ("30.0", 3), ("+Inf", 4)):
            assert metrics.value(f"{name}_bucket", labels | {"le": bound}) == n, bound
        assert metrics.value(f"{name}_count", labels) == 4
        assert metrics.value(f"{name}_sum", labels) == pytest.approx(100.006)
        failed = metrics.value("blobstore_failed_operations_total", labels | {"error": "busy"})
        assert failed == 1

    def test_the_lag_of_the_loop_is_told(self, world: SimStore) -> None:
        async def measure() -> LoopLag:
            lag = LoopLag(0.001)
            lag.start()
            await poll_until_async(lambda: lag.histogram.count >= 5)
            await lag.close()
            return lag

        lag = asyncio.run(measure())
        metrics = Metrics(world.store, lag=lag)
        assert metrics.value("blobstore_loop_lag_seconds_count") == lag.histogram.count
        assert metrics.value("blobstore_loop_lag_p99_seconds") == lag.p99_s
        assert metrics.value("blobstore_loop_lag_max_seconds") == lag.max_s
        assert metrics.value("blobstore_loop_lag_last_seconds") == lag.last_s

    def test_connections_are_counted_when_asked_for(self, world: SimStore) -> None:
        n = 3
        metrics = Metrics(world.store, connections={"http": lambda: n})
        assert metrics.value("blobstore_open_connections", {"door": "http"}) == 3
        n = 4
        assert metrics.value("blobstore_open_connections", {"door": "http"}) == 4


def everything(world: SimStore) -> Metrics:
    """Metrics with at least one sample of each."""
    latencies = Latencies()
    latencies.note("http", "get", latencies.clock(), "busy")
    return Metrics(world.store, latencies=latencies, lag=LoopLag(), connections={"http": lambda: 1})


def test_holding_shows_while_it_is_held(world: SimStore) -> None:
    ns = world.declare(opaque(NBYTES))
    client: StoreClient = world.client()
    world.run(client.put(ns, chain(2), [content(0, NBYTES), content(1, NBYTES)]))
    world.finish_all()
    reading = world.run(client.get(ns, chain(2)))
    writing = world.run(client.reserve(ns, chain(1, "new"), timeout_s=1.0))
    metrics = Metrics(world.store)
    assert metrics.value("blobstore_leases") == 1
    assert metrics.value("blobstore_reservations") == 1
    assert metrics.value("blobstore_lent_bytes") == NBYTES
    writing.abort()
    reading.release()
    assert metrics.value("blobstore_leases") == 0
    assert metrics.value("blobstore_reservations") == 0
    assert metrics.value("blobstore_aborted_reservations_total") == 1

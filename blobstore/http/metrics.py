"""What Prometheus scrapes: the numbers of `Store.stats()`, latencies and loop lag, by name.

Nothing is counted here: every value is read from where it is kept, once per scrape,
so that this page, the API and the command line cannot disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector, exposition
from prometheus_client.metrics_core import (
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from blobstore.http.families import PREFIX, One, Split, Tree, buckets, family, ones, splits
from blobstore.http.loop_lag import LoopLag
from blobstore.http.rebuild_metrics import REBUILD_ONES, REBUILD_SPLITS
from blobstore.http.text_metrics import TEXT_ONES
from blobstore.http.tiering_metrics import tiering_metrics
from blobstore.latencies import Latencies
from blobstore.store import Store

OPENMETRICS = "application/openmetrics-text"
# Not what the client library would choose: of some headers it fails, of others it echoes parts.
OPENMETRICS_TYPE = f"{OPENMETRICS}; version=1.0.0; charset=utf-8"
TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

ORIGINS = ("dram", "ssd", "writer", "rebuild")

ONES = (
    One("uptime_seconds", "uptime_s", "Seconds since the store was opened."),
    One("blobs", "blobs", "Blobs known, in any tier."),
    One("namespaces", "namespaces", "Namespaces declared."),
    One("holes", "holes", "Blobs whose bytes were lost while others continue them."),
    One("clients", "clients", "Client processes that are attached."),
    One("leases", "leases", "Leases held by readers."),
    One("reservations", "reservations", "Reservations held by writers."),
    One("waiting_for_room", "waiting_for_room", "Reservations that wait for room in DRAM."),
    One("pinned_bytes", "pinned_bytes", "Bytes in DRAM kept by leases, writers, I/O and pins."),
    One("client_pinned_blobs", "pinned_by_clients.blobs", "Blobs that clients have pinned."),
    One("client_pinned_bytes", "pinned_by_clients.bytes", "Bytes of blobs that clients pinned."),
    One("lent_bytes", "lent_bytes", "Bytes in DRAM on loan to writers."),
    One("undecided_blobs", "mover.waiting_blobs", "Blobs in DRAM alone that may yet go to SSD."),
    One("undecided_bytes", "mover.waiting_bytes", "Bytes of those."),
    One("demoting_bytes", "mover.coming_bytes", "On their way to SSD to make room in DRAM."),
    One("dram_ready_bytes", "mover.ready_bytes", "Free in DRAM, or free to leave at once."),
    One(
        "demote_bytes_per_second",
        "mover.demote_bytes_per_s",
        "Smoothed rate of what is written to SSD.",
    ),
    One(
        "promote_bytes_per_second",
        "mover.promote_bytes_per_s",
        "Smoothed rate of what is loaded from SSD.",
    ),
    One("loads", "mover.loads", "Loads from SSD in progress."),
    One("delayed_puts_total", "mover.puts_waited", "Puts that waited for room in DRAM."),
    One("sessions", "sessions.known", "Sessions that are known."),
    One("superseded_blobs", "superseded.blobs", "Blobs of contexts that clients have replaced."),
    One("superseded_branches", "superseded.branches", "Branches that these make up."),
    One("uses_waiting", "uses.waiting", "Uses that the policy has yet to be told of."),
    One("uses_told_total", "uses.told", "Uses that the policy was told of."),
    One("uses_lost_total", "uses.lost", "Uses that it was not told of: too many at once."),
    One("dram_staging_bytes", "tiers.dram.staging_bytes", "Bytes of DRAM kept free for loads."),
    One("dram_extents", "tiers.dram.blobs", "Extents in DRAM, readable or being filled."),
    One(
        "dram_largest_free_bytes",
        "tiers.dram.largest_free_bytes",
        "The largest piece of free room in DRAM.",
    ),
    One(
        "dram_fragmentation_ratio",
        "tiers.dram.fragmentation",
        "Share of the free room in DRAM that is outside its largest piece.",
    ),
    One("ssd_live_bytes", "tiers.ssd.live_bytes", "Bytes of segments that hold blobs."),
    One("ssd_spare_bytes", "tiers.ssd.spare_bytes", "Bytes of segments that are free for reuse."),
    One("ssd_extents", "tiers.ssd.extents", "Extents in segments."),
    One("ssd_segments", "tiers.ssd.segments", "Segment files."),
    One("ssd_catalogue_bytes", "tiers.ssd.catalogue_bytes", "Bytes granted to the catalogue."),
    One(
        "ssd_catalogue_live_bytes",
        "tiers.ssd.catalogue_live_bytes",
        "Bytes of the catalogue in use.",
    ),
    One("ssd_catalogue_readers", "tiers.ssd.readers", "Reader slots of the catalogue in use."),
    One("ssd_boots", "tiers.ssd.boots", "How often this data directory was opened."),
    One(
        "ssd_direct", "tiers.ssd.direct", "1 if segments are read and written past the page cache."
    ),
    One("ssd_reads_in_flight", "tiers.ssd.reads_in_flight", "Reads of segments in progress."),
    One("ssd_frees_waiting", "tiers.ssd.frees_waiting", "Extents to be freed when reads end."),
    One(
        "ssd_damaged_namespaces",
        "tiers.ssd.damaged_namespaces",
        "Namespaces in the catalogue that could not be read at start.",
    ),
    One("ssd_foreign_segments", "tiers.ssd.foreign_segments", "Segment files of another store."),
    One("ssd_commits_total", "tiers.ssd.commits", "Transactions of the catalogue."),
    One("ssd_punches_total", "tiers.ssd.punches", "Holes punched to give room back."),
    One("ssd_headers_repaired_total", "tiers.ssd.headers_repaired", "Segment headers repaired."),
    One("ssd_dead_readers_total", "tiers.ssd.dead_readers", "Reader slots cleared of the dead."),
    One("matches_total", "counters.matches", "Match requests."),
    One("gets_total", "counters.gets", "Get requests that were admitted."),
    One("put_bytes_total", "counters.put_bytes", "Bytes of blobs that puts stored."),
    One("loaded_blobs_total", "counters.loaded_blobs", "Blobs loaded from SSD into DRAM."),
    One("loaded_bytes_total", "counters.loaded_bytes", "Bytes loaded from SSD into DRAM."),
    One("saved_blobs_total", "counters.saved_blobs", "Blobs written to SSD."),
    One("saved_bytes_total", "counters.saved_bytes", "Bytes written to SSD."),
    One("demoted_blobs_total", "counters.demoted", "Copies in DRAM given up; SSD keeps the blob."),
    One("dropped_blobs_total", "counters.dropped", "Blobs evicted from DRAM, their last tier."),
    One("ssd_evicted_blobs_total", "counters.ssd_evicted", "Blobs evicted from SSD."),
    One("corrupt_blobs_total", "counters.corrupt", "Copies that failed their digest."),
    One(
        "ssd_failures_total",
        "counters.ssd_errors",
        "Reads, writes and commits of blobs that the disk refused.",
    ),
    One("unsaved_blobs_total", "counters.unsaved", "Blobs that could not be written to SSD."),
    One(
        "lost_unsaved_blobs_total",
        "counters.lost_unsaved",
        "Blobs that could not be written to SSD and left DRAM.",
    ),
    One(
        "expired_reservations_total",
        "counters.expired_reservations",
        "Reservations that were not sealed in time.",
    ),
    One(
        "aborted_reservations_total",
        "counters.aborted_reservations",
        "Reservations that their writers gave up.",
    ),
)

SPLITS = (
    Split("hit_blobs_total", "counters.hit_blobs", "tier", "Blobs given out, by origin.", ORIGINS),
    Split("hit_bytes_total", "counters.hit_bytes", "tier", "Bytes given out, by origin.", ORIGINS),
    Split(
        "hit_tokens_total", "counters.hit_tokens", "tier", "Tokens given out, by origin.", ORIGINS
    ),
    Split(
        "missed_blobs_total",
        "counters.missed_blobs",
        "reason",
        "Blobs asked for and not given; with the hits, all that answered gets asked for.",
        ("absent", "deadline", "no_room"),
    ),
    Split(
        "put_blobs_total",
        "counters.put_blobs",
        "result",
        "Blobs sealed by writers.",
        ("stored", "exists", "divergent", "refused"),
    ),
    Split(
        "ssd_rows_dropped_total",
        "tiers.ssd.rows_dropped",
        "reason",
        "Rows of the catalogue that could not be used at start.",
    ),
)

TIER_GAUGES = (
    ("capacity_bytes", "Bytes that the tier may take."),
    ("used_bytes", "Bytes that the tier takes."),
    ("free_bytes", "Bytes that the tier may take yet."),
    ("dirty_bytes", "Bytes of blobs in DRAM that are to be written to this tier."),
)
DISK_ERRORS = {
    "read": "read_errors", "write": "write_errors", "sync": "sync_errors", "punch": "punch_errors",
}  # fmt: skip
"""Errors of system calls on segments, by operation."""


class Metrics:
    """One registry over one store; the process's own numbers are in it too."""

    def __init__(
        self,
        store: Store,
        *,
        latencies: Latencies | None = None,
        lag: LoopLag | None = None,
        connections: Mapping[str, Callable[[], int]] | None = None,
    ) -> None:
        """`connections` counts the open ones of each door."""
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_StoreCollector(store))
        self._registry.register(_DoorCollector(latencies, lag, connections or {}))
        ProcessCollector(registry=self._registry)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The page and its content type: OpenMetrics if `accept` (the header) names it."""
        if OPENMETRICS in accept:
            encode: Callable[[CollectorRegistry], bytes] = openmetrics.generate_latest
            return encode(self._registry), OPENMETRICS_TYPE
        return exposition.generate_latest(self._registry), TEXT_TYPE

    def value(self, name: str, labels: Mapping[str, str] | None = None) -> float | None:
        """One value as it would be scraped now; None if there is none."""
        return self._registry.get_sample_value(name, dict(labels or {}))


class _StoreCollector(Collector):
    def __init__(self, store: Store) -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        """Everything in `Store.stats()`."""
        stats = self._store.stats()
        yield _boot(stats)
        yield from ones(stats, ONES)
        yield from ones(stats, (*TEXT_ONES, *REBUILD_ONES))
        yield from splits(stats, (*SPLITS, *REBUILD_SPLITS))
        yield from _tiers(stats["tiers"])
        yield from tiering_metrics(stats)


class _DoorCollector(Collector):
    def __init__(
        self,
        latencies: Latencies | None,
        lag: LoopLag | None,
        connections: Mapping[str, Callable[[], int]],
    ) -> None:
        self._latencies = latencies
        self._lag = lag
        self._connections = connections

    def collect(self) -> Iterator[Metric]:
        """What the doors and the loop have to say."""
        yield family(
            "open_connections",
            "Connections of clients that are open.",
            [((door,), float(count())) for door, count in sorted(self._connections.items())],
            ("door",),
        )
        if self._latencies is not None:
            yield from _operations(self._latencies)
        if self._lag is not None:
            yield from _lag(self._lag)


def _boot(stats: Tree) -> Metric:
    about = {
        "boot_id": f"{stats['boot_id']:016x}",
        "huge_pages": str(stats["tiers"]["dram"]["huge_pages"]),
    }
    return InfoMetricFamily(f"{PREFIX}boot", "This run of the store.", about)


def _tiers(tiers: Tree) -> Iterator[Metric]:
    for name, help_text in TIER_GAUGES:
        samples = [((tier,), float(facts[name])) for tier, facts in tiers.items() if name in facts]
        yield family(f"tier_{name}", help_text, samples, ("tier",))
    if "ssd" in tiers:
        ssd = tiers["ssd"]
        yield family(
            "ssd_io_errors_total",
            "Errors of the operating system on segment files.",
            [((operation,), float(ssd[name])) for operation, name in DISK_ERRORS.items()],
            ("operation",),
        )


def _operations(latencies: Latencies) -> Iterator[Metric]:
    took = HistogramMetricFamily(
        f"{PREFIX}operation_duration_seconds",
        "How long operations took, from their request to the end of their answer.",
        labels=("door", "verb"),
    )
    for door, verb, histogram in latencies.histograms():
        took.add_metric(
            (door, verb), buckets(histogram.bounds_s, histogram.counts), histogram.sum_s
        )
    yield took
    yield family(
        "failed_operations_total",
        "Operations that ended with an error, by its code.",
        [((door, verb, error), float(n)) for door, verb, error, n in latencies.failures()],
        ("door", "verb", "error"),
    )


def _lag(lag: LoopLag) -> Iterator[Metric]:
    late = HistogramMetricFamily(
        f"{PREFIX}loop_lag_seconds", "How much later than asked the event loop woke."
    )
    late.add_metric((), buckets(lag.histogram.bounds_s, lag.histogram.counts), lag.histogram.sum_s)
    yield late
    for name, help_text, value in (
        ("last", "How late the event loop woke last.", lag.last_s),
        ("max", "How late the event loop woke at most in the last minute.", lag.max_s),
        ("p99", "The 99th percentile of the loop's lag in the last minute.", lag.p99_s),
    ):
        yield family(f"loop_lag_{name}_seconds", help_text, [((), value)])

"""The parts that metrics are made of: where in `Store.stats()` each value is, and its shape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.utils import floatToGoString

PREFIX = "blobstore_"

Tree = Mapping[str, Any]
"""What `Store.stats()` gives, or a part of it."""


@dataclass(frozen=True, slots=True)
class One:
    """A metric with one value, the leaf at `path`; a total if the name says so."""

    name: str
    path: str
    help: str


@dataclass(frozen=True, slots=True)
class Split:
    """A metric with one value for each key of the mapping at `path`."""

    name: str
    path: str
    label: str
    help: str
    known: tuple[str, ...] = ()
    """Keys that have a value, 0, before anything was counted: rates need a beginning."""


@dataclass(frozen=True, slots=True)
class Crossed:
    """A metric with one value for each leaf of the two-level mapping at `path`."""

    name: str
    path: str
    labels: tuple[str, str]
    help: str
    known: Mapping[str, Mapping[str, object]]
    """As `Split.known`, by both keys."""


def ones(stats: Tree, found: Iterable[One]) -> Iterator[Metric]:
    """Those that there are."""
    for one in found:
        value = at(stats, one.path)
        if value is not None:
            yield family(one.name, one.help, [((), float(value))])


def splits(stats: Tree, found: Iterable[Split]) -> Iterator[Metric]:
    """All of them, without values where there is nothing."""
    for split in found:
        values = dict.fromkeys(split.known, 0) | (at(stats, split.path) or {})
        samples = [((key,), float(n)) for key, n in sorted(values.items())]
        yield family(split.name, split.help, samples, (split.label,))


def crossed(stats: Tree, found: Iterable[Crossed]) -> Iterator[Metric]:
    """All of them, likewise."""
    for metric in found:
        counted = at(stats, metric.path) or {}
        values = {
            (outer, inner): 0 for outer, reasons in metric.known.items() for inner in reasons
        } | {(outer, inner): n for outer, row in counted.items() for inner, n in row.items()}
        samples = [(labels, float(n)) for labels, n in sorted(values.items())]
        yield family(metric.name, metric.help, samples, metric.labels)


def family(
    name: str,
    help_text: str,
    samples: Iterable[tuple[tuple[str, ...], float]],
    labels: tuple[str, ...] = (),
) -> Metric:
    """One metric of these samples: values of its labels, and its own."""
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    made = kind(f"{PREFIX}{name}", help_text, labels=labels)
    for values, value in samples:
        made.add_metric(values, value)
    return made


def buckets(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Cumulative counts, as the format wants them."""
    total, found = 0, []
    for bound, n in zip([*map(floatToGoString, bounds), "+Inf"], counts, strict=True):
        total += n
        found.append((bound, float(total)))
    return found


def at(tree: Tree, path: str) -> Any:
    """The leaf at a dotted path; None if there is none (there is no SSD tier, for example)."""
    node: Any = tree
    for name in path.split("."):
        if not isinstance(node, Mapping) or name not in node:
            return None
        node = node[name]
    return node

from __future__ import annotations

import ast
import re
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

import blobstore
from blobstore.ages import BOUNDS_S, Ages, histograms
from blobstore.counters import Counters
from blobstore.index import Index, Record
from blobstore.reasons import MOVED, REFUSED, sentence
from tests.support.clock import FakeClock
from tests.support.store_client import opaque

NBYTES = 4096
DOCUMENT = (Path(__file__).parents[2] / "docs" / "METRICS.md").read_text(encoding="utf-8")


@pytest.fixture
def blob() -> Record:
    record = Record(Index().declare(opaque(NBYTES)), b"12345678", None, NBYTES, 16)
    record.last_used = 900.0
    return record


class TestMoves:
    def test_each_crossing_and_reason_has_a_count_of_its_own(self, blob: Record) -> None:
        counters = Counters()
        for crossing, reason in (
            ("dram>ssd", "worth"),
            ("dram>ssd", "worth"),
            ("dram>ssd", "durable"),
            ("ssd>dram", "get"),
        ):
            counters.moved(crossing, reason, blob)
        counters.refused("ssd", "unlikely", blob)
        told = counters.as_dict()
        assert told["moved_blobs"] == {
            "dram>ssd": {"worth": 2, "durable": 1},
            "ssd>dram": {"get": 1},
        }
        assert told["moved_bytes"]["dram>ssd"] == {"worth": 2 * NBYTES, "durable": NBYTES}
        assert told["refused_blobs"] == {"ssd": {"unlikely": 1}}
        assert told["refused_bytes"] == {"ssd": {"unlikely": NBYTES}}

    def test_what_is_told_is_a_copy_that_can_be_sent(self, blob: Record) -> None:
        counters = Counters()
        counters.moved("dram>ssd", "room", blob)
        told = counters.as_dict()
        counters.moved("dram>ssd", "room", blob)
        assert told["moved_blobs"] == {"dram>ssd": {"room": 1}}
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(told)) == told

    def test_a_copy_that_is_given_up_tells_how_long_it_lay_unused(self, blob: Record) -> None:
        counters = Counters(clock=FakeClock(1000.0))
        counters.moved("dram>ssd", "worth", blob)
        counters.moved("ssd>dram", "get", blob)
        assert counters.ages.at_eviction["dram"].count == 0
        counters.moved("dram>none", "kept_on_ssd", blob)
        assert counters.ages.at_eviction["dram"].sum_s == 100.0
        assert counters.ages.at_eviction["ssd"].count == 0

    def test_ages_and_the_clock_are_no_counters(self) -> None:
        assert {"ages", "clock"} & Counters().as_dict().keys() == set()


class TestAges:
    def test_a_clock_that_went_back_makes_no_negative_age(self) -> None:
        ages = Ages()
        ages.reused(-5.0)
        ages.left("ssd", -5.0)
        assert ages.reuse_gap.sum_s == ages.at_eviction["ssd"].sum_s == 0.0

    def test_bounds_are_two_for_each_power_of_ten(self) -> None:
        ratios = {round(upper / lower, 1) for lower, upper in pairwise(BOUNDS_S)}
        assert ratios == {3.0, 3.3}

    def test_plain_values_name_each_histogram_once(self) -> None:
        ages = Ages()
        ages.reused(7.0)
        ages.left("dram", 1e9)
        found = dict(histograms(ages.as_dict()))
        assert list(found) == ["", "dram", "ssd"]
        assert found[""]["counts"][BOUNDS_S.index(10.0)] == 1
        assert found["dram"]["counts"][-1] == 1


class TestReasons:
    def test_events_are_told_in_words(self) -> None:
        assert sentence("dram>ssd", "durable") == (
            "was written to SSD: the writer asked for it to be durable"
        )
        assert sentence("refused ssd", "budget") == (
            "was not let onto SSD: the write budget was spent"
        )
        assert sentence("put", "") == "was put into DRAM"

    def test_a_detail_goes_with_its_reason(self) -> None:
        assert sentence("refused ssd", "unlikely: p 0.03 < 0.12") == (
            "was not let onto SSD: it is not likely enough to be used again (p 0.03 < 0.12)"
        )

    def test_what_is_not_known_is_told_as_it_is(self) -> None:
        assert sentence("dram>ssd", "p 0.3 > 0.1") == "was written to SSD: p 0.3 > 0.1"
        assert sentence("something", "odd") == "something: odd"

    def test_every_reason_in_the_code_has_a_meaning(self) -> None:
        known = {"moved": MOVED, "refused": REFUSED}
        unknown = [
            (path.name, method, where, why)
            for path in Path(blobstore.__file__).parent.glob("*.py")
            for method, where, why in reasons_given(path)
            if why not in known[method].get(where, ())
        ]
        assert unknown == []

    def test_the_documentation_lists_them(self) -> None:
        told = re.findall(r"^\| `([^|]+) \| `(\w+)` \| (.+) \|$", DOCUMENT, re.MULTILINE)
        known = [
            (f"{crossing}`", *reason) for crossing, row in MOVED.items() for reason in row.items()
        ]
        known += [
            (f"{tier}`, refused", *reason)
            for tier, row in REFUSED.items()
            for reason in row.items()
        ]
        assert told == known

    def test_codes_can_be_labels(self) -> None:
        for by_reason in (*MOVED.values(), *REFUSED.values()):
            assert all(re.fullmatch(r"[a-z_]+", code) for code in by_reason)


def reasons_given(path: Path) -> list[tuple[str, str, str]]:
    """Calls of `moved` and `refused` whose first two arguments are written out."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            texts = [
                argument.value
                for argument in node.args[:2]
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
            ]
            if node.func.attr in ("moved", "refused") and len(texts) == 2:
                found.append((node.func.attr, texts[0], texts[1]))
    return found

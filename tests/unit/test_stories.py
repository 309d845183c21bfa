from __future__ import annotations

from blobstore.index import Index, Record
from blobstore.stories import EVENTS_MAX, Stories
from tests.support.clock import FakeClock
from tests.support.store_client import opaque

NBYTES = 4096


class Blobs:
    """Records of one namespace, by number."""

    def __init__(self, salt: str = "") -> None:
        self.state = Index().declare(opaque(NBYTES, salt or "model"))

    def __getitem__(self, number: int) -> Record:
        return Record(self.state, number.to_bytes(8, "big"), None, NBYTES, 16)


def told(stories: Stories, record: Record) -> list[tuple[float, str, str]]:
    return [
        (event["ago_s"], event["what"], event["why"])
        for event in stories.of(record.ns.id, record.key)
    ]


def test_what_happened_is_told_oldest_first_with_when_and_why() -> None:
    clock = FakeClock()
    stories, blob = Stories(clock), Blobs()[1]
    stories.note(blob, "put")
    clock.advance(10.0)
    stories.note(blob, "dram>ssd", "worth")
    clock.advance(5.0)
    assert told(stories, blob) == [(15.0, "put", ""), (5.0, "dram>ssd", "worth")]


def test_of_one_blob_the_last_events_are_kept() -> None:
    stories, blob = Stories(FakeClock()), Blobs()[1]
    for number in range(EVENTS_MAX + 3):
        stories.note(blob, "event", str(number))
    assert [why for _, _, why in told(stories, blob)] == [
        str(number) for number in range(3, EVENTS_MAX + 3)
    ]


def test_the_blobs_that_nothing_happened_to_for_longest_are_forgotten() -> None:
    stories, blobs = Stories(FakeClock(), blobs_max=3), Blobs()
    for number in (1, 2, 3, 1, 4):
        stories.note(blobs[number], "put")
    assert len(stories) == 3
    assert [len(told(stories, blobs[number])) for number in (1, 2, 3, 4)] == [2, 0, 1, 1]


def test_a_blob_is_known_by_its_key_when_its_record_is_gone() -> None:
    stories, blobs = Stories(FakeClock()), Blobs()
    stories.note(blobs[1], "dram>none", "unlikely")
    assert len(told(stories, blobs[1])) == 1


def test_one_key_in_two_namespaces_has_two_stories() -> None:
    stories, one, other = Stories(FakeClock()), Blobs("one")[1], Blobs("other")[1]
    stories.note(one, "put")
    assert told(stories, other) == []

"""What the connector counts, and how it is added up."""

from __future__ import annotations

import json
import threading

from blobstore.clients.vllm.recorder import METRICS, SAMPLES_MAX, Data, Recorder, merge, summary


def filled() -> Recorder:
    recorder = Recorder()
    recorder.found("dram", 512)
    recorder.found("ssd", 256)
    recorder.found("dram", 256)
    recorder.missed("absent")
    recorder.missed("deadline", 2)
    recorder.waited(0.25)
    recorder.loaded(768, 3000, 0.5)
    recorder.saved(256, 1000, 0.125)
    recorder.unsaved("no_room", 4)
    return recorder


def taken(recorder: Recorder) -> Data:
    data = recorder.take()
    assert data is not None
    return data


def test_what_was_counted_is_taken_once() -> None:
    recorder = filled()
    assert taken(recorder) == {
        "hit_tokens": {"dram": 768, "ssd": 256},
        "misses": {"absent": 1, "deadline": 2},
        "wait_seconds": {"": [0.25]},
        "loaded_tokens": {"": 768},
        "loaded_bytes": {"": 3000},
        "load_seconds": {"": [0.5]},
        "saved_tokens": {"": 256},
        "saved_bytes": {"": 1000},
        "save_seconds": {"": [0.125]},
        "unsaved_blobs": {"no_room": 4},
    }
    assert recorder.take() is None


def test_everything_counted_has_a_metric_and_travels_as_it_is() -> None:
    data = taken(filled())
    assert set(data) == set(METRICS)
    assert json.loads(json.dumps(data)) == data


def test_other_ranks_tell_no_tokens() -> None:
    recorder = Recorder()
    recorder.loaded(0, 3000, 0.5)
    assert "loaded_tokens" not in taken(recorder)


def test_merged_counts_are_sums_and_share_nothing() -> None:
    into, other = taken(filled()), taken(filled())
    merge(into, other)
    assert into["hit_tokens"] == {"dram": 1536, "ssd": 512}
    assert into["wait_seconds"] == {"": [0.25, 0.25]}
    fresh: Data = {}
    merge(fresh, other)
    merge(fresh, other)
    assert other == taken(filled())
    assert fresh == into


def test_durations_are_bounded_and_sums_are_not() -> None:
    recorder = Recorder()
    for _ in range(SAMPLES_MAX + 10):
        recorder.loaded(1, 1, 1.0)
    data = taken(recorder)
    assert len(data["load_seconds"][""]) == SAMPLES_MAX
    assert data["loaded_tokens"][""] == SAMPLES_MAX + 10
    merge(data, {"load_seconds": {"": [1.0]}})
    assert len(data["load_seconds"][""]) == SAMPLES_MAX


def test_the_line_of_the_log_names_labels_and_means() -> None:
    data = taken(filled())
    merge(data, {"load_seconds": {"": [1.5]}})
    line = summary(data)
    assert line["hit_tokens[dram]"] == 768
    assert line["misses[deadline]"] == 2
    assert line["load_seconds_count"] == 2
    assert line["load_seconds_mean"] == 1.0
    assert summary({}) == {}


def test_threads_lose_no_counts() -> None:
    recorder, n = Recorder(), 2000

    def count() -> None:
        for _ in range(n):
            recorder.missed("absent")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    total = 0
    while any(thread.is_alive() for thread in threads):
        total += (recorder.take() or {}).get("misses", {}).get("absent", 0)
    for thread in threads:
        thread.join()
    total += (recorder.take() or {}).get("misses", {}).get("absent", 0)
    assert total == 4 * n

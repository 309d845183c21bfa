"""The raw limits: they must do the work that they claim to time."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from blobstore.bench.machine import beyond_caches_bytes, file_system, machine_facts
from blobstore.bench.page_cache import evict, resident_pages
from blobstore.bench.raw_copy import SharedBuffers, caller_buffers, copy_each
from blobstore.bench.raw_disk import RawFile
from blobstore.bench.raw_echo import Echo
from blobstore.errors import SetupError

SIZE = 1 << 16


@pytest.fixture
def disk() -> Iterator[Path]:
    """A folder on a disk: the usual temporary directory is a tmpfs on many machines."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        yield Path(folder)


def test_a_copy_copies() -> None:
    sources = caller_buffers(3, SIZE, seed=1)
    with SharedBuffers(3, SIZE) as shared:
        taken_s = copy_each(sources, shared.views)
        assert len(taken_s) == 3
        for source, view in zip(sources, shared.views, strict=True):
            assert np.array_equal(source, view)


def test_noise_depends_on_the_seed_alone() -> None:
    first, second = caller_buffers(1, SIZE, seed=5), caller_buffers(1, SIZE, seed=5)
    assert np.array_equal(first[0], second[0])
    assert not np.array_equal(first[0], caller_buffers(1, SIZE, seed=6)[0])


def test_the_raw_file_reads_what_it_wrote(disk: Path) -> None:
    written, back = caller_buffers(6, SIZE, seed=2), caller_buffers(3, SIZE)
    with RawFile(disk) as file:
        assert file.write(written) > 0
        assert file.read(back, first=3) > 0
    for buffer, expected in zip(back, written[3:], strict=True):
        assert np.array_equal(buffer, expected)


def test_reading_past_the_raw_file_is_an_error_not_a_fast_read(disk: Path) -> None:
    with RawFile(disk) as file:
        file.write(caller_buffers(1, SIZE))
        with pytest.raises(SetupError, match="the raw file ends at"):
            file.read(caller_buffers(2, SIZE))


def test_the_raw_file_leaves_nothing_behind(disk: Path) -> None:
    with RawFile(disk) as file:
        file.write(caller_buffers(1, SIZE))
    assert list(disk.iterdir()) == []


def test_echo_replies_are_awaited_in_full() -> None:
    with Echo() as echo:
        for request_bytes, reply_bytes in ((8, 1), (100_000, 16), (16, 300_000)):
            taken_s = echo.round_trips(5, request_bytes, reply_bytes)
            assert len(taken_s) == 5
            assert min(taken_s) > 0


def test_eviction_leaves_no_page_of_a_file_in_memory(disk: Path) -> None:
    path = disk / "data"
    path.write_bytes(b"x" * 10 * SIZE)
    assert resident_pages([path]) > 0
    evict([path])
    assert resident_pages([path]) == 0


def test_an_empty_file_has_no_pages(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert resident_pages([tmp_path / "empty"]) == 0


def test_machine_facts_name_the_disk_and_the_caches(tmp_path: Path) -> None:
    facts = machine_facts(tmp_path)
    assert facts["cpus"] >= 1
    assert facts["memory_available_bytes"] <= facts["memory_bytes"]
    assert file_system(Path("/proc")) == "proc"
    assert beyond_caches_bytes() >= 2 * facts["last_level_cache_bytes"]

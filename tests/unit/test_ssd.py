from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from blobstore.errors import (
    DirectoryInUse,
    Full,
    NewerFormat,
    NotEnough,
    SetupError,
    StorageFailed,
)
from blobstore.tiering import catalogue as catalogue_module
from blobstore.tiering.ssd import CAPACITY_BYTES_MIN, INLINE_BYTES_MAX, SsdTier
from blobstore.units import GIB, KIB, MIB
from tests.support.sim_disk import SimDisk
from tests.support.ssd_blobs import (
    CANONICAL,
    NAMESPACE,
    contents,
    drop_blob,
    payload_of,
    put_blob,
    row_of,
    write_blob,
)
from tests.support.tmpfs import tmpfs

CAPACITY_BYTES = 32 * MIB
FILE_SYSTEM_BYTES = 256 * KIB
"""What a file system may add to ours for its own lists of blocks."""


def _open(path: Path, capacity_bytes: int = CAPACITY_BYTES) -> SsdTier:
    tier = SsdTier.open(path, capacity_bytes, wall_clock=lambda: 1000.0)
    tier.declare(NAMESPACE, CANONICAL)
    return tier


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[SsdTier]:
    with closing(_open(tmp_path)) as tier:
        yield tier


def _key(n: int) -> bytes:
    return b"%032d" % n


def _data(n: int, nbytes: int) -> bytes:
    return random.Random(n).randbytes(nbytes)


def _on_disk_bytes(path: Path) -> int:
    return sum(os.lstat(file).st_blocks * 512 for file in path.rglob("*") if file.is_file())


def _fill(tier: SsdTier, nbytes: int, n_max: int = 20_000) -> dict[bytes, bytes]:
    """Put blobs until there is no more room; small ones many at a time."""
    stored: dict[bytes, bytes] = {}
    per_commit = 1 if nbytes > 10_000 else 100
    for start in range(0, n_max, per_commit):
        batch = {_key(n): _data(n, nbytes) for n in range(start, start + per_commit)}
        try:
            if per_commit == 1:
                put_blob(tier, *next(iter(batch.items())))
            else:
                tier.commit([write_blob(tier, key, data) for key, data in batch.items()])
        except (Full, StorageFailed):
            break
        stored |= batch
    return stored


SIZES = [0, 1, INLINE_BYTES_MAX, INLINE_BYTES_MAX + 1, 70_001, MIB, 3 * MIB + 17]


@pytest.mark.parametrize("nbytes", SIZES)
def test_blobs_of_any_size_survive_reopening(tmp_path: Path, nbytes: int) -> None:
    payload = _data(1, nbytes)
    with closing(_open(tmp_path)) as tier:
        row = put_blob(tier, _key(1), payload)
        assert (row.extent is None) == (nbytes <= INLINE_BYTES_MAX)
    with closing(_open(tmp_path)) as tier:
        assert list(tier.rows()) == [row]
        assert payload_of(tier, row) == payload
        assert tier.namespaces() == {NAMESPACE: CANONICAL}


def test_many_blobs_are_found_again_with_their_order_of_use(tmp_path: Path) -> None:
    with closing(_open(tmp_path)) as tier:
        added = []
        for n in range(500):
            parent = _key(n - 1) if n % 50 else b""
            added.append(write_blob(tier, _key(n), _data(n, 100 if n % 5 else 66_000), parent))
        tier.commit(added)
        tier.commit([], [], [(NAMESPACE, _key(n), 10.0 + n) for n in range(500)])
        rows = {row.key: row.extent for row in tier.rows()}
        used_bytes = tier.used_bytes
    with closing(_open(tmp_path)) as tier:
        found = {row.key: row for row in tier.rows()}
        assert {key: row.extent for key, row in found.items()} == rows
        assert sorted(found, key=lambda key: found[key].last_used_wall_s) == sorted(rows)
        assert tier.used_bytes == used_bytes
        assert all(
            payload_of(tier, row) == _data(int(key), row.nbytes) for key, row in found.items()
        )


def test_a_batch_takes_one_sync_per_segment_and_one_transaction(tmp_path: Path) -> None:
    disk = SimDisk()
    with closing(SsdTier.open(tmp_path, CAPACITY_BYTES, disk=disk)) as tier:
        tier.declare(NAMESPACE, CANONICAL)
        added = [write_blob(tier, _key(n), _data(n, 70_000)) for n in range(6)]
        disk.history.clear()
        tier.commit(added, [(NAMESPACE, _key(99))], [(NAMESPACE, _key(0), 1.0)])
        assert disk.history == ["sync", "before_commit", "after_commit"]
        disk.history.clear()
        tier.commit([(row_of(_key(7), b"abc"), memoryview(b"abc"))])
        assert disk.history == ["before_commit", "after_commit"]


def test_nothing_of_a_failed_batch_is_visible(
    tier: SsdTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_blob(tier, _key(1), _data(1, 70_000))
    added = [write_blob(tier, _key(n), _data(n, 70_000)) for n in (2, 3)]
    fdatasync = os.fdatasync

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(StorageFailed, match=r"cannot sync .*\.seg: Input/output error"):
        tier.commit(added)
    monkeypatch.setattr(os, "fdatasync", fdatasync)
    assert contents(tier).keys() == {_key(1)}
    assert tier.stats()["sync_errors"] == 1
    tier.commit(added)
    assert contents(tier) == {_key(n): _data(n, 70_000) for n in (1, 2, 3)}


@pytest.mark.parametrize("nbytes", [500, 60_000, 70_000, 900_000])
def test_the_capacity_is_hard_and_physical(tmp_path: Path, nbytes: int) -> None:
    capacity_bytes = 8 * MIB
    with closing(_open(tmp_path, capacity_bytes)) as tier:
        stored = _fill(tier, nbytes)
        assert sum(map(len, stored.values())) > capacity_bytes // 3
        assert tier.used_bytes <= tier.capacity_bytes
        assert tier.used_bytes + tier.free_bytes == tier.capacity_bytes
        assert _on_disk_bytes(tmp_path) <= tier.used_bytes + FILE_SYSTEM_BYTES
        assert contents(tier) == stored
        gone = list(tier.rows())[::2]
        tier.commit([], [(NAMESPACE, row.key) for row in gone])
        for row in gone:
            del stored[row.key]
            if row.extent is not None:
                tier.free(row.extent)
        put_blob(tier, _key(100_000), _data(0, nbytes))
        stored[_key(100_000)] = _data(0, nbytes)
        assert contents(tier) == stored
        assert _on_disk_bytes(tmp_path) <= capacity_bytes + FILE_SYSTEM_BYTES


def test_what_is_dropped_gives_its_room_back(tmp_path: Path) -> None:
    with closing(_open(tmp_path)) as tier:
        empty_bytes = tier.used_bytes
        for n in range(12):
            put_blob(tier, _key(n), _data(n, MIB))
        assert _on_disk_bytes(tmp_path) >= 12 * MIB
        for row in list(tier.rows()):
            drop_blob(tier, row)
        assert tier.used_bytes == empty_bytes
        tier.trim()
        assert _on_disk_bytes(tmp_path) <= empty_bytes
        catalogue_bytes = tier.stats()["catalogue_bytes"]
    assert _on_disk_bytes(tmp_path) <= catalogue_bytes + FILE_SYSTEM_BYTES


def test_mixed_use_never_drifts(tmp_path: Path) -> None:
    rng = random.Random(1)
    stored: dict[bytes, bytes] = {}
    with closing(_open(tmp_path, 16 * MIB)) as tier:
        for n in range(400):
            rows = {row.key: row for row in tier.rows()}
            assert rows.keys() == stored.keys()
            if rows and rng.random() < 0.5:
                drop_blob(tier, rows[(key := rng.choice(sorted(rows)))])
                del stored[key]
            else:
                data = _data(n, rng.choice([0, 3000, 70_000, 300_000, MIB + 1]))
                try:
                    put_blob(tier, _key(n), data)
                except Full:
                    continue
                stored[_key(n)] = data
            assert tier.used_bytes + tier.free_bytes == tier.capacity_bytes
            assert tier.stats()["extents"] == sum(
                len(data) > INLINE_BYTES_MAX for data in stored.values()
            )
        assert contents(tier) == stored
    with closing(_open(tmp_path, 16 * MIB)) as tier:
        assert contents(tier) == stored


def test_workers_write_read_and_free_at_once(tier: SsdTier) -> None:
    def work(worker: int) -> None:
        for n in range(worker * 100, worker * 100 + 16):
            payload = _data(n, 50_000 if n % 3 else 400_000)
            row = put_blob(tier, _key(n), payload)
            assert payload_of(tier, row) == payload
            if n % 2:
                drop_blob(tier, row)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    found = contents(tier)
    assert len(found) == 4 * 8
    assert all(data == _data(int(key), len(data)) for key, data in found.items())
    assert tier.stats()["reads_in_flight"] == 0


def test_a_flipped_byte_stays_within_its_blob(tmp_path: Path) -> None:
    with closing(_open(tmp_path)) as tier:
        rows = [put_blob(tier, _key(n), _data(n, 200_000)) for n in range(20)]
    extent = rows[7].extent
    assert extent is not None
    with (tmp_path / "segments" / "00000001.seg").open("r+b") as file:
        file.seek(extent.offset + 100_000)
        byte = file.read(1)
        file.seek(extent.offset + 100_000)
        file.write(bytes([byte[0] ^ 1]))
    with closing(_open(tmp_path)) as tier:
        found = contents(tier)
    assert [n for n in range(20) if found[_key(n)] != _data(n, 200_000)] == [7]


def test_a_segment_cut_to_half_costs_what_was_in_the_other_half(tmp_path: Path) -> None:
    with closing(_open(tmp_path)) as tier:
        rows = [put_blob(tier, _key(n), _data(n, 200_000)) for n in range(20)]
    extent = rows[10].extent
    assert extent is not None
    os.truncate(tmp_path / "segments" / "00000001.seg", extent.offset)
    with closing(_open(tmp_path)) as tier:
        assert contents(tier) == {_key(n): _data(n, 200_000) for n in range(10)}
        assert tier.stats()["rows_dropped"] == {"cut": 10}
        put_blob(tier, _key(50), _data(50, MIB))
        assert payload_of(tier, {row.key: row for row in tier.rows()}[_key(50)]) == _data(50, MIB)


def test_a_cut_catalogue_is_refused_by_name(tmp_path: Path) -> None:
    with closing(_open(tmp_path)) as tier:
        _fill(tier, 60_000, 100)
    file = tmp_path / "catalogue" / "data.mdb"
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(SetupError, match=r"data\.mdb was cut.*start empty"):
        _open(tmp_path)
    for name in ("catalogue", "segments"):
        (tmp_path / name).rename(tmp_path / f"{name}.old")
    _open(tmp_path).close()  # the failed opening kept nothing


def test_segments_without_their_catalogue_are_given_back(tmp_path: Path) -> None:
    with closing(_open(tmp_path)) as tier:
        put_blob(tier, _key(1), _data(1, MIB))
    for file in (tmp_path / "catalogue").iterdir():
        file.unlink()
    with closing(_open(tmp_path)) as tier:
        assert contents(tier) == {}
        assert tier.stats()["foreign_segments"] == 1
    assert list((tmp_path / "segments").iterdir()) == []


_HOLD = """
import sys, time
from pathlib import Path
from blobstore.tiering.ssd import SsdTier
tier = SsdTier.open(Path(sys.argv[1]), 8 << 20)
print("open", flush=True)
time.sleep(60)
"""


def test_one_owner_per_directory_until_it_is_gone(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(tmp_path)], stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"open\n"
        with pytest.raises(DirectoryInUse, match=f"process {holder.pid}"):
            _open(tmp_path)
        holder.kill()
        holder.wait()
        _open(tmp_path).close()


def test_a_later_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as later:
        later.setattr(catalogue_module, "FORMAT_VERSION", 2)
        _open(tmp_path).close()
    with pytest.raises(NewerFormat, match="format 2"):
        _open(tmp_path)


def test_a_capacity_without_room_for_blobs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotEnough, match=r"needs at least 4 MiB, wanted were"):
        SsdTier.open(tmp_path, CAPACITY_BYTES_MIN - 1)


def test_closing_again_is_harmless(tmp_path: Path) -> None:
    tier = _open(tmp_path)
    tier.close()
    tier.close()


def test_a_smaller_capacity_keeps_what_is_there_and_admits_nothing(tmp_path: Path) -> None:
    with closing(_open(tmp_path)) as tier:
        stored = _fill(tier, MIB, 20)
    with closing(_open(tmp_path, 8 * MIB)) as tier:
        assert contents(tier) == stored
        assert tier.free_bytes == 0
        with pytest.raises(Full):
            tier.allocate(70_000)
        for row in list(tier.rows())[:16]:
            drop_blob(tier, row)
        assert tier.used_bytes <= tier.capacity_bytes
        put_blob(tier, _key(100), _data(100, 70_000))


@pytest.mark.root
def test_a_full_disk_is_typed_and_over_once_there_is_room(tmp_path: Path) -> None:
    with (
        tmpfs(tmp_path / "small", 24 * MIB) as path,
        closing(_open(path, GIB)) as tier,
    ):
        stored = _fill(tier, MIB)
        assert 10 <= len(stored) < 24
        with pytest.raises(StorageFailed, match="No space left") as caught:
            put_blob(tier, _key(500), _data(500, MIB))
        assert caught.value.errno == errno.ENOSPC
        assert tier.stats()["write_errors"] >= 1
        assert contents(tier) == stored
        # Dropping makes room, though the disk is full.
        rows = {row.key: row for row in tier.rows()}
        for n in range(3):
            drop_blob(tier, rows[_key(n)])
            del stored[_key(n)]
        put_blob(tier, _key(600), _data(600, 2 * MIB))
        stored[_key(600)] = _data(600, 2 * MIB)
        # So does a larger disk, without opening again.
        subprocess.run(["mount", "-o", "remount,size=64m", str(path)], check=True)
        for n in range(1000, 1020):
            put_blob(tier, _key(n), _data(n, MIB))
            stored[_key(n)] = _data(n, MIB)
        assert contents(tier) == stored


@pytest.mark.root
def test_small_blobs_meet_a_full_disk_in_the_same_way(tmp_path: Path) -> None:
    with (
        tmpfs(tmp_path / "small", 8 * MIB) as path,
        closing(_open(path, GIB)) as tier,
    ):
        stored = _fill(tier, 20_000)
        assert len(stored) > 50
        assert contents(tier) == stored
        for key, row in {row.key: row for row in tier.rows()}.items():
            drop_blob(tier, row)
            del stored[key]
        subprocess.run(["mount", "-o", "remount,size=64m", str(path)], check=True)
        for n in range(1000, 1500):
            put_blob(tier, _key(n), _data(n, 20_000))
            stored[_key(n)] = _data(n, 20_000)
        assert contents(tier) == stored

"""LMDB within its room: growth, reserve, readers, and files that are not whole."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import lmdb
import pytest

from blobstore.errors import Full, NotEnough, SetupError, StorageFailed
from blobstore.tiering.disk import PosixDisk
from blobstore.tiering.environment import READERS_MAX, Environment
from blobstore.units import KIB, MIB
from tests.support.tmpfs import tmpfs

RESERVE_BYTES = 256 * KIB
TABLE = b"t"


def _environment(directory: Path) -> Environment:
    return Environment(directory, (TABLE,), PosixDisk(), RESERVE_BYTES)


@pytest.fixture
def env(tmp_path: Path) -> Iterator[Environment]:
    with closing(_environment(tmp_path)) as env:
        yield env


def _put(env: Environment, key: bytes, value: bytes) -> None:
    env.write(lambda txn: txn.put(key, value, db=env.table(TABLE)))


def _delete(env: Environment, *keys: bytes) -> None:
    def change(txn: lmdb.Transaction) -> None:
        for key in keys:
            txn.delete(key, db=env.table(TABLE))

    env.write(change, deletes_only=True)


def _get(env: Environment, key: bytes) -> bytes | None:
    with env.reading(copies=True) as txn:
        found: bytes | None = txn.get(key, db=env.table(TABLE))
        return found


def _fill(env: Environment, value: bytes, prefix: bytes = b"") -> list[bytes]:
    keys: list[bytes] = []
    try:
        while True:
            key = prefix + b"%06d" % len(keys)
            _put(env, key, value)
            keys.append(key)
    except Full:
        return keys


class _Room:
    """Grants what it has."""

    def __init__(self, env: Environment, nbytes: int) -> None:
        self.left = nbytes
        env.claim = self.claim

    def claim(self, nbytes: int) -> bool:
        if nbytes > self.left:
            return False
        self.left -= nbytes
        return True


class _FailingCommit(PosixDisk):
    fail = False

    def before_commit(self) -> None:
        if self.fail:
            raise OSError(5, "Input/output error")


def test_the_file_has_all_of_its_blocks_from_the_start(env: Environment, tmp_path: Path) -> None:
    found = (tmp_path / "data.mdb").stat()
    assert found.st_size == MIB + RESERVE_BYTES
    assert found.st_blocks * 512 >= found.st_size
    assert env.granted_bytes >= found.st_size


def test_the_map_grows_within_what_is_granted(env: Environment, tmp_path: Path) -> None:
    room = _Room(env, 5 * MIB)
    before = env.granted_bytes
    keys = _fill(env, bytes(100 * KIB))
    assert len(keys) * 100 * KIB > 4 * MIB
    assert env.granted_bytes - before == 5 * MIB - room.left
    assert room.left < MIB
    assert (tmp_path / "data.mdb").stat().st_blocks * 512 <= env.granted_bytes
    assert all(_get(env, key) == bytes(100 * KIB) for key in keys)


def test_a_full_environment_can_still_delete_down_to_nothing(env: Environment) -> None:
    _Room(env, 0)
    keys = _fill(env, bytes(1500))
    random.Random(1).shuffle(keys)
    for start in range(0, len(keys), 10):
        _delete(env, *keys[start : start + 10])
    assert [_get(env, key) for key in keys] == [None] * len(keys)


def test_additions_wait_until_the_reserve_is_whole_again(env: Environment) -> None:
    room = _Room(env, 0)
    keys = _fill(env, bytes(1500))
    granted = env.granted_bytes
    _delete(env, *keys[::24])  # pages that are far apart
    with pytest.raises(Full, match="head-room is used up"):
        _put(env, b"k", b"v")
    assert env.granted_bytes == granted
    room.left = RESERVE_BYTES
    _put(env, b"k", b"v")
    assert room.left == 0
    assert env.granted_bytes == granted + RESERVE_BYTES


def test_room_that_was_just_deleted_can_be_used_at_once(env: Environment) -> None:
    _Room(env, RESERVE_BYTES)
    keys = _fill(env, bytes(60 * KIB))
    for _ in range(5):
        _delete(env, keys[0])
        _put(env, keys[0], bytes(60 * KIB))


def test_live_pages_are_told_from_free_ones(env: Environment) -> None:
    _put(env, b"small", b"value")
    before = env.live_bytes
    _put(env, b"k", bytes(600 * KIB))
    assert 600 * KIB < env.live_bytes - before < 620 * KIB
    _delete(env, b"k")
    assert env.live_bytes == before


def test_a_failed_commit_does_not_cost_the_room_that_was_granted(tmp_path: Path) -> None:
    disk = _FailingCommit()
    with closing(Environment(tmp_path, (TABLE,), disk, RESERVE_BYTES)) as env:
        _Room(env, 0)
        keys = _fill(env, bytes(1500))
        _delete(env, *keys[::24])  # the reserve is in use now
        granted = env.granted_bytes
        disk.fail = True
        with pytest.raises(StorageFailed):
            _delete(env, keys[1])
        disk.fail = False
        _delete(env, keys[1])
        assert env.granted_bytes == granted


def test_growth_waits_for_readers_and_readers_for_growth(env: Environment) -> None:
    _put(env, b"k", b"value")
    inside, leave = threading.Event(), threading.Event()

    def read() -> bytes:
        with env.reading() as txn:
            value = txn.get(b"k", db=env.table(TABLE))
            inside.set()
            assert leave.wait(10)
            return bytes(value)  # a map moved away under it would be a crash

    with ThreadPoolExecutor(2) as pool:
        reader = pool.submit(read)
        assert inside.wait(10)
        writer = pool.submit(_put, env, b"big", bytes(3 * MIB))
        with pytest.raises(TimeoutError):
            writer.result(0.2)
        leave.set()
        assert reader.result(10) == b"value"
        writer.result(10)
    assert _get(env, b"big") == bytes(3 * MIB)


def test_many_threads_read_while_the_map_grows(env: Environment) -> None:
    _put(env, b"k", b"value")
    done = threading.Event()

    def read() -> int:
        n = 0
        while not done.wait(0.0005):  # threads that never rest would starve the writer
            assert _get(env, b"k") == b"value"
            n += 1
        return n

    with ThreadPoolExecutor(8) as pool:
        readers = [pool.submit(read) for _ in range(8)]
        for n in range(20):
            _put(env, b"big%d" % n, bytes(MIB))
        done.set()
        assert all(reader.result(10) > 0 for reader in readers)


def test_reads_never_run_out_of_slots(env: Environment) -> None:
    _put(env, b"k", b"value")
    n_threads = 300
    together = threading.Barrier(n_threads)

    def read() -> bytes:
        with env.reading() as txn:
            together.wait(30)
            return bytes(txn.get(b"k", db=env.table(TABLE)))

    with ThreadPoolExecutor(n_threads) as pool:
        found = [pool.submit(read) for _ in range(n_threads)]
        assert {future.result(30) for future in found} == {b"value"}
    _put(env, b"k", b"value")
    assert n_threads <= env.n_readers <= READERS_MAX


_READ_AND_DIE = """
import os, signal, sys, lmdb
env = lmdb.open(sys.argv[1], max_dbs=1, map_size=1 << 30)
table = env.open_db(b"t", create=False)
txn = env.begin()
txn.get(b"0", db=table)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_reader_that_was_killed_does_not_make_the_file_grow(
    env: Environment, tmp_path: Path
) -> None:
    for n in range(8):
        _put(env, b"%d" % n, bytes(256 * KIB))
    killed = subprocess.run([sys.executable, "-c", _READ_AND_DIE, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    for n in range(400):
        _put(env, b"%d" % (n % 8), bytes([n % 256]) * 256 * KIB)
    live = 8 * 256 * KIB
    assert (tmp_path / "data.mdb").stat().st_size <= 3 * live + 2 * MIB
    assert env.clear_dead_readers() == 0  # it was cleared on the way


def test_maintenance_clears_dead_readers(env: Environment, tmp_path: Path) -> None:
    _put(env, b"0", b"value")
    subprocess.run([sys.executable, "-c", _READ_AND_DIE, str(tmp_path)], check=False)
    assert env.clear_dead_readers() == 1
    assert env.clear_dead_readers() == 0


def test_contents_and_room_survive_reopening(tmp_path: Path) -> None:
    with closing(_environment(tmp_path)) as env:
        keys = _fill_some(env)
        granted = env.granted_bytes
    with closing(_environment(tmp_path)) as env:
        assert env.granted_bytes == granted
        assert all(_get(env, key) == bytes(MIB) for key in keys)
        _put(env, b"more", bytes(MIB))


def _fill_some(env: Environment) -> list[bytes]:
    keys = [b"%d" % n for n in range(5)]
    for key in keys:
        _put(env, key, bytes(MIB))
    return keys


@pytest.mark.parametrize("share", [2, 1000])
def test_a_file_that_was_cut_is_refused_before_it_is_touched(tmp_path: Path, share: int) -> None:
    with closing(_environment(tmp_path)) as env:
        _fill_some(env)
    file = tmp_path / "data.mdb"
    os.truncate(file, max(file.stat().st_size // share // 4096 * 4096, 8192))
    with pytest.raises(SetupError, match=r"data\.mdb was cut: \d+ bytes, wanted \d+.*restore it"):
        _environment(tmp_path)


def test_a_file_that_is_no_catalogue_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").write_bytes(b"text" * 4096)
    with pytest.raises(SetupError, match=r"data\.mdb cannot be opened"):
        _environment(tmp_path)


def test_a_failed_commit_changes_nothing_and_the_next_one_works(tmp_path: Path) -> None:
    disk = _FailingCommit()
    with closing(Environment(tmp_path, (TABLE,), disk, RESERVE_BYTES)) as env:
        _put(env, b"old", b"1")
        disk.fail = True
        with pytest.raises(StorageFailed, match="cannot write the catalogue"):
            _put(env, b"new", b"2")
        assert _get(env, b"new") is None
        disk.fail = False
        _put(env, b"newer", b"3")
        assert [_get(env, key) for key in (b"old", b"new", b"newer")] == [b"1", None, b"3"]


@pytest.mark.root
def test_a_disk_without_room_for_a_catalogue_is_refused(tmp_path: Path) -> None:
    with (
        tmpfs(tmp_path / "small", MIB) as path,
        pytest.raises(NotEnough, match=r"catalogue needs .* free are"),
    ):
        _environment(path)


@pytest.mark.root
def test_a_full_disk_stops_additions_but_not_deletions(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", 4 * MIB) as path, closing(_environment(path)) as env:
        keys = _fill(env, bytes(1500))
        (path / "ballast").write_bytes(b"")
        with (path / "ballast").open("r+b") as ballast:
            found = os.statvfs(path)
            ballast.write(bytes(found.f_bavail * found.f_frsize))
        random.Random(1).shuffle(keys)
        for start in range(0, len(keys), 10):
            _delete(env, *keys[start : start + 10])
        assert all(_get(env, key) is None for key in keys)
        (path / "ballast").unlink()
        _put(env, b"again", b"value")
        assert _get(env, b"again") == b"value"


def _mapped_bytes_in_memory(directory: Path) -> int:
    """Resident bytes of the mapping of the catalogue's file."""
    inside, found = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.endswith(f"{directory}/data.mdb"):
            inside = True
        elif inside and line.startswith("Rss:"):
            found += int(line.split()[1]) * KIB
            inside = False
    return found


def test_pages_that_a_scan_brought_in_can_be_given_back(env: Environment, tmp_path: Path) -> None:
    for number in range(64):
        _put(env, b"%d" % number, bytes(16 * KIB))
    assert all(_get(env, b"%d" % number) for number in range(64))
    assert _mapped_bytes_in_memory(tmp_path) > MIB
    env.forget_pages()
    assert _mapped_bytes_in_memory(tmp_path) < 64 * KIB
    assert _get(env, b"7") == bytes(16 * KIB)

"""Failures that others met in the field, asked of ours: LMDB, full disks and restarts.

Every test names the report that it was made from.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from blobstore.clients import Client
from blobstore.errors import Retryable, StorageFailed
from blobstore.units import GIB, KIB, MIB
from tests.support.blobs import chain, count_right, opaque, put
from tests.support.daemon import Daemon, daemon
from tests.support.polling import poll_until
from tests.support.puppet import Puppet
from tests.support.tmpfs import tmpfs

INLINE = opaque(60_000)
ONE_MIB = opaque(MIB)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Daemon]:
    with daemon(tmp_path) as run:
        yield run


@pytest.fixture
def kv(run: Daemon) -> Iterator[Client]:
    with Client(run.address, timeout_s=20.0) as kv:
        yield kv


DIE_IN_A_READ = """
import lmdb, os, signal, sys
environment = lmdb.open(sys.argv[1], readonly=True, max_dbs=8)
snapshot = environment.begin()
assert snapshot.id()
os.kill(os.getpid(), signal.SIGKILL)
"""


def die_in_a_read(run: Daemon) -> None:
    """A process opens the catalogue, as a tool might, and is killed while it reads."""
    command = [sys.executable, "-c", DIE_IN_A_READ, os.fspath(run.data / "catalogue")]
    assert subprocess.run(command, timeout=30).returncode == -signal.SIGKILL


def test_a_reader_that_died_does_not_make_the_catalogue_grow(tmp_path: Path) -> None:
    """cocoindex-io/cocoindex-code#129, lmdbjava/lmdbjava#173: 2 MiB of data in 215 MiB."""
    keys = chain(INLINE, 1, 8)

    def churn(kv: Client) -> int:
        """Write 24 MB over 8 keys; what the catalogue takes then."""
        for _ in range(50):
            assert put(kv, INLINE, keys, "durable") == ["stored"] * 8
            assert kv.drop(kv.namespace(INLINE), keys[:1]) == 8
        size: int = kv.stats()["tiers"]["ssd"]["catalogue_bytes"]
        return size

    with daemon(tmp_path) as run, Client(run.address) as kv:
        before = churn(kv)
        die_in_a_read(run)
        assert churn(kv) <= before + 2 * MIB
        put(kv, INLINE, keys, "durable")
        die_in_a_read(run)
        run.kill()
    with daemon(tmp_path) as run, Client(run.address) as kv:
        assert kv.stats()["tiers"]["ssd"]["readers"] <= 2
        assert count_right(kv, INLINE, keys) == 8
        kv.drop(kv.namespace(INLINE), keys[:1])
        assert churn(kv) <= before + 2 * MIB


def test_hundreds_of_gets_at_once_need_few_reader_slots(run: Daemon, kv: Client) -> None:
    """frappe/mail#559, dmtrKovalenko/fff#785: a slot for each thread, and 126 of them."""
    seeds = list(range(100))
    for seed in seeds:
        put(kv, INLINE, chain(INLINE, seed, 1), "durable")
    assert kv.drop(kv.namespace(INLINE), [chain(INLINE, seed, 1)[0] for seed in seeds], "dram") > 0
    with ExitStack() as puppets:
        everyone = [puppets.enter_context(Puppet(run.address)) for _ in range(3)]
        for puppet in everyone:
            puppet.tell(["get_at_once", 60_000, seeds, 50])
        assert [puppet.hear() for puppet in everyone] == [[1] * 200] * 3
    counters = kv.stats()["counters"]
    assert counters["loaded_blobs"] == 100
    assert counters["ssd_errors"] == 0
    assert kv.stats()["tiers"]["ssd"]["readers"] <= 8


@pytest.mark.root
def test_a_full_disk_stops_neither_the_daemon_nor_the_tier_for_good(tmp_path: Path) -> None:
    """jnwatson/py-lmdb#161, DanEngelbrecht/golongtail#237, neondatabase/neon#5209."""
    durable: list[int] = []

    def put_durable(kv: Client, seed: int) -> bool:
        try:
            put(kv, ONE_MIB, chain(ONE_MIB, seed, 1), "durable")
        except (Retryable, StorageFailed):
            return False
        durable.append(seed)
        return True

    with tmpfs(tmp_path / "disk", 64 * MIB) as disk:
        options = ("--data", os.fspath(disk / "data"), "--ssd", "1GiB")
        with daemon(tmp_path, *options) as run, Client(run.address, timeout_s=20.0) as kv:
            for seed in range(128):
                if seed % 2:
                    put_durable(kv, seed)
                else:
                    assert put(kv, ONE_MIB, chain(ONE_MIB, seed, 1)) == ["stored"]
                    assert count_right(kv, ONE_MIB, chain(ONE_MIB, seed, 1)) == 1
            assert 20 < len(durable) < 64
            assert kv.stats()["counters"]["unsaved"] > 0
            assert kv.stats()["counters"]["ssd_errors"] > 0
            all_right(kv, durable)
            dropped = [durable.pop() for _ in range(8)]  # a full disk can still delete
            for seed in dropped:
                assert kv.drop(kv.namespace(ONE_MIB), chain(ONE_MIB, seed, 1)) == 1
            poll_until(lambda: put_durable(kv, 1000), 20.0, "there is room again")
            subprocess.run(["mount", "-o", "remount,size=256m", os.fspath(disk)], check=True)
            poll_until(lambda: put_durable(kv, 1001), 20.0, "the disk has grown")
            assert [put_durable(kv, seed) for seed in range(2000, 2060)] == [True] * 60
            all_right(kv, durable)
            last = chain(ONE_MIB, 3000, 1)
            assert put(kv, ONE_MIB, last) == ["stored"]
            poll_until(lambda: "ssd" in kv.stat(kv.namespace(ONE_MIB), last)[0]["tiers"], 20.0)
            assert "Traceback" not in run.said
            run.kill()
        with daemon(tmp_path, *options) as run, Client(run.address, timeout_s=20.0) as kv:
            all_right(kv, durable)
            assert kv.verify()["corrupt"] == []


def all_right(kv: Client, seeds: list[int]) -> None:
    for seed in seeds:
        assert count_right(kv, ONE_MIB, chain(ONE_MIB, seed, 1)) == 1


def test_the_index_survives_a_restart(tmp_path: Path) -> None:
    """LMCache/LMCache#562, #2273: files stay, and are neither used nor removed."""
    sizes = (1000, 60_000, 64 * KIB + 1)
    lengths = {nbytes: 500 // len(sizes) for nbytes in sizes}
    with daemon(tmp_path) as run, Client(run.address) as kv:
        for nbytes, n in lengths.items():
            assert set(put(kv, opaque(nbytes), chain(opaque(nbytes), 1, n))) == {"stored"}
        before = kv.stats()
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 0
    for _ in ("clean", "killed"):
        with daemon(tmp_path) as run, Client(run.address) as kv:
            for nbytes, n in lengths.items():
                assert count_right(kv, opaque(nbytes), chain(opaque(nbytes), 1, n)) == n
            after = kv.stats()
            assert after["blobs"] == before["blobs"]
            live = after["tiers"]["ssd"]["live_bytes"]
            assert live == lengths[64 * KIB + 1] * 68 * KIB  # in whole blocks
            assert after["counters"]["hit_blobs"] == {"ssd": sum(lengths.values())}
            taken = sum(path.stat().st_blocks * 512 for path in run.data.glob("segments/*"))
            assert taken <= live + 4 * KIB + 64 * KIB
            run.kill()


def test_a_put_costs_the_same_however_many_blobs_there_are(run: Daemon, kv: Client) -> None:
    """LMCache/LMCache#2734: the whole manifest was written anew with every put.

    In CPU time of the daemon, which other programs of the machine do not change much.
    """
    tiny = opaque(100)
    ns = kv.namespace(tiny)

    def put_thousand(seed: int) -> float:
        before_s = cpu_s(run)
        for number in range(10):
            keys = chain(tiny, 10 * seed + number, 100)
            results = kv.put_from(ns, keys, [bytes(100)] * 100, retention="durable")
            assert results == ["stored"] * 100
        return cpu_s(run) - before_s

    costs = [put_thousand(seed) for seed in range(10)]
    assert min(costs[-3:]) < 2 * max(costs[:3]), costs


def cpu_s(run: Daemon) -> float:
    """CPU time that the daemon has used."""
    fields = Path(f"/proc/{run.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.soak
def test_a_blob_above_two_gib_is_exact_in_every_tier(tmp_path: Path) -> None:
    """dask/distributed#6556, kvcache-ai/Mooncake#1374: lengths of 32 bits, cut objects."""
    huge = opaque(2 * GIB + 100 * MIB + 7)
    keys = chain(huge, 1, 1)
    options = ("--dram", "5GiB", "--ssd", "6GiB")
    with daemon(tmp_path, *options) as run, Client(run.address, timeout_s=300.0) as kv:
        assert put(kv, huge, keys, "durable") == ["stored"]
        assert count_right(kv, huge, keys, 300.0) == 1
        run.kill()
    with daemon(tmp_path, *options) as run, Client(run.address, timeout_s=300.0) as kv:
        assert count_right(kv, huge, keys, 300.0) == 1
        assert kv.stats()["counters"]["hit_blobs"] == {"ssd": 1}

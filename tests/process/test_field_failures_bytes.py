"""Failures that others met in the field, asked of ours: bytes that lie about themselves.

Every test names the report that it was made from.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lmdb
import pytest

from blobstore.clients import AsyncClient, Client, Namespace
from blobstore.errors import Retryable, StorageFailed
from blobstore.protocol import Declare, Reserve, Reserved
from blobstore.units import KIB, MIB
from tests.support.blobs import chain, count_right, opaque, payload_of, payloads_of, put
from tests.support.daemon import Daemon, daemon, refused
from tests.support.polling import poll_until
from tests.support.puppet import Puppet
from tests.support.raw_client import RawClient
from tests.support.tmpfs import tmpfs

ONE_MIB = opaque(MIB)
EIGHT_MIB = opaque(8 * MIB)


@pytest.mark.root
def test_a_store_that_failed_is_not_found_later(tmp_path: Path) -> None:
    """LMCache/LMCache#4991: failed stores stay visible, and give gibberish for ever."""
    outcomes: Counter[str] = Counter()
    with (
        tmpfs(tmp_path / "disk", 8 * MIB) as disk,
        daemon(tmp_path, "--data", os.fspath(disk), "--dram", "4MiB", "--ssd", "64MiB") as run,
        Client(run.address) as kv,
    ):
        ns = kv.namespace(ONE_MIB)
        refused_keys = []
        for seed in range(40):
            keys = chain(ONE_MIB, seed, 1)
            try:
                (result,) = put(kv, ONE_MIB, keys, "durable" if seed % 3 else "standard")
            except (Retryable, StorageFailed) as error:
                result = type(error).__name__
            outcomes[result] += 1
            if result == "refused":
                refused_keys += list(keys)
        assert kv.exists(ns, refused_keys) == [False] * len(refused_keys)
        for seed in range(40):
            keys = chain(ONE_MIB, seed, 1)
            held = kv.exists(ns, keys)
            assert count_right(kv, ONE_MIB, keys) == held.count(True)
        counters = kv.stats()["counters"]
        assert counters["unsaved"] > 0
        assert kv.verify()["corrupt"] == []
        assert "Traceback" not in run.said
    assert outcomes["stored"] > 3
    assert outcomes["Full"] + outcomes["StorageFailed"] > 3, outcomes


def test_many_writers_and_readers_of_one_key(tmp_path: Path) -> None:
    """LMCache/LMCache#207, kvcache-ai/Mooncake#1374, #727: torn values, "exists" but empty."""
    with (
        daemon(tmp_path, "--dram", "256MiB", "--ssd", "off") as run,
        Client(run.address) as kv,
        ExitStack() as puppets,
    ):
        everyone = [puppets.enter_context(Puppet(run.address)) for _ in range(12)]
        writers, readers = everyone[:8], everyone[8:]
        for puppet in everyone:
            puppet.do("get", 8 * MIB, 0, 1)  # it is up
        for seed in range(1, 9):
            for reader in readers:
                for _ in range(4):
                    reader.tell(["get", 8 * MIB, seed, 1])
            for writer in writers:
                writer.tell(["put", 8 * MIB, seed, 1])
            results = Counter(result for writer in writers for result in writer.hear())
            assert results == {"stored": 1, "exists": 7}
            assert {reader.hear() for reader in readers for _ in range(4)} <= {0, 1}
            assert [reader.do("get", 8 * MIB, seed, 1) for reader in readers] == [1] * 4
        poll_until(lambda: kv.stats()["lent_bytes"] == 0)
        stats = kv.stats()
        assert (stats["blobs"], stats["reservations"]) == (8, 0)
        assert stats["tiers"]["dram"]["used_bytes"] == 8 * 8 * MIB


N_AT_REST = 20


@pytest.fixture
def at_rest(tmp_path: Path) -> tuple[Daemon, list[tuple[Path, int]]]:
    """A daemon that has ended after it stored blobs; where each of them lies."""
    with daemon(tmp_path) as run, Client(run.address) as kv:
        for seed in range(N_AT_REST):
            assert put(kv, ONE_MIB, chain(ONE_MIB, seed, 1), "durable") == ["stored"]
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 0
    (segment,) = run.data.glob("segments/*.seg")
    places = []
    with segment.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as contents:
        for seed in range(N_AT_REST):
            start = payload_of(chain(ONE_MIB, seed, 1)[0], MIB)[:64]
            places.append((segment, contents.find(start)))
    assert min(offset for _, offset in places) > 0
    return run, places


def verified(run: Daemon) -> tuple[int, dict[str, Any]]:
    """Exit code and report of `blobstore verify`."""
    command = [sys.executable, "-m", "blobstore", "verify", "--json", "--socket", str(run.socket)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize("first", ["get", "verify"])
def test_a_bit_that_rots_costs_one_blob(
    tmp_path: Path, at_rest: tuple[Daemon, list[tuple[Path, int]]], first: str
) -> None:
    """restic/restic#3220, LMCache/LMCache#3292: wrong bytes served, or errors for ever."""
    segment, offset = at_rest[1][7]
    with segment.open("r+b") as file:
        file.seek(offset + MIB // 2)
        (byte,) = file.read(1)
        file.seek(offset + MIB // 2)
        file.write(bytes([byte ^ 0x10]))
    with daemon(tmp_path) as run, Client(run.address) as kv:
        if first == "verify":
            code, report = verified(run)
            assert code == 1
            assert [bad["key"] for bad in report["corrupt"]] == [chain(ONE_MIB, 7, 1)[0].hex()]
        found = [count_right(kv, ONE_MIB, chain(ONE_MIB, seed, 1)) for seed in range(N_AT_REST)]
        assert found == [seed != 7 for seed in range(N_AT_REST)]
        assert kv.stats()["counters"]["corrupt"] == 1
        code, report = verified(run)
        assert (code, report["corrupt"], report["blobs"]) == (0, [], N_AT_REST - 1)
        assert put(kv, ONE_MIB, chain(ONE_MIB, 7, 1), "durable") == ["stored"]
        assert count_right(kv, ONE_MIB, chain(ONE_MIB, 7, 1)) == 1


def test_a_segment_cut_short_costs_what_lay_behind_the_cut(
    tmp_path: Path, at_rest: tuple[Daemon, list[tuple[Path, int]]]
) -> None:
    """LMCache/LMCache#3292, DanEngelbrecht/golongtail#237."""
    segment = at_rest[1][0][0]
    cut = sorted(offset for _, offset in at_rest[1])[N_AT_REST // 2] + MIB // 2
    os.truncate(segment, cut)
    whole = [offset + MIB <= cut for _, offset in at_rest[1]]
    with daemon(tmp_path) as run, Client(run.address) as kv:
        found = [count_right(kv, ONE_MIB, chain(ONE_MIB, seed, 1)) for seed in range(N_AT_REST)]
        assert found == whole
        assert kv.stats()["tiers"]["ssd"]["rows_dropped"] == {"cut": whole.count(False)}
        assert verified(run)[0] == 0
        for seed in range(N_AT_REST):
            put(kv, ONE_MIB, chain(ONE_MIB, seed, 1), "durable")
            assert count_right(kv, ONE_MIB, chain(ONE_MIB, seed, 1)) == 1


def test_a_catalogue_cut_short_is_refused_by_name(
    tmp_path: Path, at_rest: tuple[Daemon, list[tuple[Path, int]]]
) -> None:
    """A map beyond the end of its file would be a SIGBUS later."""
    data = at_rest[0].data / "catalogue" / "data.mdb"
    with lmdb.open(os.fspath(data.parent), readonly=True, lock=False) as env:
        used_bytes = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    os.truncate(data, used_bytes // 2)
    code, said = refused(tmp_path)
    assert code == 1
    assert os.fspath(data.parent) in said
    os.truncate(data, 0)
    with daemon(tmp_path) as run, Client(run.address) as kv:  # empty: a new store
        assert kv.exists(kv.namespace(ONE_MIB), chain(ONE_MIB, 0, 1)) == [False]
        assert put(kv, ONE_MIB, chain(ONE_MIB, 0, 1), "durable") == ["stored"]


async def cancel_gets(address: str, namespaces: tuple[Namespace, Namespace], rounds: int) -> None:
    rng = random.Random(3)
    cold, warm = namespaces
    cold_key, warm_key = chain(cold, 1, 1), chain(warm, 2, 1)
    expected = payload_of(warm_key[0], warm.layout.nbytes(1))
    async with AsyncClient(address, timeout_s=20.0) as kv:
        cold_ns, warm_ns = await kv.namespace(cold), await kv.namespace(warm)
        for _ in range(rounds):
            task = asyncio.ensure_future(kv.get(cold_ns, cold_key))
            await asyncio.sleep(rng.uniform(0.0, 0.02))
            task.cancel()
            async with kv.get(warm_ns, warm_key) as lease:
                assert lease[0] == expected
            await asyncio.gather(task, return_exceptions=True)
            if not task.cancelled():
                task.result().release()
            del task
            await kv.drop(cold_ns, cold_key, tier="dram")


@pytest.mark.parametrize("kind", ["loop", "threads"])
def test_a_get_that_is_cancelled_does_not_poison_the_next(tmp_path: Path, kind: str) -> None:
    """LMCache/LMCache#5149, dask/distributed#4133: a late reply taken for the next one's."""
    warm = opaque(64 * KIB + 5)
    with daemon(tmp_path) as run, Client(run.address, timeout_s=20.0) as kv:
        assert put(kv, EIGHT_MIB, chain(EIGHT_MIB, 1, 1), "durable") == ["stored"]
        assert put(kv, warm, chain(warm, 2, 1)) == ["stored"]
        if kind == "loop":
            asyncio.run(cancel_gets(run.address, (EIGHT_MIB, warm), 200))
        else:
            rng = random.Random(4)
            ns = kv.namespace(EIGHT_MIB)
            for _ in range(200):
                kv.drop(ns, chain(EIGHT_MIB, 1, 1), tier="dram")
                with kv.get(ns, chain(EIGHT_MIB, 1, 1), timeout_s=rng.uniform(0.0, 0.02)) as lease:
                    assert lease.reason in ("", "deadline")
                assert count_right(kv, warm, chain(warm, 2, 1)) == 1
        poll_until(lambda: kv.stats()["leases"] == 0)
        assert kv.stats()["clients"] == 1
        assert kv.stats()["counters"]["loaded_blobs"] > 20
        assert "Traceback" not in run.said


def test_a_connection_that_closes_in_the_middle_of_a_put_stores_nothing(tmp_path: Path) -> None:
    """LMCache/LMCache#5149: incomplete bodies accepted."""
    key = chain(ONE_MIB, 1, 1)
    with daemon(tmp_path) as run, Client(run.address) as kv:
        with RawClient(run.socket) as raw:
            raw.ask(Declare(ONE_MIB.encode()))
            reserved = raw.ask(Reserve(ONE_MIB.id, key.packed, 32, b"", 0, "standard", 1.0))
            assert isinstance(reserved, Reserved)
        poll_until(lambda: kv.stats()["reservations"] == 0)
        assert kv.exists(kv.namespace(ONE_MIB), key) == [False]
        assert kv.put_from(kv.namespace(ONE_MIB), key, payloads_of(key, MIB)) == ["stored"]
        assert count_right(kv, ONE_MIB, key) == 1

"""Failures that others met in the field, asked of ours: keys, leases, loads and full tiers.

Every test names the report that it was made from.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from blobstore.clients import AsyncClient, Client
from blobstore.units import KIB, MIB
from tests.support.blobs import chain, count_right, opaque, payloads_of, put
from tests.support.daemon import Daemon, daemon
from tests.support.polling import poll_until
from tests.support.puppet import Puppet

ONE_MIB = opaque(MIB)
ARENA_MIB = 64


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Daemon]:
    with daemon(tmp_path) as run:
        yield run


@pytest.fixture
def kv(run: Daemon) -> Iterator[Client]:
    with Client(run.address, timeout_s=20.0) as kv:
        yield kv


KEYS_PROGRAM = """
import json, sys
from blobstore.clients import Client, KVLayout, Namespace
namespace = Namespace(model="m", layout=KVLayout.opaque(1000), tokens_per_blob=4)
lists = [list(range(40)), [7] * 8, [2**32 - 1, 0, 5, 9]]
keys = [[key.hex() for key in namespace.keys(ids)] for ids in lists]
with Client(sys.argv[1]) as kv:
    ns = kv.namespace(namespace)
    held = kv.match(ns, namespace.keys(lists[0])).blobs
    results = kv.put_from(ns, namespace.keys(lists[0]), [bytes(1000)] * 10)
print(json.dumps([keys, held, results]))
"""

LRU = {"BLOBSTORE__TIERING__POLICY": "lru"}
"""Its order is known: whatever is flooded has left."""


def test_keys_are_the_same_in_every_interpreter(run: Daemon) -> None:
    """LMCache/LMCache#1139, #2136, #2511: hit rates of 0, since hash() differs by process."""
    outcomes = []
    for seed, options in ((None, []), ("0", []), ("1", []), (None, ["-I"])):
        environ = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
        if seed is not None:
            environ["PYTHONHASHSEED"] = seed
        command = [sys.executable, *options, "-c", KEYS_PROGRAM, run.address]
        done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=60)
        assert done.returncode == 0, done.stderr
        outcomes.append(json.loads(done.stdout))
    keys = outcomes[0][0]
    assert [outcome[0] for outcome in outcomes] == [keys] * 4
    assert [outcome[1] for outcome in outcomes] == [0, 10, 10, 10]
    assert [set(outcome[2]) for outcome in outcomes] == [{"stored"}] + [{"exists"}] * 3


@pytest.mark.parametrize("ssd", ["off", "256MiB"])
def test_what_a_lease_promised_is_there_under_a_flood(tmp_path: Path, ssd: str) -> None:
    """LMCache/LMCache#4133, #1467: a lookup's promise was evicted before it was fetched."""
    promised, unpromised = chain(ONE_MIB, 1, 12), chain(ONE_MIB, 2, 12)
    with (
        daemon(tmp_path, "--dram", f"{ARENA_MIB}MiB", "--ssd", ssd, environ=LRU) as run,
        Client(run.address, timeout_s=20.0) as kv,
        Puppet(run.address) as flood,
    ):
        ns = kv.namespace(ONE_MIB)
        for keys in (promised, unpromised):
            assert put(kv, ONE_MIB, keys) == ["stored"] * 12
            assert kv.match(ns, keys).blobs == 12
        with kv.get(ns, promised) as lease:
            assert len(lease) == 12
            flood.tell(["flood", MIB, 1000, 5 * ARENA_MIB])
            while kv.stats()["counters"]["put_blobs"]["stored"] < 5 * ARENA_MIB:
                n = kv.match(ns, unpromised).blobs
                assert count_right(kv, ONE_MIB, unpromised) <= 12
                assert 0 <= n <= 12
            assert flood.hear() == {"stored": 5 * ARENA_MIB}
            assert [bytes(view) for view in lease] == payloads_of(promised, MIB)
        if ssd == "off":
            assert flood.do("flood", MIB, 2000, 2 * ARENA_MIB) == {"stored": 2 * ARENA_MIB}
            assert count_right(kv, ONE_MIB, promised) == kv.match(ns, promised).blobs == 0


def test_what_was_put_is_there_for_others_while_the_writer_idles(tmp_path: Path) -> None:
    """vllm-project/vllm#53498, sgl-project/sglang#39444: the tail waits for the next request."""
    n = 33
    with (
        daemon(tmp_path) as run,
        Client(run.address) as kv,
        Puppet(run.address) as other,
    ):
        assert put(kv, ONE_MIB, chain(ONE_MIB, 1, n)) == ["stored"] * n
        assert other.do("get", MIB, 1, n) == n
        poll_until(lambda: kv.stats()["tiers"]["ssd"]["dirty_bytes"] == 0, 10.0)
        assert kv.stats()["counters"]["saved_blobs"] == n
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 0
    with daemon(tmp_path) as run, Client(run.address) as kv:
        assert count_right(kv, ONE_MIB, chain(ONE_MIB, 1, n)) == n
        assert put(kv, ONE_MIB, chain(ONE_MIB, 2, n), "durable") == ["stored"] * n
        run.kill()
    with daemon(tmp_path) as run, Client(run.address) as kv:
        for seed in (1, 2):
            assert count_right(kv, ONE_MIB, chain(ONE_MIB, seed, n)) == n


def test_many_requests_for_one_cold_blob_are_one_load(tmp_path: Path) -> None:
    """vllm-project/vllm#44294: as many reads as requests, or a queue behind one load."""
    large = opaque(64 * MIB)
    cold, warm = chain(large, 1, 1), chain(ONE_MIB, 2, 1)
    with (
        daemon(tmp_path, "--dram", "256MiB") as run,
        Client(run.address, timeout_s=20.0) as kv,
        ThreadPoolExecutor(66) as pool,
    ):
        ns = kv.namespace(large)
        assert put(kv, large, cold, "durable") == ["stored"]
        assert put(kv, ONE_MIB, warm) == ["stored"]
        for round_number in range(1, 4):
            assert kv.drop(ns, cold, tier="dram") == 1
            leader = pool.submit(kv.get, ns, cold, timeout_s=0.002)
            followers = [pool.submit(kv.get, ns, cold) for _ in range(32)]
            others = [pool.submit(count_right, kv, ONE_MIB, warm) for _ in range(32)]
            assert [other.result() for other in others] == [1] * 32
            leases = [follower.result() for follower in (leader, *followers)]
            assert [len(lease) for lease in leases[1:]] == [1] * 32
            assert kv.stats()["counters"]["loaded_blobs"] == round_number
            assert leases[1][0] == payloads_of(cold, 64 * MIB)[0]
            for lease in leases:
                lease.release()
            poll_until(lambda: kv.stats()["leases"] == 0)


async def drop_gets(address: str, n: int) -> None:
    """Half of the leases in cancelled tasks, half forgotten."""
    async with AsyncClient(address, timeout_s=20.0) as kv:
        ns = await kv.namespace(ONE_MIB)
        keys = chain(ONE_MIB, 1, 4)
        for number in range(n):
            task = asyncio.ensure_future(kv.get(ns, keys))
            if number % 2:
                await asyncio.sleep(0)
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            del task


def test_leases_that_are_never_used_pin_nothing(run: Daemon, kv: Client) -> None:
    """LMCache/LMCache#1034, #987, #3381: the tier becomes unevictable; counts fall below zero."""
    keys = chain(ONE_MIB, 1, 4)
    ns = kv.namespace(ONE_MIB)
    assert put(kv, ONE_MIB, keys) == ["stored"] * 4
    for _ in range(500):
        kv.get(ns, keys)  # and forgotten
    asyncio.run(drop_gets(run.address, 500))
    gc.collect()
    poll_until(lambda: kv.stats()["leases"] == 0)
    assert kv.stats()["pinned_bytes"] == 0
    with kv.get(ns, keys) as live:
        twice = kv.get(ns, keys)
        for _ in range(3):
            twice.release()
        poll_until(lambda: kv.stats()["leases"] == 1)
        for seed in range(100, 100 + 2 * ARENA_MIB):
            assert put(kv, ONE_MIB, chain(ONE_MIB, seed, 1)) == ["stored"]
        assert [bytes(view) for view in live] == payloads_of(keys, MIB)
    poll_until(lambda: kv.stats()["leases"] == 0)


def rss_anon(run: Daemon) -> int:
    status = Path(f"/proc/{run.process.pid}/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * KIB


def test_a_burst_of_puts_into_a_full_tier_is_served_in_turn(run: Daemon, kv: Client) -> None:
    """kvcache-ai/Mooncake#3331, #915, LMCache/LMCache#1224: failures although room is near."""
    n_writers, each = 64, 4 * ARENA_MIB // 64
    took_s = []

    def write(writer: int) -> list[str]:
        results = []
        for number in range(each):
            started_s = time.monotonic()
            results += put(kv, ONE_MIB, chain(ONE_MIB, 1000 + writer * each + number, 1))
            took_s.append(time.monotonic() - started_s)
        return results

    def read(writer: int) -> None:
        for number in range(each):
            count_right(kv, ONE_MIB, chain(ONE_MIB, 1000 + writer * each + number, 1))

    with ThreadPoolExecutor(n_writers + 4) as pool:
        writing = [pool.submit(write, writer) for writer in range(n_writers)]
        reading = [pool.submit(read, writer) for writer in range(0, n_writers, 4)]
        results = [result for future in writing for result in future.result()]
        for future in reading:
            future.result()
    assert results == ["stored"] * (n_writers * each)
    assert max(took_s) < 20.0
    assert rss_anon(run) < 100 * MIB
    assert kv.stats()["waiting_for_room"] == 0

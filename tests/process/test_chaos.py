"""Everything at once: all verbs from many processes, which are killed at random."""

from __future__ import annotations

import random
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from blobstore.clients import Client
from blobstore.units import KIB, MIB
from tests.support.chaos import NAMESPACES, contexts
from tests.support.daemon import Daemon, daemon
from tests.support.polling import poll_until, wait_s
from tests.support.program import Program

N_CLIENTS = 3


def holds_nothing(kv: Client) -> bool:
    stats = kv.stats()
    return not any(
        stats[name]
        for name in ("leases", "reservations", "lent_bytes", "pinned_bytes", "waiting_for_room")
    )


def rss_anon(run: Daemon) -> int:
    status = Path(f"/proc/{run.process.pid}/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * KIB


def rage(run: Daemon, seed: int, seconds: float) -> None:
    """Clients that work and are killed, until the time is over; all of them are gone then."""
    rng = random.Random(seed)
    with ExitStack() as all_clients:

        def start(number: int) -> Program:
            program = Program("tests.support.chaos", run.address, number)
            return all_clients.enter_context(program)

        clients = [start(100 * seed + number) for number in range(N_CLIENTS)]
        started = N_CLIENTS
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            wait_s(rng.uniform(0.2, 1.0))
            assert run.process.poll() is None, run.said
            for client in clients:
                assert client.process.poll() is None, client.end()
            clients.pop(rng.randrange(N_CLIENTS)).kill()
            clients.append(start(100 * seed + started))
            started += 1


def survive(home: Path, seed: int, seconds: float) -> None:
    sizes = ("--dram", "24MiB", "--ssd", "48MiB")
    environ = {"BLOBSTORE__TIMES__RESERVATION_S": "2"}
    with daemon(home, *sizes, environ=environ) as run:
        rage(run, seed, seconds)
        with Client(run.address, timeout_s=60.0) as kv:
            poll_until(lambda: holds_nothing(kv), 20.0, "all that clients held is back")
            report = kv.verify()
            assert (report["complete"], report["corrupt"], report["unreadable"]) == (True, [], [])
            stats = kv.stats()
            assert stats["counters"]["corrupt"] == 0
            assert stats["counters"]["put_blobs"].get("divergent", 0) == 0
            assert rss_anon(run) < 100 * MIB
            for namespace in NAMESPACES:
                ns = kv.namespace(namespace)
                for keys in contexts(namespace):
                    kv.drop(ns, keys[:1])

            def is_empty() -> bool:
                stats = kv.stats()
                dram, ssd = stats["tiers"]["dram"], stats["tiers"]["ssd"]
                return bool(
                    stats["blobs"] == 0
                    and dram["largest_free_bytes"] == dram["capacity_bytes"]
                    and ssd["live_bytes"] == ssd["frees_waiting"] == ssd["extents"] == 0
                )

            poll_until(is_empty, 20.0, "both tiers are free in one run")
            assert "Traceback" not in run.said, run.said


def test_everything_at_once(tmp_path: Path) -> None:
    survive(tmp_path, seed=1, seconds=6.0)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 12))
def test_everything_at_once_for_long(tmp_path: Path, seed: int) -> None:
    survive(tmp_path, seed, seconds=60.0)

"""SIGKILL of the daemon at random points under load, again and again on one directory."""

from __future__ import annotations

import random
from contextlib import ExitStack
from pathlib import Path

import pytest

from blobstore.clients import Client, Keys
from blobstore.units import KIB, MIB
from tests.support.blobs import count_right, opaque
from tests.support.crash_load import SIZES
from tests.support.daemon import READY_S, Daemon
from tests.support.program import Program

BLOCK = 4096
INLINE_BYTES_MAX = 64 * KIB
FILE_SLACK = 64 * KIB
"""Of each file, for the file system's own bookkeeping."""
SSD_BYTES = 96 * MIB
N_CLIENTS = 4
TOGETHER = 8

Known = dict[int, set[bytes]]
"""Keys by size of blob."""


class Crashes:
    """Clients that outlive the daemons of one directory, and what these promised to them."""

    def __init__(self, home: Path, seed: int) -> None:
        self._home = home
        self._rng = random.Random(seed)
        self._seed = seed
        self._clients: list[Program] = []
        self._missing: dict[str, list[str]] = {}

    def run(self, n_points: int) -> None:
        """Crash so many times; after each everything is as promised."""
        with ExitStack() as clients:
            run = self._start(crash_while_opening=False)
            try:
                for number in range(N_CLIENTS):
                    arguments = (run.address, number, self._seed)
                    program = Program("tests.support.crash_load", *arguments)
                    self._clients.append(clients.enter_context(program))
                assert [client.hear() for client in self._clients] == ["ready"] * N_CLIENTS
                for point in range(n_points):
                    known = self._crash(run)
                    run = self._start(crash_while_opening=self._rng.random() < 0.25)
                    self._check(run, known, f"seed {self._seed}, point {point}")
            finally:
                run.kill()

    def _start(self, *, crash_while_opening: bool) -> Daemon:
        options = ("--dram", "32MiB", "--ssd", str(SSD_BYTES))
        if crash_while_opening:
            run = Daemon(self._home, *options)
            run.kill_after(self._rng.uniform(0.2, 0.6))
        run = Daemon(self._home, *options)
        run.wait_ready()
        return run

    def _crash(self, run: Daemon) -> dict[str, Known]:
        """Let the clients work, kill the daemon, and ask what was promised to them."""
        for client in self._clients:
            client.tell(self._missing)
        assert [client.hear() for client in self._clients] == ["running"] * N_CLIENTS
        run.kill_after(self._rng.uniform(0.0, 0.5))
        assert "Traceback" not in run.said, run.said
        for client in self._clients:
            client.tell("stop")
        known: dict[str, Known] = {
            name: {nbytes: set() for nbytes in SIZES} for name in ("must", "may", "never")
        }
        for client in self._clients:
            for name, by_size in client.hear(READY_S).items():
                for nbytes, keys in by_size.items():
                    known[name][int(nbytes)].update(map(bytes.fromhex, keys))
        return known

    def _check(self, run: Daemon, known: dict[str, Known], where: str) -> None:
        self._missing = {}
        segment_bytes = n_held = 0
        with Client(run.address, timeout_s=READY_S) as kv:
            for nbytes in SIZES:
                must, may, never = (known[name][nbytes] for name in ("must", "may", "never"))
                held, missing = self._held(kv, nbytes, must | may)
                assert must <= held, f"durable blobs of {nbytes} are lost: {where}"
                assert self._held(kv, nbytes, never) == (set(), never), where
                self._missing[str(nbytes)] = [key.hex() for key in missing]
                self._read(kv, nbytes, sorted(held))
                n_held += len(held)
                if nbytes > INLINE_BYTES_MAX:
                    segment_bytes += -(-nbytes // BLOCK) * BLOCK * len(held)
            self._check_room(run, kv, n_held, segment_bytes, where)
            report = kv.verify()
            assert (report["corrupt"], report["unreadable"], report["complete"]) == ([], [], True)
            assert report["blobs"] == n_held

    def _held(self, kv: Client, nbytes: int, known: set[bytes]) -> tuple[set[bytes], set[bytes]]:
        keys = sorted(known)
        ns = kv.namespace(opaque(nbytes))
        held = {key for key, is_held in zip(keys, kv.exists(ns, keys), strict=True) if is_held}
        return held, known - held

    def _read(self, kv: Client, nbytes: int, keys: list[bytes]) -> None:
        """Whatever exists is whole."""
        for start in range(0, len(keys), TOGETHER):
            some = Keys.of(keys[start : start + TOGETHER])
            for first in range(len(some)):  # one by one, since they are no chain
                assert count_right(kv, opaque(nbytes), some[first : first + 1]) == 1

    def _check_room(
        self, run: Daemon, kv: Client, n_held: int, segment_bytes: int, where: str
    ) -> None:
        """The disk holds what lives, and the slack that docs/FORMAT states."""
        stats = kv.stats()
        ssd = stats["tiers"]["ssd"]
        files = list(run.data.glob("segments/*.seg"))
        assert stats["blobs"] == n_held, where
        assert ssd["live_bytes"] == segment_bytes, where
        assert ssd["used_bytes"] <= SSD_BYTES, where
        taken = sum(path.stat().st_blocks * 512 for path in files)
        assert taken <= segment_bytes + len(files) * (BLOCK + FILE_SLACK), where
        everything = sum(path.stat().st_blocks * 512 for path in run.data.rglob("*"))
        assert everything <= ssd["used_bytes"] + (len(files) + 1) * FILE_SLACK, where


def test_a_killed_daemon_keeps_its_promises_at_20_points(tmp_path: Path) -> None:
    Crashes(tmp_path, seed=1).run(20)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 22))
def test_a_killed_daemon_keeps_its_promises_at_2000_points(tmp_path: Path, seed: int) -> None:
    Crashes(tmp_path, seed).run(100)

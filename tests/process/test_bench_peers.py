"""`bench peers` against the real servers that this machine has."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from blobstore.bench.blobs import BenchInvalid
from blobstore.bench.peer import Room
from blobstore.bench.peer_redis import RedisByHand
from blobstore.bench.peers import PEERS
from tests.support.polling import poll_until
from tests.support.program import ROOT

NAMES = [peer().name for kinds in PEERS.values() for peer in kinds]
ROWS = [
    "peers.put_1MiB", "peers.get_1MiB", "peers.lease_1MiB",
    "peers.put_16MiB", "peers.get_16MiB", "peers.lease_16MiB",
    "peers.lease_one_16MiB", "peers.exists_500",
]  # fmt: skip
RUN_S = 150.0

needs_redis = pytest.mark.skipif(
    bool(RedisByHand().missing()), reason=f"needs redis-server: {RedisByHand().missing()}"
)


@pytest.fixture
def home() -> Iterator[Path]:
    """Where the servers live: a short path, as sockets go there."""
    with tempfile.TemporaryDirectory(prefix="bp-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def disk() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        yield Path(folder)


def start(home: Path, disk: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "blobstore", "bench", "peers", *options, "--data", str(disk)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(home)},
    )


def living_in(home: Path) -> list[str]:
    """The processes that were started with a path below `home`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if os.fsencode(home) in command:
                found.append(command.replace(b"\0", b" ").decode())
    return found


@needs_redis
@pytest.mark.timeout(RUN_S + 30)
def test_a_tiny_run_compares_all_that_is_here_and_leaves_nothing(home: Path, disk: Path) -> None:
    picture = home / "peers.svg"
    process = start(home, disk, "--tiny", "--json", "--plot", str(picture))
    out, errors = process.communicate(timeout=RUN_S)
    assert process.returncode == 0, errors
    body = json.loads(out)
    assert [row["name"] for row in body["rows"]] == ROWS
    took_part = set(body["how"]) - {"blobstore"}
    assert took_part | set(body["skipped"]) == set(NAMES)
    for peer in (kind() for kinds in PEERS.values() for kind in kinds):
        assert (peer.name in took_part) == (not peer.missing()), body["skipped"].get(peer.name)
    for row in body["rows"]:
        assert row["value"] > 0
        assert row["ratio"] > 0
        assert row["limit_name"] in took_part
    assert set(body["rows"][0]["peers"]) == took_part | {"memcpy"}
    assert len(body["verdict"]) >= 5
    assert picture.stat().st_size > 0
    picture.unlink()
    assert living_in(home) == []
    assert list(home.iterdir()) == []
    assert list(disk.iterdir()) == []


@needs_redis
def test_redis_by_hand_takes_no_miss_and_no_error_for_bytes(disk: Path) -> None:
    peer = RedisByHand()
    target = np.zeros(1 << 20, np.uint8)
    try:
        peer.start(Room(disk, target.nbytes, ()))
        peer.put([b"held"], [target])
        assert peer.exists([b"held", b"absent"]) == [True, False]
        with pytest.raises(BenchInvalid, match="redis-server answered"):
            peer.get([b"absent"], [target])
    finally:
        peer.stop()


@needs_redis
def test_a_run_that_is_told_to_end_takes_its_servers_along(home: Path, disk: Path) -> None:
    process = start(home, disk, "--tiny", "--peers", "redis")
    try:
        poll_until(lambda: [line for line in living_in(home) if "redis-server" in line], 60.0)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60.0)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert living_in(home) == []
    assert list(home.iterdir()) == []


@needs_redis
def test_servers_do_not_outlive_a_run_that_is_killed(home: Path, disk: Path) -> None:
    process = start(home, disk, "--tiny", "--peers", "redis")
    try:
        poll_until(lambda: [line for line in living_in(home) if "redis-server" in line], 60.0)
    finally:
        process.kill()
        process.communicate()
    poll_until(lambda: not living_in(home), 60.0)

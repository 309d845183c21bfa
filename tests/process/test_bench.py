"""Every benchmark, small and as it is called, and the demo, whole, against real daemons."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from blobstore.bench.demo import DOCUMENT_TOKENS_MIN, run_demo
from blobstore.bench.own_daemon import OwnDaemon
from blobstore.errors import SetupError, Unavailable
from blobstore.units import MIB
from tests.support.program import ROOT

BENCH_S = 150.0
ROWS = {
    "rpc": ["rpc.ping", "rpc.match_1000", "rpc.match_1000.half"],
    "tiers": [
        "dram.lease", "dram.get_into", "dram.put", "dram.put_pressed",
        "ssd.read", "ssd.promote", "ssd.first_layer", "ssd.write", "ssd.write.full",
        "http.get", "http.put",
    ],
    "midfill": ["midfill"],
    "clients": ["clients.match", "clients.get_into", "clients.put"],
    "catalogue": ["catalogue.open", "catalogue.memory_per_blob"],
    "texts": ["texts.open", "texts.memory_per_text", "texts.forget"],
    "put-cost": ["put_cost.standard", "put_cost.durable"],
    "idle": ["idle.cpu", "idle.memory"],
    "http": ["http.requests", "http.loop_lag", "http.memory"],
}  # fmt: skip


@pytest.fixture
def disk() -> Iterator[Path]:
    """A folder on a disk: the usual temporary directory is a tmpfs on many machines."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        yield Path(folder)


@pytest.mark.parametrize("name", ROWS)
def test_a_tiny_run_gives_every_row_and_leaves_nothing(name: str, disk: Path) -> None:
    command = [sys.executable, "-m", "blobstore", "bench", name, "--tiny", "--json"]
    done = subprocess.run(
        [*command, "--data", str(disk)], capture_output=True, cwd=ROOT, timeout=BENCH_S, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    rows = json.loads(done.stdout)["rows"]
    assert [row["name"] for row in rows] == ROWS[name]
    for row in rows:
        numbers = ("value", "limit", "ratio", "median_s", "p99_s", "spread")
        assert all(math.isfinite(row[number]) for number in numbers)
        assert row["n"] > 0
    assert list(disk.iterdir()) == []


@pytest.mark.timeout(600)  # on two busy cores
@pytest.mark.parametrize("layers", [6, pytest.param(0, marks=pytest.mark.soak, id="all")])
def test_the_demo_holds(disk: Path, layers: int) -> None:
    outcome = json.loads(run_demo(disk, lambda line: None, layers=layers).to_json())
    steps = outcome["steps"]
    assert outcome["document_tokens"] >= DOCUMENT_TOKENS_MIN
    assert [step["served_from"] for step in steps] == ["dram", "ssd", "ssd", "dram", "rebuild"]
    assert all(step["tokens_equal"] for step in steps)
    assert all(step["restored_tokens"] >= DOCUMENT_TOKENS_MIN // 64 * 64 for step in steps)
    assert list(disk.iterdir()) == []


def test_an_own_daemon_leaves_nothing_behind(disk: Path) -> None:
    with OwnDaemon(disk, dram_bytes=16 * MIB) as daemon:
        with daemon.client() as kv:
            assert kv.ping()
        assert daemon.memory_bytes("VmRSS") > 0
        daemon.kill()
        assert daemon.start() > 0
        address = daemon.address
    assert list(disk.iterdir()) == []
    with pytest.raises(Unavailable):
        daemon.client(timeout_s=0.1)
    assert not Path(address.removeprefix("unix:")).parent.exists()


def test_a_daemon_that_cannot_start_says_why(disk: Path) -> None:
    with (
        pytest.raises(SetupError, match="ended with code"),
        OwnDaemon(disk, dram_bytes=1 << 60) as daemon,
    ):
        pytest.fail(f"{daemon.address} is up")
    assert list(disk.iterdir()) == []

"""`bench engine`, small; and conversations of all kinds, whose every turn is as computed cold."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from blobstore.bench.engine_process import EngineDied, EngineProcess, RebuilderProcess
from blobstore.bench.engine_turns import Turns
from blobstore.bench.engine_ways import BOTH_UNEVEN, COLD, WAYS
from blobstore.bench.model_file import ModelFile
from blobstore.bench.own_daemon import OwnDaemon
from blobstore.units import MIB
from tests.support.engine_scripts import drawn
from tests.support.program import ROOT

CONVERSATIONS = 20
AT_ONCE = 5
"""With one daemon."""
TOKENS_MAX = 90
LAYERS = 2
"""Of the model: enough that every byte depends on every token before."""
CAPACITY_TOKENS = 1024
BENCH_S = 500.0


@pytest.fixture
def disk() -> Iterator[Path]:
    """A folder on a disk: the usual temporary directory is a tmpfs on many machines."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        yield Path(folder)


@pytest.mark.timeout(900)  # on two busy cores; half a minute on idle ones
@pytest.mark.parametrize("first", range(0, CONVERSATIONS, AT_ONCE))
def test_every_way_gives_the_tokens_and_bytes_of_the_cold_run(disk: Path, first: int) -> None:
    ways: Counter[str] = Counter()
    with ExitStack() as stack:
        daemon = stack.enter_context(OwnDaemon(disk, dram_bytes=96 * MIB, ssd_bytes=512 * MIB))
        engine = stack.enter_context(EngineProcess(daemon.address, CAPACITY_TOKENS, LAYERS))
        stack.enter_context(RebuilderProcess(daemon.address, CAPACITY_TOKENS, LAYERS))
        kv = stack.enter_context(daemon.client())
        turns = Turns(daemon, kv, engine, ModelFile(layers=LAYERS), lambda line: None)
        for seed in range(first, first + AT_ONCE):
            for sample in turns.converse(drawn(seed, TOKENS_MAX), seed, WAYS):
                assert sample.equal, (seed, sample.request, sample.way)
                ways[sample.way] += 1
    assert ways["dram"] == ways["ssd"] == ways["rebuild"] == ways["both"] > 2 * AT_ONCE
    assert list(disk.iterdir()) == []


def test_every_conversation_branches_pauses_and_is_compacted() -> None:
    for seed in range(CONVERSATIONS):
        script = drawn(seed, TOKENS_MAX)
        after = [request.after for request in script]
        (compacted,) = (at for at, request in enumerate(script) if request.compacts is not None)
        assert any(request.pause for request in script)
        assert any(gone_on is not None and gone_on < at - 1 for at, gone_on in enumerate(after))
        assert compacted in after


@pytest.mark.timeout(600)  # as above
def test_a_tiny_run_gives_every_row_and_leaves_nothing(disk: Path) -> None:
    command = [sys.executable, "-m", "blobstore", "bench", "engine", "--tiny", "--json"]
    done = subprocess.run(
        [*command, "--data", str(disk)], capture_output=True, cwd=ROOT, timeout=BENCH_S, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    body = json.loads(done.stdout)
    rows = {row["name"]: row for row in body["rows"]}
    ways = *WAYS, BOTH_UNEVEN
    wanted = [f"engine.{name}" for name in (*ways, "readers", "without_reuse")]
    assert list(rows)[: len(wanted)] == wanted
    # So small a run may have too little to tell how far estimates are off.
    assert set(rows) - set(wanted) <= {"engine.estimate_fetch", "engine.estimate_rebuild"}
    for way in ways:
        row = rows[f"engine.{way}"]
        assert row["tokens_equal"]
        assert row["n"] > 0
        for name in ("restore_s", "ttft_s", "speedup", "ttft_speedup"):
            assert math.isfinite(row[name])
            assert row[name] > 0
        assert (row["bytes"] > 0) == (way != COLD)
    assert rows["engine.cold"]["speedup"] == 1.0
    assert rows["engine.rebuild"]["limit_name"] == "cold prefill by its runner"
    assert {turn["way"] for turn in body["turns"]} == set(ways)
    assert list(disk.iterdir()) == []


def test_an_engine_that_cannot_start_says_why() -> None:
    with pytest.raises(EngineDied, match="nothing-here"):
        EngineProcess("unix:/nothing-here", CAPACITY_TOKENS, LAYERS)

"""`blobstore bench engine --runner vllm`, small: that it works, not how fast it is."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROWS = [
    "vllm.cold",
    "vllm.own_cache",
    "vllm.dram",
    "vllm.ssd",
    "vllm.example_connector",
    "vllm.dram_beside_example",
    "vllm.no_reuse",
    "vllm.no_reuse_same_engine",
    "vllm.daemon_absent",
]


@pytest.mark.soak  # four starts of vLLM
@pytest.mark.timeout(1800)
def test_every_way_gives_the_tokens_of_an_engine_without_a_connector(tmp_path: Path) -> None:
    picture = tmp_path / "ways.svg"
    command = [sys.executable, "-m", "blobstore", "bench", "engine", "--runner", "vllm", "--tiny"]
    command += ["--json", "--plot", str(picture), "--data", str(tmp_path)]
    done = subprocess.run(
        [*command, "--vllm-python", sys.executable], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)["rows"]}
    assert list(rows) == ROWS
    assert all(row["tokens_equal"] for row in rows.values())
    assert rows["vllm.cold"]["cached_tokens"] == 0
    assert rows["vllm.dram"]["cached_tokens"] == rows["vllm.ssd"]["cached_tokens"] > 0
    assert ET.parse(picture).getroot().tag.endswith("svg")

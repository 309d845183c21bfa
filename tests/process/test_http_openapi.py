"""The served OpenAPI description, held against the door by requests at random."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.http_daemon import http_daemon, key, put

FUZZ_S = 150.0
UNDESCRIBED = {"/openapi.json", "/", "/v1/events", "/metrics"}
"""For people, browsers and Prometheus."""
CHECKS = """
[checks]
# Bounds that a schema cannot state: keys of one length, bodies of the blob's size.
positive_data_acceptance.enabled = false
# Two of these may be wrong about one request.
negative_data_rejection.expected-statuses = [400, 401, 403, 404, 405, 409, 412, 413, 415, 416]
"""


def test_every_operation_is_described_once(tmp_path: Path) -> None:
    with http_daemon(tmp_path) as door:
        described = door.ask("GET", "/openapi.json", token=None).json
        names = [
            operation["operationId"]
            for path in described["paths"].values()
            for method, operation in path.items()
            if method != "parameters"
        ]
        assert len(names) == len(set(names)) == 23
        assert not UNDESCRIBED & set(described["paths"])


@pytest.mark.skipif(
    importlib.util.find_spec("schemathesis") is None, reason="needs schemathesis (extra dev)"
)
def test_no_request_at_random_makes_it_fail_or_break_its_description(tmp_path: Path) -> None:
    with http_daemon(tmp_path) as door:
        ns = door.declare(8)
        assert put(door, f"{ns}/blobs/{key(1)}", bytes(8)).status == 201
        (tmp_path / "schemathesis.toml").write_text(CHECKS)
        command = [
            os.fspath(Path(sys.executable).with_name("schemathesis")),
            *("run", f"{door.url}/openapi.json", "-H", f"Authorization: Bearer {door.token}"),
            *("--max-examples", "30", "--generation-deterministic", "--no-color"),
        ]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=FUZZ_S, check=False
        )
        assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2000:]
        assert "Traceback" not in door.run.said
        assert door.nothing_is_lent()

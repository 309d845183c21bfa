"""A fixed script of look-ups adds up exactly, and every way of asking tells the same numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from playwright.async_api import expect
from prometheus_client.parser import text_string_to_metric_families

from blobstore.clients import Client
from blobstore.units import KIB
from tests.support import blobs
from tests.support.browser import chromium
from tests.support.daemon import Daemon, daemon
from tests.support.polling import poll_until

NBYTES = 64 * KIB
LABELS = {
    "blobstore_hit_blobs_total": ("hit_blobs", "tier"),
    "blobstore_hit_bytes_total": ("hit_bytes", "tier"),
    "blobstore_hit_tokens_total": ("hit_tokens", "tier"),
    "blobstore_missed_blobs_total": ("missed_blobs", "reason"),
    "blobstore_put_blobs_total": ("put_blobs", "result"),
}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Daemon]:
    with daemon(tmp_path, "--http", "127.0.0.1:0") as started:
        yield started


def url(run: Daemon) -> str:
    (line,) = [line for line in run.said.splitlines() if line.startswith("ready: http://")]
    return line.removeprefix("ready: ")


def token(run: Daemon) -> str:
    return (run.data / "http.token").read_text().strip()


def fetched(run: Daemon, path: str) -> bytes:
    request = Request(url(run) + path, headers={"Authorization": f"Bearer {token(run)}"})
    with urlopen(request, timeout=20) as answer:
        body: bytes = answer.read()
        return body


def by_metrics(run: Daemon) -> dict[str, dict[str, int]]:
    """The counters that have labels, as `stats` has them."""
    counters: dict[str, dict[str, int]] = {name: {} for name, _ in LABELS.values()}
    for family in text_string_to_metric_families(fetched(run, "/metrics").decode()):
        for sample in family.samples:
            if sample.name in LABELS and sample.value:
                name, label = LABELS[sample.name]
                counters[name][sample.labels[label]] = int(sample.value)
    return counters


def by_command(run: Daemon) -> dict[str, Any]:
    command = [sys.executable, "-m", "blobstore", "stats", "--socket", str(run.socket), "--json"]
    ended = subprocess.run(command, capture_output=True, timeout=60, check=True)
    body: dict[str, Any] = json.loads(ended.stdout)
    return body


def play(kv: Client) -> None:
    """Four blobs put; 22 asked for: 14 given, of them 4 from SSD; 8 are absent."""
    namespace = blobs.opaque(NBYTES)
    ns, keys = kv.namespace(namespace), blobs.chain(namespace, 1, 4)
    absent = blobs.chain(namespace, 2, 6)
    assert blobs.put(kv, namespace, keys) == ["stored"] * 4
    poll_until(lambda: kv.stats()["counters"]["saved_blobs"] == 4, 20.0)
    assert kv.drop(ns, keys, tier="dram") == 4
    for asked in (keys, keys, keys[:2], [*keys, *absent[:2]], absent):
        with kv.get(ns, asked, timeout_s=20.0):
            pass
    kv.match(ns, keys)
    assert blobs.put(kv, namespace, keys[:1]) == ["exists"]


def test_by_socket_http_metrics_and_command(run: Daemon) -> None:
    with Client(run.address) as kv:
        play(kv)
        counters = kv.stats()["counters"]
        tokens = blobs.TOKENS
        assert counters["hit_blobs"] == {"dram": 10, "ssd": 4}
        assert counters["hit_bytes"] == {"dram": 10 * NBYTES, "ssd": 4 * NBYTES}
        assert counters["hit_tokens"] == {"dram": 10 * tokens, "ssd": 4 * tokens}
        assert counters["missed_blobs"] == {"absent": 8}
        assert counters["put_blobs"] == {"stored": 4, "exists": 1}
        assert json.loads(fetched(run, "/v1/stats"))["counters"] == counters
        assert by_command(run)["counters"] == counters
        assert by_metrics(run) == {name: counters[name] for name, _ in LABELS.values()}


async def test_on_the_page(run: Daemon) -> None:
    with Client(run.address) as kv:
        play(kv)
    async with chromium() as browser:
        page = await browser.new_page()
        complaints: list[str] = []
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        await page.goto(url(run))
        await page.get_by_label("Token").fill(token(run))
        await page.get_by_label("Token").press("Enter")
        rows = page.locator("#hits tr")
        for n, text in (
            (0, "from DRAM010640 KiB40"),
            (1, "from SSD04256 KiB16"),
            (2, "while written000 B0"),
            (3, "missed: absent08"),
        ):
            await expect(rows.nth(n)).to_have_text(text, timeout=20_000)
        await expect(page.locator("#namespaces tr")).to_have_text("m4256 KiB256 KiB")
        assert complaints == []

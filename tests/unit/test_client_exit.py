"""Processes that end with clients, leases and writers open: quietly, and with all of it ended."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from blobstore.clients import KVLayout, Namespace
from blobstore.protocol import Seal
from tests.support.polling import poll_until
from tests.support.scripted_daemon import ScriptedDaemon

NAMESPACE = Namespace(model="m", layout=KVLayout.opaque(5000), tokens_per_blob=16)
KEYS = NAMESPACE.keys(range(16 * 3))

PRELUDE = """
import asyncio, os, sys, threading
import numpy as np
from blobstore.clients import AsyncClient, Client, KVLayout, Namespace

address = sys.argv[1]
namespace = Namespace(model="m", layout=KVLayout.opaque(5000), tokens_per_blob=16)
keys = namespace.keys(range(16 * 3))
"""

ENDINGS = {
    "a client": "kv = Client(address)",
    "a lease and its views": """
kv = Client(address)
ns = kv.namespace(namespace)
lease = kv.get(ns, keys)
view = lease[1]
""",
    "a lease in a block": """
kv = Client(address)
with kv.get(kv.namespace(namespace), keys) as lease:
    view = lease[0]
    sys.exit(0)
""",
    "a view of a closed client": """
with Client(address) as kv:
    array = np.frombuffer(kv.get(kv.namespace(namespace), keys)[0], np.uint8)
""",
    "an open writer": """
kv = Client(address)
writer = kv.put(kv.namespace(namespace), namespace.keys(range(1, 17)))
writer[0][:] = bytes(5000)
""",
    "a cycle": """
class Node: pass
node = Node()
node.kv = Client(address)
node.lease = node.kv.get(node.kv.namespace(namespace), keys)
node.me = node
""",
    "a daemon thread in a call": """
kv = Client(address)
ns = kv.namespace(namespace)
started = threading.Event()
def work():
    while True:
        kv.get(ns, keys)
        started.set()
threading.Thread(target=work, daemon=True).start()
started.wait()
""",
    "an async client that was not closed": """
async def main():
    global kv, lease
    kv = AsyncClient(address)
    ns = await kv.namespace(namespace)
    lease = await kv.get(ns, keys)
asyncio.run(main())
""",
    "an async client in its loop": """
async def main():
    kv = AsyncClient(address)
    lease = await kv.get(await kv.namespace(namespace), keys)
    sys.exit(0)
asyncio.run(main())
""",
    "an atexit handler that uses it": """
import atexit
kv = Client(address)
ns = kv.namespace(namespace)
atexit.register(lambda: kv.get(ns, keys)[0][0])
""",
}


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[ScriptedDaemon]:
    with ScriptedDaemon(tmp_path / "s") as daemon:
        for key in KEYS:
            daemon.store(NAMESPACE, key, b"x" * 5000)
        yield daemon


@pytest.mark.parametrize("name", ENDINGS)
def test_a_process_ends_quietly_with(name: str, daemon: ScriptedDaemon) -> None:
    ended = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", PRELUDE + ENDINGS[name], daemon.address],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    poll_until(lambda: not daemon.peers, what="its connections are closed")
    assert daemon.seen(Seal) == []

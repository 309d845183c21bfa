"""Ray's object store as a contestant of `bench peers`.

A cluster of this node alone, without workers, held by a process of its own; this
process is a driver of it. Its get is zero copy: read-only arrays over the store's
shared memory. It has no keys but references, so it cannot be asked what exists.
"""

from __future__ import annotations

import importlib
import logging
import os
import secrets
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from blobstore.bench.peer import Bytes, Payload, Room, find_package
from blobstore.bench.server_process import ServerProcess
from blobstore.units import MIB


class RayStore:
    """Ray's shared-memory store, by reference."""

    name = "ray"

    def __init__(self) -> None:
        self._process: ServerProcess | None = None
        self._ray: Any = None
        self._refs: dict[bytes, Any] = {}

    @property
    def how(self) -> str:
        """What is measured."""
        return (
            f"ray {version('ray')}, one node, shared memory: ray.put of NumPy arrays one by one; "
            "lease is its own get, zero copy: ray.get of all references; get is that, and a copy "
            "into the caller's buffers; it has no keys to ask for"
        )

    def missing(self) -> str:
        """The package; its servers come with it."""
        return "" if find_package("ray") else "pip install ray"

    def start(self, room: Room) -> None:
        """Start the node and connect to it as a driver."""
        self._process = ServerProcess("ray")
        address = self._process.home / "address"
        os.environ |= _environ()
        # Beyond what is held: it begins to spill to disk at four fifths.
        nbytes = room.held_bytes * 3 // 2 + 128 * MIB
        command = [sys.executable, "-m", "blobstore.bench.peer_ray"]
        self._process.start([*command, str(address), str(nbytes)], address.exists)
        self._ray = _connect(address.read_text())

    def put(self, keys: Sequence[bytes], sources: Sequence[Bytes]) -> None:
        """ray.put, one by one: there is no call for several."""
        put = self._ray.put
        for key, source in zip(keys, sources, strict=True):
            self._refs[key] = put(source)

    def get(self, keys: Sequence[bytes], targets: Sequence[Bytes]) -> Sequence[Payload]:
        """What lies in the store, copied into the caller's buffers."""
        with self.lease(keys) as found:
            for payload, target in zip(found, targets, strict=True):
                np.copyto(target, payload)
        return targets

    @contextmanager
    def lease(self, keys: Sequence[bytes]) -> Iterator[Sequence[Payload]]:
        """One ray.get; the arrays lie in the store as long as they live."""
        found: list[Bytes] = self._ray.get([self._refs[key] for key in keys])
        yield found

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """It cannot tell."""
        return []

    def remove(self, keys: Sequence[bytes]) -> None:
        """Objects go with their references."""
        for key in keys:
            del self._refs[key]

    def stop(self) -> None:
        """Disconnect and end the node."""
        self._refs.clear()
        with ExitStack() as undo:
            if self._process is not None:
                undo.callback(self._process.stop)
            if self._ray is not None:
                undo.callback(self._ray.shutdown)
            self._ray = self._process = None


def _environ() -> dict[str, str]:
    # It listens on all addresses, so a token it is; one of this run, as it would otherwise
    # leave one in the home directory.
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def _connect(address: str, **options: object) -> Any:
    """`ray.init`, quiet; it must not keep its handler of SIGTERM, which would replace ours."""
    ray = importlib.import_module("ray")
    handler = signal.getsignal(signal.SIGTERM)
    ray.init(
        address=address,
        log_to_driver=False,
        logging_level=logging.ERROR,
        **options,
    )
    signal.signal(signal.SIGTERM, handler)
    return ray


def _hold(address: Path, nbytes: int) -> None:
    """Start a node, tell its address, and keep it until we are ended."""
    ray = _connect(
        "local",
        num_cpus=0,
        object_store_memory=nbytes,
        include_dashboard=False,
        _temp_dir=str(address.parent),
    )
    told = address.with_suffix(".new")
    told.write_text(ray.get_runtime_context().gcs_address)
    told.rename(address)
    while True:
        signal.pause()


if __name__ == "__main__":
    _hold(Path(sys.argv[1]), int(sys.argv[2]))

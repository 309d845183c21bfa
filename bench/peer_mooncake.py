"""Mooncake Store as a contestant of `bench peers`.

As it runs on one machine without RDMA: `mooncake_master`, a process that holds
the segment, and a client in this process; bytes go over TCP on the loopback.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

from blobstore.bench.blobs import require
from blobstore.bench.peer import Bytes, Payload, Room, find_package, find_program
from blobstore.bench.server_process import ServerProcess, free_port, listens
from blobstore.errors import SetupError
from blobstore.units import MIB

_DISTRIBUTION = "mooncake-transfer-engine-non-cuda"
_LOOPBACK = "127.0.0.1"
_LOCAL_BUFFER_BYTES = 64 * MIB
# Without it every transfer opens a connection; here that costs a tenth.
_ENVIRON = {"MC_TCP_ENABLE_CONNECTION_POOL": "1"}


class MooncakeStore:
    """Mooncake's C++ client, with the caller's buffers registered."""

    name = "mooncake"

    def __init__(self) -> None:
        self._master: ServerProcess | None = None
        self._segment: ServerProcess | None = None
        self._store: Any = None
        self._registered: list[int] = []

    @property
    def how(self) -> str:
        """What is measured."""
        return (
            f"{_installed()}, mooncake_master, one process holding the segment, one client, TCP "
            "on loopback, pooled connections: batch_put_from and batch_get_into registered "
            "buffers; batch_is_exist"
        )

    def missing(self) -> str:
        """The package, or a library of the system that it needs."""
        if not find_package("mooncake"):
            return f"pip install {_DISTRIBUTION}"
        # In another process: once loaded, it keeps threads and descriptors.
        tried = subprocess.run(
            [sys.executable, "-c", "import mooncake.store"],
            capture_output=True,
            text=True,
            check=False,
        )
        if tried.returncode:
            said = tried.stderr.strip().rpartition("\n")[2]
            return f"apt-get install libibverbs1 (the package does not load: {said})"
        return "" if find_program("mooncake_master") else f"pip install {_DISTRIBUTION}"

    def start(self, room: Room) -> None:
        """Start master and segment, connect, and register all that is put from and got into."""
        self._master = ServerProcess("mooncake_master")
        port = free_port()
        flags = {
            "rpc_port": port,
            "rpc_address": _LOOPBACK,
            "metrics_port": free_port(),
            "metrics_host": _LOOPBACK,
        }
        command = [find_program("mooncake_master")]
        command += [word for flag, value in flags.items() for word in (f"-{flag}", str(value))]
        self._master.start(command, lambda: listens(port))
        self._segment = ServerProcess("the process that holds Mooncake's segment")
        ready = self._segment.home / "ready"
        # Beyond what is held: it begins to evict at nine tenths.
        nbytes = room.held_bytes * 5 // 4 + 64 * MIB
        command = [sys.executable, "-m", "blobstore.bench.peer_mooncake"]
        command += [f"{_LOOPBACK}:{port}", str(nbytes), str(ready)]
        self._segment.start(command, ready.exists)
        with _quiet(self._segment.home / "client"):
            self._store = _connect(f"{_LOOPBACK}:{port}", 0, _LOCAL_BUFFER_BYTES)
            for memory in room.memory:
                code = self._store.register_buffer(memory.ctypes.data, memory.nbytes)
                require(code == 0, f"Mooncake registered the buffers ({code})")
                self._registered.append(memory.ctypes.data)

    def put(self, keys: Sequence[bytes], sources: Sequence[Bytes]) -> None:
        """One call."""
        codes = self._store.batch_put_from(_names(keys), _pointers(sources), _sizes(sources))
        require(not any(codes), f"Mooncake stored every blob ({set(codes)})")

    def get(self, keys: Sequence[bytes], targets: Sequence[Bytes]) -> Sequence[Payload]:
        """One call."""
        sizes = _sizes(targets)
        got = self._store.batch_get_into(_names(keys), _pointers(targets), sizes)
        require(list(got) == sizes, f"Mooncake had every blob ({set(got)})")
        return targets

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """One call."""
        return [code == 1 for code in self._store.batch_is_exist(_names(keys))]

    def remove(self, keys: Sequence[bytes]) -> None:
        """One call; by force, as a get leaves a lease of some seconds."""
        codes = self._store.batch_remove(_names(keys), force=True)
        require(not any(codes), f"Mooncake removed every blob ({set(codes)})")

    def stop(self) -> None:
        """Disconnect, and end segment and master."""
        with ExitStack() as undo:
            for server in (self._master, self._segment):
                if server is not None:
                    undo.callback(server.stop)
            if self._store is not None and self._segment is not None:
                undo.enter_context(_quiet(self._segment.home / "client"))
                undo.callback(self._store.close)
                for pointer in self._registered:
                    self._store.unregister_buffer(pointer)
            self._store = self._segment = self._master = None
            self._registered = []


def _installed() -> str:
    """The distribution that it came with: there are several, by CUDA version."""
    name = packages_distributions()["mooncake"][0]
    return f"{name} {version(name)}"


def _names(keys: Sequence[bytes]) -> list[str]:
    return [key.hex() for key in keys]


def _pointers(buffers: Sequence[Bytes]) -> list[int]:
    return [buffer.ctypes.data for buffer in buffers]


def _sizes(buffers: Sequence[Bytes]) -> list[int]:
    return [buffer.nbytes for buffer in buffers]


def _module() -> Any:
    os.environ |= _ENVIRON
    return importlib.import_module("mooncake.store")


def _connect(master: str, segment_bytes: int, buffer_bytes: int) -> Any:
    store = _module().MooncakeDistributedStore()
    code = store.setup(_LOOPBACK, "P2PHANDSHAKE", segment_bytes, buffer_bytes, "tcp", "", master)
    if code:
        raise SetupError(f"Mooncake's client does not connect: its code is {code}")
    return store


@contextmanager
def _quiet(log: Path) -> Iterator[None]:
    """Its library logs to standard error, and cannot be told not to."""
    sys.stderr.flush()
    kept = os.dup(2)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _hold(master: str, segment_bytes: int, ready: Path) -> None:
    """Hold a segment until we are ended."""
    _store = _connect(master, segment_bytes, 0)
    ready.touch()
    while True:
        signal.pause()


if __name__ == "__main__":
    _hold(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))

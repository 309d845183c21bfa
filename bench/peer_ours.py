"""This store as a contestant of `bench peers`: a daemon, and our client on its local socket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version

from blobstore.bench.blobs import opaque, require
from blobstore.bench.own_daemon import OwnDaemon
from blobstore.bench.peer import Bytes, Payload, Room
from blobstore.bench.server_process import Watch
from blobstore.clients import Client
from blobstore.clients.bound import BoundNamespace
from blobstore.keys import Keys
from blobstore.units import MIB


class Ours:
    """A daemon without an SSD tier; blobs of each size have their own namespace."""

    name = "blobstore"

    def __init__(self) -> None:
        self._undo = ExitStack()
        self._namespaces: dict[int, BoundNamespace] = {}
        self._nbytes = 0
        """Of the blobs that were put last: a turn puts, gets and removes blobs of one size."""

    @property
    def how(self) -> str:
        """What is measured."""
        return (
            f"kv-blobstore {version('kv-blobstore')}, Client on the daemon's Unix socket and "
            "shared memory: put_from; get is get_into, one copy into the caller's buffers; "
            "lease is get, zero copy; exists of all keys in one call"
        )

    def missing(self) -> str:
        """Never anything."""
        return ""

    def start(self, room: Room) -> None:
        """A daemon with room for all, and the staging reserve of a sixteenth."""
        dram_bytes = room.held_bytes * 5 // 4 + 64 * MIB
        daemon = self._undo.enter_context(OwnDaemon(room.directory, dram_bytes=dram_bytes))
        self._undo.callback(Watch(daemon.pid).stop)
        self._kv: Client = self._undo.enter_context(daemon.client())

    def put(self, keys: Sequence[bytes], sources: Sequence[Bytes]) -> None:
        """One call: reserve, copy, digest, seal."""
        self._nbytes = sources[0].nbytes
        results = self._kv.put_from(self._namespace(), Keys.of(keys), sources)
        require(results == ["stored"] * len(keys), "every put stored new bytes")

    def get(self, keys: Sequence[bytes], targets: Sequence[Bytes]) -> Sequence[Payload]:
        """Copied into the caller's buffers."""
        held = self._kv.get_into(self._namespace(), Keys.of(keys), targets)
        require(held == len(keys), "all blobs were there")
        return targets

    @contextmanager
    def lease(self, keys: Sequence[bytes]) -> Iterator[Sequence[Payload]]:
        """In place."""
        with self._kv.get(self._namespace(), Keys.of(keys)) as lease:
            require(len(lease) == len(keys), "all blobs were there")
            yield lease

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """One call."""
        return self._kv.exists(self._namespace(), Keys.of(keys))

    def remove(self, keys: Sequence[bytes]) -> None:
        """One call."""
        self._kv.drop(self._namespace(), Keys.of(keys))

    def stop(self) -> None:
        """End the client and the daemon."""
        self._undo.close()

    def _namespace(self) -> BoundNamespace:
        nbytes = self._nbytes
        if nbytes not in self._namespaces:
            self._namespaces[nbytes] = self._kv.namespace(opaque(f"peers-{nbytes}", nbytes))
        return self._namespaces[nbytes]

"""A store in a simulation, on a disk that can fail and lose power."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from blobstore.namespace import Namespace
from blobstore.settings import StoreSettings
from blobstore.store import Store
from blobstore.tiering.disk import BLOCK_BYTES
from blobstore.tiering.placement import HEADER_BYTES
from blobstore.tiering.tier import Extent
from blobstore.units import KIB, MIB
from tests.support.sim_disk import PowerLost, SimDisk, Survival
from tests.support.simulation import Simulation
from tests.support.store_audit import audit, is_idle
from tests.support.store_client import StoreClient

T = TypeVar("T")


class SimStore:
    """A store whose threads, time, disk and power are the test's.

    LMDB's files are real, below `directory`. Close it, or leave it to `with`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        dram_bytes: int = MIB,
        staging_bytes: int = 256 * KIB,
        ssd_bytes: int = 8 * MIB,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        self.settings = StoreSettings(
            directory, dram_bytes, staging_bytes=staging_bytes, ssd_bytes=ssd_bytes, **settings
        )
        self.sim = Simulation(seed)
        self.disk = SimDisk()
        self.store = self.open()

    def __enter__(self) -> SimStore:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None:
            self.kill()
        else:
            self.finish_all()
            self.close()
        self.sim.close()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self.sim.loop

    def open(self) -> Store:
        """Open the store; it is `store` from then on."""
        opened = Store.open(
            self.settings,
            clock=self.sim.clock,
            wall_clock=self.sim.wall_clock,
            disk=self.disk,
            threads=self.sim.jobs.pool,
        )
        self.store = self.sim.run(opened)
        return self.store

    def close(self, drain_s: float = 10.0) -> None:
        """Stop in order."""
        self.sim.run(self.store.close(drain_s=drain_s))

    def reopen(self, drain_s: float = 10.0) -> None:
        """A clean restart: leases, reservations and clients are void."""
        self.close(drain_s)
        self.open()

    def kill(self) -> None:
        """The process dies here and now: nothing is flushed, nothing said."""
        self.sim.kill()
        if self.store._ssd is not None:
            with suppress(OSError, PowerLost):
                self.store._ssd.close()
        if self.store.texts._shelf is not None:
            self.store.texts._shelf.close()
        self.store.arena.close()

    def crash(self, survival: Survival = "dropped", seed: int = 0) -> None:
        """Power is lost and comes back; the store is opened again."""
        self.disk.cut_at = self.disk.steps
        self.kill()
        self.disk.restart(survival, seed)
        self.open()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Begin and finish `work`."""
        return self.sim.run(work)

    def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call what wants to run on the loop and does not wait for anything."""

        async def called() -> T:
            return function(*args, **kwargs)

        return self.sim.start(called()).result()

    def rest(self) -> None:
        """Let the store do all that it can without time passing."""
        self.sim.rest()

    def finish_all(self) -> None:
        """Until the store has nothing left in flight, however long that takes."""
        for _ in range(1000):
            self.sim.rest()
            if is_idle(self.store):
                return
            self.sim.advance(0.1)
        raise AssertionError("the store never comes to rest")

    def client(self, name: str = "client") -> StoreClient:
        return StoreClient(self.store, name)

    def declare(self, namespace: Namespace) -> Namespace:
        """Make `namespace` known to the store."""
        self.run(self.store.declare(namespace.encode()))
        return namespace

    def put_cold(
        self, client: StoreClient, ns: Namespace, keys: Sequence[bytes], payloads: Sequence[bytes]
    ) -> None:
        """Put a chain, and have it on SSD alone."""
        for index, key in enumerate(keys):
            terms = {"parent_key": keys[index - 1]} if index else {}
            answers = self.run(client.put(ns, [key], [payloads[index]], timeout_s=5.0, **terms))
            assert answers == [("stored", "")]
            self.finish_all()
        self.call(client.drop, ns, keys, "dram")
        for facts in client.stat(ns, keys):
            assert facts["tiers"] == ["ssd"]

    def reads(self) -> int:
        """How often segments were read since the disk was started."""
        return self.disk.history.count("preadv")

    def audit(self, *, quiet: bool | None = None) -> None:
        """Check the books: exactly if nothing is in flight."""
        audit(self.store, quiet=is_idle(self.store) if quiet is None else quiet)

    def rot(self, extent: Extent, at: int = 0) -> None:
        """Flip a byte of what is stored in `extent`."""
        path = self.settings.data_dir / "segments" / f"{extent.place:08d}.seg"
        assert at < extent.nbytes
        assert extent.offset >= HEADER_BYTES
        self.disk.rot(path, extent.offset + at)

    def ssd_extent(self, ns: Namespace, key: bytes) -> Extent:
        """Where the blob lies on SSD."""
        place = self.store.state(ns.id).blobs[key].ssd
        assert isinstance(place, Extent)
        return place


def blocks(nbytes: int) -> int:
    """`nbytes` in whole blocks of the disk and pages of the arena."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


def memory_directory() -> Path | None:
    """Where LMDB syncs for free, if the machine has such a place."""
    shm = Path("/dev/shm")
    return shm if os.access(shm, os.W_OK) else None

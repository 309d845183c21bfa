"""A store whose mover asks the test what to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from blobstore.index import Record
from blobstore.mover import Mover
from blobstore.settings import TieringSettings
from blobstore.tiering.admission import Admission, Verdict
from blobstore.tiering.budget import Budget
from blobstore.units import KIB, MIB
from tests.support.sim_store import SimStore
from tests.support.store_client import chain, content, opaque

NBYTES = 64 * KIB + 4096
"""Goes to a segment file; 26 fit beside the staging reserve."""

N_FIT = 26

WORTH = Verdict(True, "worth")
UNLIKELY = Verdict(False, "unlikely", "p 0.01 < 0.20")


class Scripted(Admission[Record]):
    """Says what it was told to say; `asked` are the last of each chain."""

    def __init__(self, say: Callable[[Record], Verdict]) -> None:
        super().__init__(1 << 40, Budget(None, 0))
        self.say = say
        self.asked: list[Record] = []

    def decide(
        self, chain: Sequence[Record], nbytes: int, free_bytes: int, now_s: float
    ) -> Verdict:
        self.asked.append(chain[-1])
        assert nbytes == sum(record.nbytes for record in chain)
        return self.say(chain[-1])


class AskedStore(SimStore):
    """A store whose mover asks the test, and to whose SSD nothing goes unasked."""

    def __init__(self, directory: Path, verdict: Verdict = WORTH, **tiering: Any) -> None:
        self.admission = Scripted(lambda record: verdict)
        super().__init__(
            directory,
            dram_bytes=2 * MIB,
            staging_bytes=256 * KIB,
            ssd_bytes=8 * MIB,
            lent_bytes_max=2 * MIB,
            tiering=TieringSettings("lru", **tiering),
        )
        self.ns = self.declare(opaque(NBYTES))
        self.c = self.client()

    def __enter__(self) -> AskedStore:
        return self

    def open(self) -> Any:
        store = super().open()
        assert store._writeback is not None
        store._writeback.mover._admission = self.admission
        return store

    @property
    def mover(self) -> Mover:
        assert self.store._writeback is not None
        return self.store._writeback.mover

    def put(self, name: str, n: int = 1, **terms: Any) -> list[tuple[str, str]]:
        """Put a chain, used a second after what was put before."""
        self.sim.clock.advance(1.0)
        terms = {"timeout_s": 5.0, **terms}
        return self.run(self.c.put(self.ns, chain(n, name), payloads(n, name), **terms))

    def fill(self, n: int, first: int = 0) -> None:
        for number in range(first, first + n):
            assert self.put(str(number)) == [("stored", "")]

    def tiers(self, name: str, n: int = 1) -> list[list[str]]:
        return [facts.get("tiers", []) for facts in self.c.stat(self.ns, chain(n, name))]

    def read(self, name: str, n: int = 1) -> bool:
        """Whether all of a chain is given; what is given is right."""
        found = self.run(self.c.read(self.ns, chain(n, name)))
        assert found == payloads(n, name)[: len(found)]
        return len(found) == n

    def settle(self) -> None:
        """Time passes until the mover has looked, and the disk is done."""
        self.rest()
        self.sim.advance(0.02)
        self.rest()

    def counter(self, name: str) -> Any:
        return self.store.stats()["counters"][name]

    def written(self) -> int:
        return int(self.counter("saved_blobs"))


def payloads(n: int, name: str) -> list[bytes]:
    return [content(_seed(name) + number, NBYTES) for number in range(n)]


def _seed(name: str) -> int:
    return int.from_bytes(name.encode()[:6], "little")


def hang(world: AskedStore) -> Callable[[], None]:
    """The disk does nothing from now on; call what is returned to let it go on."""
    pools = {"write", "sync", "commit"}
    waiting = world.sim.jobs._waiting
    held = {name: waiting[name] for name in pools}
    kept: dict[str, list[Callable[[], None]]] = {name: [] for name in pools}
    for name, jobs in held.items():
        kept[name], jobs[:] = list(jobs), []
    sim_step = world.sim.step

    def step() -> bool:
        for name, jobs in held.items():
            kept[name] += jobs
            jobs.clear()
        return sim_step()

    world.sim.step = step  # type: ignore[method-assign]

    def go_on() -> None:
        world.sim.step = sim_step  # type: ignore[method-assign]
        for name, jobs in held.items():
            jobs[:] = kept[name] + jobs
            kept[name] = []

    return go_on

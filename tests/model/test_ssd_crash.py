"""The SSD tier against a dict, with power lost at every step of a simulated disk."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

import lmdb
import pytest

from blobstore.errors import Full, SetupError, StorageFailed
from blobstore.tiering.placement import HEADER_BYTES, blocks_of
from blobstore.tiering.segments import SLACK_BYTES
from blobstore.tiering.ssd import INLINE_BYTES_MAX, SsdTier
from blobstore.tiering.tier import Extent
from blobstore.units import MIB
from tests.support.sim_disk import PowerLost, SimDisk, Survival
from tests.support.ssd_blobs import CANONICAL, NAMESPACE, Added, payload_of, write_blob

CAPACITY_BYTES = 8 * MIB
SIZES = (0, 100, INLINE_BYTES_MAX, INLINE_BYTES_MAX + 1, 70_000, 131_072, 300_001)
OPERATIONS = ("put", "put", "drop", "put", "swap", "abandon", "touch", "reopen", "drop", "swap")


@dataclass(frozen=True)
class Blob:
    payload: bytes
    parent: bytes


State = dict[bytes, Blob]


class World:
    """A tier on a simulated disk, and what it must hold.

    While a commit is under way, `coming` is what it would lead to: after a
    crash either state is right, and nothing between them.
    """

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory = directory
        self.disk = SimDisk()
        self.rng = random.Random(seed)
        self.state: State = {}
        self.coming: State | None = None
        self.tier: SsdTier | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Whatever happens, nothing stays open."""
        try:
            yield
        finally:
            if self.tier is not None:
                with suppress(PowerLost):
                    self.tier.close()
                self.tier = None

    def open(self) -> SsdTier:
        if self.tier is None:
            self.tier = SsdTier.open(
                self.directory, CAPACITY_BYTES, disk=self.disk, wall_clock=lambda: 1000.0
            )
        self.tier.declare(NAMESPACE, CANONICAL)
        return self.tier

    def run(self, operations: tuple[str, ...]) -> None:
        """Open, do all operations, close; ends early with PowerLost."""
        with self.running():
            self.open()
            for name in operations:
                step: Callable[[], None] = getattr(self, f"_{name}")
                step()
            self.tier_now().close()

    def fail_at(self, number: int, code: int) -> None:
        """Let one step fail."""

        def before_step(name: str, path: Path) -> None:
            # What has become durable cannot fail any more.
            if self.disk.steps - 1 == number and name != "after_commit":
                raise OSError(code, os.strerror(code))

        self.disk.before_step = before_step

    def open_in_spite_of_faults(self) -> None:
        try:
            self.open()
        except (SetupError, StorageFailed):
            self.open()

    def attempt(self, name: str) -> None:
        """Do one operation, which may fail with a typed error and then did not happen."""
        step: Callable[[], None] = getattr(self, f"_{name}")
        try:
            step()
        except (Full, StorageFailed, SetupError):
            self.coming = None
            self.open()

    def recover(self, survival: Survival, seed: int) -> None:
        """Power comes back: what is there must be one of the right states, and nothing more."""
        self.disk.restart(survival, seed)
        with self.running():
            self.check(self.open())

    def check(self, tier: SsdTier) -> None:
        found = {row.key: row for row in tier.rows()}
        right = [state for state in (self.state, self.coming) if state is not None]
        matching = [state for state in right if state.keys() == found.keys()]
        assert matching, (sorted(found), [sorted(state) for state in right])
        self.state, self.coming = matching[0], None
        for key, blob in self.state.items():
            assert found[key].parent == blob.parent
            assert payload_of(tier, found[key]) == blob.payload
        stats = tier.stats()
        extents = [row.extent for row in found.values() if row.extent is not None]
        assert stats["live_bytes"] == sum(blocks_of(extent.nbytes) for extent in extents)
        assert not any(stats["rows_dropped"].values())
        per_segment = HEADER_BYTES + SLACK_BYTES
        room = stats["live_bytes"] + stats["spare_bytes"] + stats["segments"] * per_segment
        assert self.disk.allocated_total() <= room
        assert tier.used_bytes <= tier.capacity_bytes

    def _put(self, remove: tuple[bytes, ...] = ()) -> None:
        tier = self.tier_now()
        staying = {key: blob for key, blob in self.state.items() if key not in remove}
        new: State = {}
        rows: list[Added] = []
        gone_extents = self._extents(remove)
        try:
            self._write_some(staying, new, rows)
            self.coming = staying | new
            tier.commit(rows, [(NAMESPACE, key) for key in remove])
        except (Full, StorageFailed):
            for row, _ in rows:
                if row.extent is not None:
                    tier.free(row.extent)
            raise
        self.state, self.coming = self.coming, None
        for extent in gone_extents:
            tier.free(extent)
        tier.trim()

    def _write_some(self, staying: State, new: State, rows: list[Added]) -> None:
        for _ in range(self.rng.randint(1, 3)):
            key = self.rng.randbytes(32)
            parent = self.rng.choice([b"", *staying, *new])
            payload = self.rng.randbytes(self.rng.choice(SIZES))
            try:
                rows.append(write_blob(self.tier_now(), key, payload, parent))
            except Full:
                continue
            extent = rows[-1][0].extent
            if extent is not None and self.rng.random() < 0.5:
                self.tier_now().sync(extent)
            new[key] = Blob(payload, parent)

    def _drop(self) -> None:
        gone = self._leaves()
        tier, extents = self.tier_now(), self._extents(gone)
        self.coming = {key: blob for key, blob in self.state.items() if key not in gone}
        tier.commit([], [(NAMESPACE, key) for key in gone])
        self.state, self.coming = self.coming, None
        for extent in extents:
            tier.free(extent)
        tier.trim()

    def _swap(self) -> None:
        self._put(remove=self._leaves())

    def _abandon(self) -> None:
        tier = self.tier_now()
        extent = tier.allocate(200_000)
        try:
            tier.write(extent, 0, memoryview(self.rng.randbytes(200_000)))
        finally:
            tier.free(extent)

    def _touch(self) -> None:
        used = [(NAMESPACE, key, self.rng.uniform(0, 900)) for key in self.state]
        self.tier_now().commit([], [], used)

    def _reopen(self) -> None:
        tier, self.tier = self.tier_now(), None
        tier.close()
        self.open()

    def tier_now(self) -> SsdTier:
        assert self.tier is not None
        return self.tier

    def _leaves(self) -> tuple[bytes, ...]:
        parents = {blob.parent for blob in self.state.values()}
        leaves = [key for key in self.state if key not in parents]
        return tuple(self.rng.sample(leaves, min(2, len(leaves))))

    def _extents(self, keys: tuple[bytes, ...]) -> list[Extent]:
        rows = {row.key: row.extent for row in self.tier_now().rows()}
        return [extent for key in keys if (extent := rows[key]) is not None]


def _n_steps(directory: Path, seed: int) -> int:
    world = World(directory, seed)
    world.run(OPERATIONS)
    return world.disk.steps


@pytest.fixture(autouse=True)
def _unsynced_lmdb(monkeypatch: pytest.MonkeyPatch) -> None:
    """LMDB is not simulated: it loses nothing here, and need not wait for a real disk."""
    monkeypatch.setattr(lmdb, "open", partial(lmdb.open, sync=False))


SEEDS = [1, 2, *(pytest.param(n, marks=pytest.mark.soak) for n in range(3, 40))]


@pytest.mark.parametrize("survival", get_args(Survival))
@pytest.mark.parametrize("seed", SEEDS)
def test_power_lost_at_any_step_leaves_whole_commits_only(
    tmp_path: Path, seed: int, survival: Survival
) -> None:
    for cut_at in range(_n_steps(tmp_path / "whole", seed)):
        world = World(tmp_path / str(cut_at), seed)
        world.disk.cut_at = cut_at
        with pytest.raises(PowerLost):
            world.run(OPERATIONS)
        world.recover(survival, cut_at)
        world.run(("put", "drop"))
        world.recover(survival, cut_at)


@pytest.mark.parametrize("survival", get_args(Survival))
def test_power_lost_during_recovery_costs_nothing(tmp_path: Path, survival: Survival) -> None:
    def crashed(directory: Path) -> World:
        world = World(directory, 3)
        world.disk.cut_at = _n_steps(tmp_path / "whole", 3) - 2  # spare room is there to punch
        with pytest.raises(PowerLost):
            world.run(OPERATIONS)
        world.disk.restart(survival, 0)
        return world

    world = crashed(tmp_path / "count")
    with world.running():
        world.check(world.open())
        n_steps = world.disk.steps
    for cut_at in range(n_steps):
        world = crashed(tmp_path / str(cut_at))
        world.disk.cut_at = cut_at
        with suppress(PowerLost), world.running():
            world.check(world.open())
        world.recover(survival, cut_at)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_fault_at_any_step_is_typed_and_leaves_nothing_half_done(
    tmp_path: Path, seed: int, code: int
) -> None:
    for fault_at in range(_n_steps(tmp_path / "whole", seed)):
        world = World(tmp_path / str(fault_at), seed)
        world.fail_at(fault_at, code)
        with world.running():
            world.open_in_spite_of_faults()
            for name in OPERATIONS:
                world.attempt(name)
            world.disk.before_step = lambda name, path: None
            world.tier_now().commit([])  # settles what a failed commit left in doubt
            world.check(world.tier_now())
        world.recover("dropped", fault_at)

"""Contexts that grow, branch, are replaced and read in any order, in a DRAM that is too small."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from blobstore.index import Record
from blobstore.namespace import Namespace
from blobstore.settings import TieringSettings
from blobstore.units import KIB
from tests.support.sim_store import SimStore
from tests.support.store_client import chain, content, opaque

NBYTES = 16 * KIB
N_FIT = 24
STEPS = 120


class World(SimStore):
    """What is replaced has no grace, so that everything in its turn is to be seen at once."""

    def __init__(self, directory: Path, seed: int, ssd_bytes: int) -> None:
        super().__init__(
            directory,
            dram_bytes=(N_FIT + 4) * NBYTES,
            staging_bytes=4 * NBYTES,
            ssd_bytes=ssd_bytes,
            seed=seed,
            tiering=TieringSettings("lru", supersede_grace_s=0.0),
        )
        self.rng = random.Random(seed)
        self.ns: Namespace = self.declare(opaque(NBYTES))
        self.c = self.client()
        self.n_put = 0

    def __enter__(self) -> World:
        return self

    @property
    def blobs(self) -> dict[bytes, Record]:
        return self.store.state(self.ns.id).blobs

    def grow(self) -> None:
        """Put a few blobs at the root, or on any blob that is held."""
        on = self.rng.choice([b"", *self.blobs])
        for _ in range(self.rng.randrange(1, 5)):
            (key,) = chain(1, str(self.n_put))
            self.n_put += 1
            self.sim.advance(1.0)
            answers = self.run(
                self.c.put(
                    self.ns, [key], [content(self.n_put, NBYTES)], parent_key=on, timeout_s=1.0
                )
            )
            if answers != [("stored", "")]:
                assert answers == [("refused", "orphan")]
                return
            on = key

    def replace(self) -> None:
        leaves = [key for key, record in self.blobs.items() if not record.has_children]
        if len(leaves) > 1:
            old, new = self.rng.sample(leaves, 2)
            self.run(self.store.contexts.supersede(self.store.state(self.ns.id), old, new))

    def read(self) -> None:
        """Use any context that is held."""
        if not self.blobs:
            return
        record = self.blobs[self.rng.choice(list(self.blobs))]
        keys = [record.key]
        while record.parent is not None:
            record = record.parent
            keys.insert(0, record.key)
        self.run(self.c.read(self.ns, keys))
        assert not self.store.superseded.standing(self.blobs.get(keys[0], record))

    def check(self, before: dict[bytes, Record], replaced: set[Record]) -> None:
        """Nothing that lives has gone while anything that was replaced could have."""
        marks = self.store.superseded
        for record in self.blobs.values():
            if marks.goes_first(record):
                assert all(marks.goes_first(child) for child in record.children())
        lost = [r for r in before.values() if r.gone and r not in replaced]
        if lost:
            assert not any(marks.goes_first(record) for record in self.blobs.values())
        assert len(marks) <= len(self.blobs)


@pytest.mark.parametrize("seed", range(12))
def test_what_was_replaced_goes_before_what_lives(seed: int) -> None:
    with World(Path("/nowhere"), seed, ssd_bytes=0) as world:
        for _ in range(STEPS):
            step = world.rng.choice((world.grow, world.grow, world.replace, world.read))
            before = dict(world.blobs)
            marks = world.store.superseded
            replaced = {r for r in before.values() if marks.goes_first(r)}
            step()
            world.check(before, replaced)
        why = world.store.stats()["counters"]["moved_blobs"]["dram>none"]
        assert min(why["superseded"], why["no_ssd"]) > 0  # there was something to be seen
        world.finish_all()
        world.audit(quiet=True)


@pytest.mark.parametrize("seed", range(6))
def test_the_books_are_right_with_both_tiers_and_over_restarts(tmp_path: Path, seed: int) -> None:
    with World(tmp_path, seed, ssd_bytes=4 << 20) as world:
        for n in range(STEPS):
            world.rng.choice((world.grow, world.grow, world.replace, world.read))()
            if n % 40 == 39:
                world.finish_all()
                before = world.store.superseded.stats()
                on_ssd = sum(r.has_row for r in world.store.superseded._due_s)
                world.reopen()
                world.c = world.client()
                assert world.store.superseded.stats()["blobs"] == on_ssd <= before["blobs"]
            world.audit()
        world.finish_all()
        world.audit(quiet=True)

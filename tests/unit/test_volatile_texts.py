"""Volatile blobs leave no trace on disk: no text, and so nothing that could be made again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from blobstore.keys import Keys
from blobstore.namespace import Namespace
from blobstore.settings import TieringSettings
from blobstore.text_shelf import DIRECTORY
from blobstore.units import KIB, MIB
from tests.support.blobs import TOKENS, opaque, payloads_of
from tests.support.sim_runner import sim_runner
from tests.support.sim_store import SimStore
from tests.support.store_client import StoreClient

NBYTES = 100 * KIB
N = 6
IDS = np.arange(1_000_000, 1_000_000 + TOKENS * N, dtype="<u4")


class World(SimStore):
    """A store that keeps the caller's texts as well."""

    def __init__(self, directory: Path) -> None:
        super().__init__(
            directory,
            dram_bytes=8 * MIB,
            ssd_bytes=16 * MIB,
            lent_bytes_max=8 * MIB,
            tiering=TieringSettings("lru"),
        )
        self.ns: Namespace = self.declare(opaque(NBYTES))
        self.keys: Keys = self.ns.keys(IDS)
        self.c: StoreClient = self.client()

    def __enter__(self) -> World:
        return self

    def put(self, retention: str, first: int = 0, end: int = N) -> set[str]:
        """Put a run of the context with its tokens; the results."""
        keys = list(self.keys[first:end])
        answers = self.run(
            self.c.put(
                self.ns, keys, payloads_of(keys, NBYTES),
                parent_key=self.keys[first - 1] if first else b"", retention=retention,
                tokens=IDS[first * TOKENS : end * TOKENS].tobytes(), text="said", timeout_s=5.0,
            )
        )  # fmt: skip
        self.finish_all()
        return {result for result, _ in answers}

    def known(self) -> int:
        """How many leading blobs have a text, on disk or on the way there."""
        return self.run(self.store.texts.known(self.store.state(self.ns.id), list(self.keys)))

    def texts(self) -> int:
        """How many are kept, once none is on its way."""
        self.sim.advance(2.0)
        self.finish_all()
        stats = self.store.texts.stats()
        assert stats["pending"] == 0
        return int(stats["entries"])

    def drop(self, first: int = 0) -> None:
        self.call(self.c.drop, self.ns, list(self.keys[first:]))
        self.finish_all()

    def read(self) -> tuple[int, str]:
        reading = self.run(self.c.get(self.ns, list(self.keys), timeout_s=60.0))
        assert reading.payloads() == payloads_of(self.keys, NBYTES)[: len(reading)]
        reading.release()
        return len(reading), reading.reason


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with World(tmp_path) as made:
        yield made
        made.finish_all()
        made.audit(quiet=True)


def test_they_have_no_text_and_no_runner_is_asked(world: World, tmp_path: Path) -> None:
    assert world.put("volatile") == {"stored"}
    assert (world.known(), world.texts()) == (0, 0)
    assert not (tmp_path / DIRECTORY).exists()
    world.drop()
    with sim_runner(world, world.ns) as runner:
        assert world.read() == (0, "absent")
        assert world.store.rebuilds.stats()["ended"] == {}
    assert not runner.jobs


def test_nor_when_they_had_to_leave_for_others(world: World) -> None:
    world.put("volatile")
    filler = world.declare(opaque(MIB, "filler"))
    for number in range(8):
        keys = list(filler.keys(np.arange(number, number + TOKENS)))
        world.run(world.c.put(filler, keys, payloads_of(keys, MIB), timeout_s=5.0))
        world.finish_all()
    with sim_runner(world, world.ns) as runner:
        assert world.read()[0] < N
    assert not runner.jobs
    assert world.store.texts.stats()["entries"] == 0


def test_what_continues_them_has_a_text_and_cannot_come_back_without_them(world: World) -> None:
    assert world.put("volatile", 0, 2) == {"stored"}
    assert world.put("standard", 2) == {"stored"}
    assert world.texts() == N - 2
    world.drop(2)
    with sim_runner(world, world.ns) as runner:
        assert world.read() == (N, "")
    assert [task.position for task in runner.jobs] == [2 * TOKENS]
    assert runner.jobs[0].context == b"", "the ids of what is volatile are told to nobody"
    world.drop()
    with sim_runner(world, world.ns) as runner:
        assert world.read() == (0, "absent")
    assert not runner.jobs


def test_tokens_told_later_are_not_kept_of_them_either(world: World) -> None:
    world.put("volatile", 0, 2)
    world.put("standard", 2)
    note = world.store.text_calls.note
    noted = world.run(note(world.ns.id, world.keys.packed, 32, IDS.tobytes(), "said"))
    assert noted == N - 2
    assert world.known() == 0


def test_one_that_is_put_again_to_stay_has_a_text_from_then_on(world: World) -> None:
    world.put("volatile")
    assert world.put("standard") == {"exists"}
    assert world.texts() == N
    world.drop()
    with sim_runner(world, world.ns):
        assert world.read() == (N, "")
    assert world.put("volatile") == {"exists"}, "a later put does not make it volatile"
    assert world.texts() == N

"""That a load which changes in turns moves blobs there and back as rarely as can be."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from blobstore.index import Record
from blobstore.settings import TieringSettings
from blobstore.tiering import learning
from blobstore.tiering.training import Training
from blobstore.units import KIB, MIB
from tests.support.asked_store import NBYTES, AskedStore, payloads
from tests.support.sim_store import SimStore
from tests.support.store_client import chain, opaque


def test_a_square_wave_moves_no_blob_twice_over_a_border_in_a_period(tmp_path: Path) -> None:
    """Two working sets in turns, each of them three quarters of DRAM."""
    periods, rounds, n = 4, 6, 18
    with AskedStore(tmp_path) as world:
        moved: Counter[tuple[bytes, str]] = Counter()
        written: Counter[bytes] = Counter()

        def note(record: Record, what: str, why: str = "") -> None:
            moved[record.key, what] += 1
            written[record.key] += what == "dram>ssd"

        world.store.stories.note = note  # type: ignore[method-assign]
        for period in range(periods):
            moved.clear()
            for phase in "ab":
                for _ in range(rounds):
                    for number in range(n):
                        world.sim.clock.advance(0.5)
                        name = f"{phase}{number}"
                        if not world.read(name):
                            assert period == 0
                            assert world.put(name) == [("stored", "")]
                        world.settle()
            assert max(moved.values()) <= 1, "at most once each way"
        assert max(written.values()) == 1, "what came from SSD is not written again"
        assert sum(written.values()) == 2 * n


@pytest.mark.parametrize("policy", ["lru", "ours"])
def test_a_square_wave_that_no_tier_can_hold_moves_no_blob_thrice(
    tmp_path: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two working sets in turns, each two thirds of DRAM, together more than the SSD."""
    # Fits come at the same times in each run.
    monkeypatch.setattr(learning, "Training", lambda inline: Training(inline=True))
    periods, rounds, n = 4, 6, 40
    crossed: Counter[tuple[bytes, str]] = Counter()
    borders: set[str] = set()

    def note(record: Record, what: str, why: str = "") -> None:
        if ">" in what:
            crossed[record.key, what] += 1

    with SimStore(
        tmp_path, dram_bytes=4 * MIB, staging_bytes=256 * KIB, ssd_bytes=5 * MIB,
        lent_bytes_max=4 * MIB, tiering=TieringSettings(policy),
    ) as world:  # fmt: skip
        ns, client = world.declare(opaque(NBYTES)), world.client()
        world.store.stories.note = note  # type: ignore[method-assign]
        for _ in range(periods):
            crossed.clear()
            for name in [
                f"{phase}{at}" for phase in "ab" for _ in range(rounds) for at in range(n)
            ]:
                world.sim.clock.advance(0.5)
                keys, blobs = chain(1, name), payloads(1, name)
                if world.run(client.read(ns, keys)) != blobs:
                    found = world.run(client.put(ns, keys, blobs, timeout_s=5.0))
                    assert found == [("stored", "")]
                world.rest()
                world.sim.advance(0.02)
                world.rest()
            assert max(crossed.values()) <= 2
            borders |= {what for _, what in crossed}
        assert borders >= {"dram>none", "dram>ssd", "ssd>dram"}

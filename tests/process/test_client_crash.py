"""Clients that are killed or stopped, or leave in another way: what they held and wrote."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blobstore.clients import AsyncClient, Client, Keys
from blobstore.protocol import Declare, Get, Holding, Leased, Reserve, Reserved, Seal
from blobstore.units import MIB
from tests.support.blobs import chain, count_right, opaque, payload_of, put
from tests.support.daemon import Daemon, daemon
from tests.support.forking import LATER, OF_CHILD, OF_PARENT, OPEN
from tests.support.nursery import CONTEXTS, LENGTH
from tests.support.polling import poll_until, wait_s
from tests.support.program import Program
from tests.support.puppet import Puppet
from tests.support.raw_client import HungUp, RawClient

SMALL = opaque(MIB)
AT_ONCE_S = 10.0
"""An order of magnitude beyond what it takes, and far below every time to live."""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Daemon]:
    with daemon(tmp_path) as run:
        yield run


@pytest.fixture
def kv(run: Daemon) -> Iterator[Client]:
    with Client(run.address, timeout_s=20.0) as kv:
        yield kv


def arena(kv: Client) -> dict[str, int]:
    tier: dict[str, int] = kv.stats()["tiers"]["dram"]
    return tier


def holds_nothing(kv: Client) -> bool:
    stats = kv.stats()
    return not any(
        stats[name]
        for name in ("leases", "reservations", "lent_bytes", "pinned_bytes", "waiting_for_room")
    )


def is_empty(kv: Client) -> bool:
    tier = arena(kv)
    return tier["free_bytes"] == tier["largest_free_bytes"] == tier["capacity_bytes"]


def drop_contexts(kv: Client) -> None:
    ns = kv.namespace(SMALL)
    for seed in CONTEXTS:
        kv.drop(ns, chain(SMALL, seed, 1))


def test_what_a_killed_client_held_comes_back_at_once(run: Daemon, kv: Client) -> None:
    rng = random.Random(5)
    descriptors = Path(f"/proc/{run.process.pid}/fd")
    kv.ping()
    n_descriptors = len(list(descriptors.iterdir()))
    with Program("tests.support.nursery", run.address) as nursery:
        assert nursery.hear() == "ready"
        for seed in range(40):
            pid = nursery.ask(seed)
            wait_s(rng.uniform(0.0, 0.12))
            os.kill(pid, signal.SIGKILL)
            poll_until(lambda: holds_nothing(kv), AT_ONCE_S, "all that the client held is back")
    counters = kv.stats()["counters"]
    assert counters["put_blobs"]["stored"] > 0
    assert counters["hit_blobs"]["dram"] > 0
    for context in CONTEXTS:
        count_right(kv, SMALL, chain(SMALL, context, LENGTH))
    drop_contexts(kv)
    poll_until(lambda: is_empty(kv), AT_ONCE_S, "the arena is free in one run")
    # A segment may have been opened meanwhile, but nothing was kept of any client.
    assert len(list(descriptors.iterdir())) <= n_descriptors + 1


def test_a_key_that_a_killed_client_was_writing_can_be_put_at_once(tmp_path: Path) -> None:
    large = opaque(64 * MIB)
    key = chain(large, 1, 1)
    with (
        daemon(tmp_path, "--dram", "160MiB", "--ssd", "off") as run,
        Client(run.address) as kv,
        Puppet(run.address) as puppet,
    ):
        assert puppet.do("reserve", 64 * MIB, 1, 1) == [""]
        puppet.do("fill", 0xEE)
        assert arena(kv)["free_bytes"] == 96 * MIB
        puppet.kill()
        assert put(kv, large, key) == ["stored"]
        assert count_right(kv, large, key) == 1
        poll_until(lambda: arena(kv)["free_bytes"] == 96 * MIB, AT_ONCE_S, "one copy is left")
        assert kv.drop(kv.namespace(large), key) == 1
        assert is_empty(kv)


@pytest.mark.parametrize("holding", ["lease", "reserve"])
def test_a_put_that_waits_gets_the_room_of_a_client_that_is_killed(
    tmp_path: Path, holding: str
) -> None:
    """Nobody else could make room: what the client holds is all that there is."""
    half = opaque(20 * MIB)
    with (
        daemon(tmp_path, "--dram", "64MiB", "--ssd", "off") as run,
        Client(run.address, timeout_s=20.0) as kv,
        Puppet(run.address) as puppet,
        ThreadPoolExecutor(1) as pool,
    ):
        if holding == "lease":
            assert [puppet.do("put", 20 * MIB, seed, 1) for seed in (1, 2)] == [["stored"]] * 2
            assert [puppet.do("lease", 20 * MIB, seed, 1) for seed in (1, 2)] == [1, 1]
        else:
            assert put(kv, half, chain(half, 1, 1)) == ["stored"]
            lease = kv.get(kv.namespace(half), chain(half, 1, 1))
            assert puppet.do("reserve", 20 * MIB, 2, 1) == [""]
        waiting = pool.submit(put, kv, half, chain(half, 3, 1))
        poll_until(lambda: kv.stats()["waiting_for_room"] == 1)
        puppet.kill()
        assert waiting.result(AT_ONCE_S) == ["stored"]
        if holding == "reserve":
            lease.release()


def test_a_stopped_clients_late_writes_never_reach_a_published_blob(tmp_path: Path) -> None:
    # What was put last is still there, by the order of LRU alone.
    environ = {"BLOBSTORE__TIMES__RESERVATION_S": "0.3", "BLOBSTORE__TIERING__POLICY": "lru"}
    with (
        daemon(tmp_path, environ=environ) as run,
        Client(run.address, timeout_s=20.0) as kv,
        Puppet(run.address) as puppet,
    ):
        assert puppet.do("reserve", 4 * MIB, 1, 4) == [""] * 4
        puppet.signal(signal.SIGSTOP)
        poll_until(lambda: kv.stats()["counters"]["expired_reservations"] == 1, AT_ONCE_S)
        assert kv.stats()["lent_bytes"] == 16 * MIB
        seeds = range(100, 100 + 320)  # five times the arena
        for seed in seeds:
            assert put(kv, SMALL, chain(SMALL, seed, 1)) == ["stored"]
        assert arena(kv)["free_bytes"] < MIB + 16 * MIB
        leases = [kv.get(kv.namespace(SMALL), chain(SMALL, seed, 1)) for seed in seeds[-20:]]
        puppet.signal(signal.SIGCONT)
        puppet.do("fill", 0xEE)
        assert puppet.do("seal") == {"results": ["refused"] * 4, "reasons": ["expired"] * 4}
        poll_until(lambda: kv.stats()["lent_bytes"] == 0, AT_ONCE_S)
        for seed, lease in zip(seeds[-20:], leases, strict=True):
            assert lease[0] == payload_of(chain(SMALL, seed, 1)[0], MIB)
            lease.release()
        assert kv.match(kv.namespace(opaque(4 * MIB)), chain(opaque(4 * MIB), 1, 4)).blobs == 0
        held = sum(count_right(kv, SMALL, chain(SMALL, seed, 1)) for seed in seeds)
        assert held > 100
        assert kv.verify()["corrupt"] == []


def test_what_is_written_after_the_seal_never_reaches_the_blob(run: Daemon, kv: Client) -> None:
    keys = chain(SMALL, 1, 2)
    ns = kv.namespace(SMALL)
    with kv.put(ns, keys) as writer:
        late = [np.frombuffer(writer[index], np.uint8) for index in range(2)]
        for array, key in zip(late, keys, strict=True):
            array[:] = np.frombuffer(payload_of(key, MIB), np.uint8)
    assert writer.results == ["stored"] * 2
    assert kv.stats()["lent_bytes"] == 2 * MIB
    for array in late:
        array[:] = 0xEE
    assert count_right(kv, SMALL, keys) == 2
    assert kv.verify()["corrupt"] == []
    del array
    late.clear()
    poll_until(lambda: kv.stats()["lent_bytes"] == 0, AT_ONCE_S)


def test_a_closed_connection_does_not_end_the_lease_of_a_living_process(
    run: Daemon, kv: Client
) -> None:
    keys = chain(SMALL, 1, 8)
    assert put(kv, SMALL, keys) == ["stored"] * 8
    with RawClient(run.socket) as raw:
        raw.ask(Declare(SMALL.encode()))
        leased = raw.ask(Get(SMALL.id, keys.packed, keys.key_bytes, 5.0))
        assert isinstance(leased, Leased)
        mapped = raw.arena()
    with mapped, Puppet(run.address) as puppet:
        results = puppet.do("flood", MIB, 100, 320)
        assert results == {"stored": 320}
        extents = np.frombuffer(leased.extents, "<u8").reshape(-1, 2).tolist()
        for key, (offset, nbytes) in zip(keys, extents, strict=True):
            assert mapped[offset : offset + nbytes] == payload_of(key, MIB)
        assert kv.stats()["leases"] == 1


async def cancel_and_close(address: str, keys: Keys) -> None:
    async with AsyncClient(address) as kv:
        ns = await kv.namespace(SMALL)
        task = asyncio.ensure_future(kv.get(ns, keys))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("kind", ["loop", "threads"])
def test_leases_whose_replies_nobody_read_end_when_their_client_closes(
    run: Daemon, kv: Client, kind: str
) -> None:
    keys = chain(SMALL, 1, 4)
    assert put(kv, SMALL, keys) == ["stored"] * 4
    for _ in range(50):
        if kind == "loop":
            asyncio.run(cancel_and_close(run.address, keys))
        else:
            with Client(run.address) as hasty:
                hasty.get(hasty.namespace(SMALL), keys, timeout_s=0.0)
    poll_until(lambda: holds_nothing(kv), AT_ONCE_S)


def test_what_was_sealed_before_a_goodbye_is_published(run: Daemon, kv: Client) -> None:
    (key,) = chain(SMALL, 1, 1)
    with RawClient(run.socket) as raw:
        raw.ask(Declare(SMALL.encode()))
        (lost, sealed) = (
            raw.ask(Reserve(SMALL.id, some, 32, b"", 0, "standard", 5.0))
            for some in (chain(SMALL, 2, 1)[0], key)
        )
        assert isinstance(lost, Reserved)
        assert isinstance(sealed, Reserved)
        goodbye = Holding([raw.welcome.connection_id], [], [], [])
        raw.send(raw.frame(Seal(sealed.reservation_id)) + raw.frame(goodbye))
        with suppress(HungUp):
            while True:
                raw.hear()
    poll_until(lambda: holds_nothing(kv), AT_ONCE_S)
    assert kv.exists(kv.namespace(SMALL), [key, chain(SMALL, 2, 1)[0]]) == [True, False]


LEAVING = {
    "return": (0, ""),
    "sys.exit": (0, ""),
    "_exit": (0, ""),
    "exception": (1, "RuntimeError: as the test asked\n"),
    "SIGKILL": (-9, ""),
}


def test_clients_that_leave_take_nothing_along(run: Daemon, kv: Client) -> None:
    assert put(kv, SMALL, chain(SMALL, 1, 4)) == ["stored"] * 4
    for number, (how, (code, last_words)) in enumerate(LEAVING.items()):
        with Puppet(run.address) as puppet:
            assert puppet.do("get", MIB, 1, 4) == 4
            assert puppet.do("lease", MIB, 1, 4) == 4
            assert puppet.do("put", MIB, 10 + number, 1) == ["stored"]
            assert puppet.do("reserve", MIB, 20 + number, 1) == [""]
            if how == "SIGKILL":
                puppet.signal(signal.SIGKILL)
            elif how != "return":
                puppet.tell(["leave", how])
            found, errors = puppet.end()
        assert found == code
        assert errors.endswith(last_words)
        assert errors.startswith("Traceback") == (how == "exception"), errors
        assert "resource_tracker" not in errors
        assert "Warning" not in errors
    poll_until(lambda: holds_nothing(kv), AT_ONCE_S)
    for number in range(len(LEAVING)):
        assert count_right(kv, SMALL, chain(SMALL, 10 + number, 1)) == 1
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 0


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon for all families."""
    with daemon(tmp_path_factory.mktemp("shared")) as run:
        yield run


def family(run: Daemon, method: str, how: str) -> dict[str, Any]:
    """What a parent and its child found; nothing of theirs is left then."""
    with Program("tests.support.forking", run.address, method, how) as program:
        found: dict[str, Any] = program.hear()
        assert program.end() == (0, "")
    with Client(run.address) as kv:
        poll_until(lambda: holds_nothing(kv), AT_ONCE_S)
        ns = kv.namespace(SMALL)
        for keys in (OF_PARENT, OF_CHILD, LATER, OPEN):
            kv.drop(ns, keys[:1])
    return found


@pytest.mark.parametrize(
    ("method", "how"),
    [
        ("os.fork", "return"),
        ("os.fork", "sys.exit"),
        ("os.fork", "os._exit"),
        ("fork", "return"),
        ("fork", "sys.exit"),
        ("spawn", "return"),
    ],
)
def test_a_child_works_and_leaves_its_parent_alone(shared: Daemon, method: str, how: str) -> None:
    foreign = "none" if method == "spawn" else "WrongProcess"
    assert family(shared, method, how) == {
        "child": {
            "reads": 3,
            "puts": ["stored"] * 3,
            "reads_own": 3,
            "lease": foreign,
            "writer": foreign,
        },
        "exit": 0,
        "parent": PARENT_UNHARMED | {"reads_the_childs": 3},
    }


PARENT_UNHARMED = {
    "view": True,
    "lease": True,
    "sealed": ["stored"] * 3,
    "reads": 3,
    "reads_the_childs": 0,
    "puts": ["stored"] * 3,
}


def test_a_child_that_touches_its_parents_view_faults_and_harms_nobody(shared: Daemon) -> None:
    """A fault, since the bytes may be another blob's by the time that the child looks."""
    found = family(shared, "os.fork", "touch")
    assert found == {"child": {}, "exit": -signal.SIGSEGV, "parent": PARENT_UNHARMED}

"""The whole store against a dict: any order of calls, threads, time, faults and crashes.

Runs in a simulation (tests/support/simulation.py), so that an example is told by
its steps and seed alone. After every step the books must balance
(tests/support/store_audit.py), every readable byte must be one that was sealed
under its key, and every lease must show what it showed when it was given.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from blobstore import residency, sealing
from blobstore.digest import payload_digest, piece_digests
from blobstore.index import Record
from blobstore.settings import POLICIES, TieringSettings
from blobstore.tiering.admission import Admission, Verdict
from blobstore.tiering.tier import Extent
from blobstore.units import KIB, MIB
from tests.support import store_model as drawn
from tests.support.sim_disk import Survival
from tests.support.sim_store import SimStore, memory_directory
from tests.support.store_audit import is_idle
from tests.support.store_client import Loan, Reading, StoreClient, digest_of
from tests.support.store_model import (
    NAMESPACES,
    NUMBERS,
    RANKS,
    Call,
    EveryJob,
    Held,
    Model,
    Path_,
    Put,
    chain_of,
    key_of,
    nbytes_of,
    payload_of,
)


class MoodyAdmission(Admission[Record]):
    """Lets blobs onto SSD or not as the mood takes it."""

    def __init__(self, sober: Admission[Record], rng: random.Random) -> None:
        self._sober = sober
        self._rng = rng

    def decide(
        self, chain: Sequence[Record], nbytes: int, free_bytes: int, now_s: float
    ) -> Verdict:
        verdict = self._sober.decide(chain, nbytes, free_bytes, now_s)
        refused = Verdict(False, self._rng.choice(["unlikely", "budget"]))
        return self._rng.choice([verdict, refused, Verdict(True, "worth")])

    def wrote(self, nbytes: int, now_s: float) -> None:
        self._sober.wrote(nbytes, now_s)

    def unwrote(self, nbytes: int) -> None:
        self._sober.unwrote(nbytes)


class StoreMachine(RuleBasedStateMachine):
    """Rules are what clients, threads, time, disks and people do to a store."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(dir=memory_directory()))
        self.model = Model()
        self.puts: list[Put] = []
        self.kept: list[tuple[int, Loan]] = []
        """Client and extent that it may still write to after a seal or abort."""
        self.leases: list[Held] = []
        self.calls: list[Call] = []
        self.n_clients = 0

    @initialize(
        seed=st.integers(0, 2**32 - 1),
        ssd_bytes=st.sampled_from([4 * MIB] * 7 + [0]),
        policy=st.sampled_from(POLICIES),
        rate=st.sampled_from([0, 0, 0, 200 * KIB]),
        moody=st.booleans(),
    )
    def start(self, seed: int, ssd_bytes: int, policy: str, rate: int, moody: bool) -> None:
        tiering = TieringSettings(policy, demote_rate=rate, promote_rate=rate)
        self.world = SimStore(
            self.directory, lent_bytes_max=MIB, ssd_bytes=ssd_bytes, seed=seed, tiering=tiering
        )
        self.moody = moody
        self.greet()

    def greet(self) -> None:
        """What clients do when the store was started."""
        if self.moody and self.world.store._writeback is not None:
            mover = self.world.store._writeback.mover
            mover._admission = MoodyAdmission(mover._admission, self.world.sim.rng)
        for namespace in NAMESPACES:
            self.world.declare(namespace)
        self.world.store.writers._jobs = EveryJob()
        self.clients = [self._new_client() for _ in range(2)]

    def _check_matches(self) -> None:
        """Galloping finds what asking for every key finds."""
        for ns, namespace in enumerate(NAMESPACES):
            for last in (0, 1):
                keys = chain_of(ns, (0,) * (drawn.DEPTH_MAX - 1) + (last,))
                exists = self.clients[0].exists(namespace, keys)
                leading = next((n for n, held in enumerate(exists) if not held), len(keys))
                assert self.clients[0].match(namespace, keys) == leading

    def _new_client(self) -> StoreClient:
        self.n_clients += 1
        return self.world.client(f"client {self.n_clients}")

    # Putting

    @rule(
        ns=drawn.spaces,
        path=drawn.paths,
        start=drawn.starts,
        variant=drawn.variants,
        retention=drawn.retentions,
        client=drawn.clients,
        timeout_s=st.sampled_from([0.0, 0.0, 3.0]),
    )
    def put(
        self,
        ns: int,
        path: Path_,
        start: int,
        variant: int,
        retention: str,
        client: int,
        timeout_s: float,
    ) -> None:
        """Reserve, write and seal, as far as that needs no thread."""
        put = self._reserve(ns, path, start, variant, retention, client, timeout_s, None)
        self._seal(put, alive=())

    @rule(ns=drawn.spaces, path=drawn.paths, retention=drawn.retentions)
    def put_and_save(self, ns: int, path: Path_, retention: str) -> None:
        """A quiet moment: a chain is put blob by blob, and threads keep up."""
        for end in range(len(path)):
            put = self._reserve(ns, path[: end + 1], end, 0, retention, 0, 0.0, None)
            self._seal(put, alive=())
            self.world.rest()

    @rule(
        ns=drawn.spaces,
        path=drawn.paths,
        start=drawn.starts,
        variant=drawn.variants,
        retention=drawn.retentions,
        client=drawn.clients,
    )
    def reserve(
        self, ns: int, path: Path_, start: int, variant: int, retention: str, client: int
    ) -> None:
        self._reserve(ns, path, start, variant, retention, client, 0.0, None)

    @rule(path=drawn.paths, rank=st.integers(0, 1), epoch=st.integers(0, 2), client=drawn.clients)
    def reserve_as_rank(self, path: Path_, rank: int, epoch: int, client: int) -> None:
        self._reserve(drawn.PARTS, path, 0, 10 + epoch, "standard", client, 0.0, rank)

    @rule(
        ns=drawn.spaces,
        path=drawn.paths,
        start=drawn.starts,
        variant=drawn.variants,
        client=drawn.clients,
        alive=st.sampled_from([(), (), (0,)]),
    )
    def rebuild(
        self, ns: int, path: Path_, start: int, variant: int, client: int, alive: tuple[int, ...]
    ) -> None:
        """A runner makes blobs again, some with other bytes than those of before."""
        put = self._reserve(ns, path, start, variant, "standard", client, 0.0, None, job=1)
        self.model.rebuild(put)
        self._seal(put, alive)

    @precondition(lambda self: self.puts)
    @rule(choice=drawn.choices, index=st.integers(0, 5))
    def seal_parts(self, choice: int, index: int) -> None:
        put = self.puts[choice % len(self.puts)]
        if put.ns != drawn.PARTS or index >= len(put.keys) or put.writing.reservation.expired:
            return
        put.write()
        self.world.call(put.writing.seal_parts, index, put.parts)

    @precondition(lambda self: self.puts)
    @rule(
        choice=drawn.choices,
        alive=st.sets(st.integers(0, 5), max_size=2),
        unwritten=st.sampled_from([(), (), (), (0,), (1, 2)]),
    )
    def seal(self, choice: int, alive: set[int], unwritten: tuple[int, ...]) -> None:
        self._seal(self.puts[choice % len(self.puts)], sorted(alive), unwritten)

    @precondition(lambda self: self.puts)
    @rule(choice=drawn.choices, alive=st.sets(st.integers(0, 5), max_size=2))
    def abort(self, choice: int, alive: set[int]) -> None:
        put = self.puts.pop(choice % len(self.puts))
        self.world.call(put.writing.abort, sorted(alive))
        self._keep(put, alive)

    @precondition(lambda self: self.kept)
    @rule(choice=drawn.choices)
    def last_view_dies(self, choice: int) -> None:
        client, loan = self.kept.pop(choice % len(self.kept))
        assert self.world.call(self.clients[client].acknowledge, [loan]) == 1

    @rule()
    def scribble(self) -> None:
        """Writers write where they may, at a time when nobody should look there."""
        if not self.calls:  # a seal under way publishes what it finds
            for client, loan in self.kept:
                self.clients[client].scribble(loan, b"\xbb" * loan.nbytes)
        for put in self.puts:
            if put.writing.reservation.expired:
                for loan in filter(None, put.writing.loans):
                    put.writing.client.scribble(loan, b"\xaa" * loan.nbytes)

    # Reading

    @rule(
        ns=drawn.spaces,
        path=drawn.paths,
        client=drawn.clients,
        timeout_s=st.sampled_from([0.0, 2.0]),
        stream=st.booleans(),
        follow=st.booleans(),
    )
    def get(
        self, ns: int, path: Path_, client: int, timeout_s: float, stream: bool, follow: bool
    ) -> None:
        keys = chain_of(ns, path)
        asked = self.clients[client].get(
            NAMESPACES[ns], keys, timeout_s=timeout_s, stream=stream, wait_for_writers=follow
        )

        def done() -> None:
            reading = task.result()
            assert isinstance(reading, Reading)
            assert len(reading) <= len(keys)
            assert bool(reading.reason) == (len(reading) < len(keys))
            assert bool(reading.lease_id) == bool(len(reading))
            if not len(reading):
                return
            payloads = None if stream else reading.payloads()
            for key, payload in zip(keys, payloads or (), strict=False):
                self.model.check_digest((ns, key), digest_of(payload))
            self.leases.append(Held(reading, ns, keys[: len(reading)], payloads))

        task = self.world.sim.start(asked)
        self.calls.append(Call(task, done))

    @precondition(lambda self: self.leases)
    @rule(choice=drawn.choices, index=st.integers(0, 5), share=st.sampled_from([0.25, 1.0]))
    def wait(self, choice: int, index: int, share: float) -> None:
        held = self.leases[choice % len(self.leases)]
        index %= len(held.keys)
        nbytes = held.reading.extents[index][1]
        end = int(nbytes * share)
        name = (held.ns, held.keys[index])

        def check() -> None:
            if task.result() == "":
                allowed = self.model.written.get(name, {0}) | self.model.sealed.get(name, set())
                shown = held.reading[index][:end]
                wanted = {payload_of(name[1], variant, nbytes)[:end] for variant in allowed}
                assert shown in wanted, "a part that was ready is none that anybody wrote"

        task = self.world.sim.start(held.reading.wait(index, 0, end, 1.0))
        if task.done():  # later its bytes may be a writer's again
            check()
        else:
            self.calls.append(Call(task, lambda: None))

    @precondition(lambda self: self.leases)
    @rule(choice=drawn.choices)
    def release(self, choice: int) -> None:
        held = self.leases.pop(choice % len(self.leases))
        assert self.world.call(held.reading.release) == 1
        assert self.world.call(held.reading.release) == 0

    @rule(ns=drawn.spaces, path=drawn.paths)
    def prefetch(self, ns: int, path: Path_) -> None:
        self.world.call(self.clients[0].prefetch, NAMESPACES[ns], chain_of(ns, path))

    # Keeping and dropping

    @rule(ns=drawn.spaces, path=drawn.paths, ttl_s=st.sampled_from([0.0, 1.0, 5.0]))
    def pin(self, ns: int, path: Path_, ttl_s: float) -> None:
        self.world.call(self.clients[0].pin, NAMESPACES[ns], chain_of(ns, path)[-1:], ttl_s)

    @rule(ns=drawn.spaces, path=drawn.paths, tier=st.sampled_from(["", "dram", "dram"]))
    def drop(self, ns: int, path: Path_, tier: str) -> None:
        keys = chain_of(ns, path)
        if not tier:
            self.model.forget_below(ns, keys[-1])
            keys = keys[-1:]
        self.world.call(self.clients[0].drop, NAMESPACES[ns], keys, tier)
        if not tier:
            assert self.world.call(self.clients[0].exists, NAMESPACES[ns], keys) == [False]

    # Time, threads, processes

    @rule(n=st.integers(1, 8))
    def threads_work(self, n: int) -> None:
        for _ in range(n):
            self.world.sim.step()

    @rule()
    def threads_catch_up(self) -> None:
        self.world.rest()

    @rule(seconds=st.sampled_from([0.1, 1.0, 30.0, 61.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.sim.advance(seconds)

    @rule(
        event=st.sampled_from(["exit", "exit", "hang up", "clock", "verify"]),
        client=drawn.clients,
        jump_s=st.sampled_from([-3e7, 0.0, 3e7]),
    )
    def something_rare_happens(self, event: str, client: int, jump_s: float) -> None:
        if event == "exit":
            self._client_exits(client)
        elif event == "hang up":
            self._connection_ends(client)
        elif event == "clock":
            self.world.sim.wall_jump_s = jump_s
        else:
            assert self.world.sim.run(self.world.store.verify(60.0))["complete"]

    def _client_exits(self, client: int) -> None:
        leaving = self.clients[client]
        self.world.call(leaving.exit)
        self.puts = [put for put in self.puts if put.writing.client is not leaving]
        self.kept = [(number, loan) for number, loan in self.kept if number != client]
        self.leases = [held for held in self.leases if held.reading.client is not leaving]
        self._finish_calls()  # the door undoes what comes too late
        for held in [held for held in self.leases if held.reading.client is leaving]:
            self.world.call(held.reading.release)
            self.leases.remove(held)
        self.clients[client] = self._new_client()

    def _connection_ends(self, client: int) -> None:
        leaving = self.clients[client]
        leaving.holder.connections += 1
        self.world.call(self.world.store.detach, leaving.holder, list(leaving.holder.reservations))

    # Disks and power

    @rule(
        step=st.sampled_from(["pwritev", "preadv", "sync", "before_commit", "punch", "create"]),
        code=st.sampled_from([errno.EIO, errno.ENOSPC]),
        times=st.integers(1, 3),
    )
    def disk_fails(self, step: str, code: int, times: int) -> None:
        left = times

        def before_step(name: str, path: Path) -> None:
            nonlocal left
            if name == step and left:
                left -= 1
                raise OSError(code, os.strerror(code))

        self.world.disk.before_step = before_step

    @rule(choice=drawn.choices, at=st.integers(0, drawn.SEGMENT_BYTES - 1))
    def bits_rot(self, choice: int, at: int) -> None:
        """A byte of what is stored flips, of a blob that only the disk has."""
        found = [
            record
            for record in self.world.store.index.records()
            if isinstance(record.ssd, Extent) and record.dram is None
        ]
        if not found:
            return
        record = sorted(found, key=lambda record: record.key)[choice % len(found)]
        assert isinstance(record.ssd, Extent)
        self.world.rot(record.ssd, at % record.nbytes)
        self.model.rot((self._number(record), record.key))

    @rule(drain_s=st.sampled_from([0.0, 10.0]))
    def restart(self, drain_s: float) -> None:
        self._finish_calls()
        self.world.close(drain_s)
        self._begin_anew()

    @rule(
        after=st.integers(0, 25),
        survival=st.sampled_from(["dropped", "kept", "torn"]),
        seed=st.integers(0, 1000),
    )
    def power_fails(self, after: int, survival: Survival, seed: int) -> None:
        disk = self.world.disk
        disk.cut_at = disk.steps + after
        self.world.rest()
        self._settle_calls()
        disk.cut_at = disk.steps
        self.world.kill()
        disk.restart(survival, seed)
        self._begin_anew()

    # What holds after every step

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "world"):
            return
        self._settle_calls()
        self.world.audit(quiet=not self.calls and is_idle(self.world.store))
        for held in self.leases:
            if held.payloads is not None:
                assert held.reading.payloads() == held.payloads, "bytes changed under a lease"
        view = self.world.store.arena.view
        for record in self.world.store.index.records():
            name = (self._number(record), record.key)
            self.model.check_digest(name, record.digest)
            if record.packed:
                assert record.dram is not None
                shown = view[record.dram.offset : record.dram.offset + record.nbytes]
                made = payload_digest(record.nbytes, piece_digests(shown))
                assert made == record.digest, f"{name} shows bytes that were not sealed"
        self._check_matches()
        for ns, key in self.model.durable:
            found = self.world.store.index.namespaces[NAMESPACES[ns].id].blobs.get(key)
            kept = found is not None and found.held
            assert kept, f"{(ns, key.hex()[:8])} was acknowledged as durable"

    def teardown(self) -> None:
        try:
            if hasattr(self, "world"):
                if sys.exc_info()[0] is None:
                    self._wind_up()
                self.world.kill()
                self.world.sim.close()
        finally:
            shutil.rmtree(self.directory)

    def _wind_up(self) -> None:
        """All that clients hold comes back, and with it all room."""
        self._finish_calls()
        for held in self.leases:
            self.world.call(held.reading.release)
        for put in self.puts:
            self.world.call(put.writing.abort)
        for client, loan in self.kept:
            self.world.call(self.clients[client].acknowledge, [loan])
        self.world.sim.advance(200.0)
        self.world.finish_all()
        self.world.audit(quiet=True)
        assert self.world.store.residency.pinned_bytes == 0
        assert all(client.holder.lent_bytes == 0 for client in self.clients)

    def _begin_anew(self) -> None:
        """The daemon starts again: clients know nothing any more, durable blobs are there."""
        self.model.crash()
        self.puts, self.kept, self.leases, self.calls = [], [], [], []
        self.world.disk.before_step = lambda name, path: None
        self.world.open()
        self.world.audit(quiet=True)
        self.greet()
        for (ns, key), variant in self.model.durable.items():
            nbytes = nbytes_of(ns)
            found = self.world.run(self.clients[0].read(NAMESPACES[ns], [key]))
            assert found == [payload_of(key, variant, nbytes)]

    def _reserve(
        self,
        ns: int,
        path: Path_,
        start: int,
        variant: int,
        retention: str,
        client: int,
        timeout_s: float,
        rank: int | None,
        job: int = 0,
    ) -> Put:
        start %= len(path)
        keys = chain_of(ns, path, start)
        if not nbytes_of(ns):
            variant = 0  # there is only one way to be empty
        writing = self.world.run(
            self.clients[client].reserve(
                NAMESPACES[ns],
                keys,
                parent_key=key_of(ns, path[:start]) if start else b"",
                retention=retention,
                timeout_s=timeout_s,
                group=("engine", variant) if rank is not None else None,
                parts=RANKS[rank] if rank is not None else (),
                job=job,
            )
        )
        parts = RANKS[rank] if rank is not None else (0, 1, 2, 3)
        put = Put(writing, ns, keys, variant, parts, retention, client)
        self.puts.append(put)
        for key in keys:
            self.model.written.setdefault((ns, key), set()).add(variant)
        for loan in filter(None, writing.loans):
            if rank is None:
                self.clients[client].scribble(loan, b"\x55" * loan.nbytes)
        return put

    def _seal(self, put: Put, alive: Sequence[int], unwritten: Sequence[int] = ()) -> None:
        self.puts.remove(put)
        if not put.writing.reservation.expired:
            put.write(but=unwritten)
        names = [(put.ns, key) for key in put.keys]
        drops = [self.model.drops[name] for name in names]
        self.model.inflight.update((*name, put.variant) for name in names)

        def done() -> None:
            answers = task.result()
            assert isinstance(answers, list)
            self.model.inflight.subtract((*name, put.variant) for name in names)
            for name, before, answer in zip(names, drops, answers, strict=True):
                self.model.take_in(put, name, answer, dropped=self.model.drops[name] > before)

        digests = [digest_of(payload) for payload in put.payloads()]
        task = self.world.sim.start(put.writing.seal(digests, alive, unwritten))
        self._keep(put, alive)
        self.calls.append(Call(task, done))

    def _keep(self, put: Put, alive: Iterable[int]) -> None:
        for index in alive:
            loan = put.writing.loans[index] if index < len(put.writing.loans) else None
            if loan is not None and loan.nbytes:
                self.kept.append((put.client, loan))

    def _settle_calls(self) -> None:
        ended = [call for call in self.calls if call.task.done()]
        self.calls = [call for call in self.calls if not call.task.done()]
        for call in ended:
            call.done()

    def _finish_calls(self) -> None:
        for call in self.calls:
            self.world.sim.finish(call.task)
        self._settle_calls()

    def _number(self, record: Record) -> int:
        return NUMBERS[record.ns.id]


def _run(max_examples: int, steps: int, *, derandomize: bool) -> None:
    with (
        # So small are the blobs here that none would ever be left to a thread.
        mock.patch.object(residency, "WIPE_INLINE_BYTES", 16 * KIB),
        mock.patch.object(sealing, "INLINE_DIGEST_BYTES", 200 * KIB),
    ):
        run_state_machine_as_test(
            StoreMachine,
            settings=settings(
                max_examples=max_examples,
                stateful_step_count=steps,
                derandomize=derandomize,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                database=None,
            ),
        )


def test_any_order_of_events_keeps_the_books_and_the_bytes() -> None:
    _run(200, 40, derandomize=True)


@pytest.mark.soak
def test_many_orders_of_events_keep_the_books_and_the_bytes() -> None:
    _run(5_000, 80, derandomize=False)

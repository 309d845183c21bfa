"""Both halves over a real store, with an engine's tensors: bytes come back where they belong."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from blobstore.clients import Client
from blobstore.clients.vllm.daemon import Daemon
from blobstore.clients.vllm.faults import Faults
from blobstore.clients.vllm.identity import identify
from blobstore.clients.vllm.loads import Ended
from blobstore.clients.vllm.lookups import Lookups
from blobstore.clients.vllm.metadata import Outcomes, StepPlan
from blobstore.clients.vllm.options import Options
from blobstore.clients.vllm.recorder import LOADED, SAVED, Recorder, merge
from blobstore.clients.vllm.scheduler_side import SchedulerSide
from blobstore.clients.vllm.worker_side import IDLE_S, WorkerSide
from tests.support.polling import poll_until
from tests.support.served_store import ServedStore, served_store
from tests.support.vllm_engine import (
    FullAttentionSpec,
    SlidingWindowSpec,
    agreed,
    caches,
    engine,
    installed,
    random_bytes,
    tensors,
    torch,
)
from tests.support.vllm_fakes import FakeOutput, FakeRequest

BLOB, BLOCK = 32, 16
HASHES = 4
"""Block hashes of the fake requests per block of the tensors."""


class Request(FakeRequest):
    """With a hash for each block of the tensors."""

    @property
    def block_hashes(self) -> list[bytes]:
        return super().block_hashes[HASHES - 1 :: HASHES]


class Rank:
    """One worker, its tensors, and the scheduler's half if it leads."""

    def __init__(
        self, address: str, specs: Sequence[Any], rank: int, ranks: int, **said: Any
    ) -> None:
        config = caches(*specs, layers=3, num_blocks=16)
        options = Options(
            tokens_per_blob=BLOB, weights_digest="given", lookup_timeout_s=30.0, **said
        )
        self.identity = identify(
            engine("model", rank=rank, ranks=ranks, heads=HEADS), config, options
        )
        self.tensors = tensors(config)
        for at, tensor in enumerate(self.tensors.values()):
            data = tensor.view(torch.uint8)
            data.copy_(random_bytes(tuple(data.shape), 100 * rank + at))
        self.daemon = Daemon(address, lambda: Client(address))
        self.recorder = Recorder()
        faults = Faults()
        self.worker = WorkerSide(self.identity, self.daemon, options, self.recorder, faults)
        self.worker.register(config, self.tensors)
        agreed(self.identity, config, ranks)
        self.lookups = Lookups(self.identity, self.daemon, options, faults)
        self.scheduler = SchedulerSide(self.identity, self.lookups, options, self.recorder, faults)

    def blocks(self, ids: Sequence[int]) -> list[Any]:
        return [tensor[list(ids)].clone() for tensor in self.tensors.values()]

    def begin(self, plan: StepPlan) -> None:
        """The step begins, and its memory is there when its forward has run."""
        self.worker.begin(plan)
        for saving in self.worker._saves._step:
            assert saving._ready.wait(10.0)

    def close(self) -> None:
        self.worker.close(5.0)
        self.lookups.close(5.0)
        self.daemon.close()


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedStore]:
    with served_store(tmp_path / "b.sock") as found:
        yield found


HEADS = 4


def full(ranks: int = 1) -> Any:
    return FullAttentionSpec(num_kv_heads=HEADS // ranks)


class Engine:
    """Ranks in step, whose first one schedules."""

    def __init__(
        self, address: str, *, specs: Sequence[Any] = (), ranks: int = 1, **said: Any
    ) -> None:
        self.ranks = [
            Rank(address, specs or (full(ranks),), rank, ranks, **said) for rank in range(ranks)
        ]
        self.lead = self.ranks[0]
        self.ended: list[tuple[set[str], set[str]]] = []

    def matched(self, request: FakeRequest) -> int:
        """What is promised once there is an answer."""

        def answer() -> int | None:
            found = self.lead.scheduler.matched(request, 0)
            return None if found is None else found + 1  # so that 0 is an answer

        return (poll_until(answer) or 1) - 1

    def step(self, request: FakeRequest, tokens: int, table: tuple[list[int], ...]) -> StepPlan:
        plan = self.lead.scheduler.plan(
            FakeOutput({request.request_id: tokens} if tokens else {}, {request.request_id: table})
        )
        for rank in self.ranks:
            rank.begin(plan)
            rank.worker.finish()
        return plan

    def load(
        self, request: FakeRequest, table: tuple[list[int], ...], tokens: int
    ) -> list[set[str]]:
        """Load what was promised; which requests failed, by rank."""
        self.lead.scheduler.allocated(request, table, tokens)
        self.step(request, 0, table)
        failed = []
        for rank in self.ranks:
            found: list[tuple[set[str], set[str]]] = []

            def ended(rank: Rank = rank, found: list[Any] = found) -> bool:
                found.append(rank.worker.take_finished())
                return bool(found[-1][0])

            poll_until(ended)
            assert found[-1][0] == {request.request_id}
            failed.append(found[-1][1])
        return failed

    def heard(self) -> None:
        """The ranks' outcomes reach the scheduler."""
        told = Outcomes()
        for rank in self.ranks:
            told.merge(rank.worker.take_outcomes() or Outcomes())
        self.lead.scheduler.heard(told)

    def saved(self, blobs: int) -> None:
        """Wait until so many blobs are there."""
        request = Request("wait", list(range(200)))
        lead = self.lead
        ns, keys = lead.identity.bound(), lead.identity.keys(request.block_hashes)
        client = lead.daemon.reach()
        assert client is not None
        poll_until(lambda: client.match(ns, keys).blobs == blobs)

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def started(closing: ExitStack, served: ServedStore, **said: Any) -> Engine:
    made = Engine(served.address, **said)
    closing.callback(made.close)
    for rank in made.ranks:
        assert rank.daemon.reach() is not None
    return made


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("layerwise", [False, True])
def test_what_one_engine_computed_another_loads(
    closing: ExitStack, served: ServedStore, ranks: int, layerwise: bool
) -> None:
    writer = started(closing, served, ranks=ranks, layerwise=layerwise)
    asked = Request("r", list(range(70)))
    assert writer.matched(asked) == 0
    plan = writer.lead.scheduler.plan(FakeOutput({"r": 70}, {"r": ([3, 9, 4, 1, 7],)}))
    for rank in writer.ranks:
        rank.begin(plan)
        for name in rank.tensors if layerwise else ():
            rank.worker.layer(name)
        rank.worker.finish()
    writer.saved(2)
    assert [rank.worker.take_outcomes() for rank in writer.ranks] == [None] * ranks

    reader = started(closing, served, ranks=ranks)
    again = Request("r", list(range(70)))
    assert reader.matched(again) == 64
    assert reader.load(again, ([2, 5, 8, 6],), 64) == [set()] * ranks
    for there, here in zip(writer.ranks, reader.ranks, strict=True):
        for ours, theirs in zip(here.blocks([2, 5, 8, 6]), there.blocks([3, 9, 4, 1]), strict=True):
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    total: Any = {}
    for rank in (*writer.ranks, *reader.ranks):
        rank.worker.close(5.0)  # what a thread counts last is counted then
        merge(total, rank.recorder.take() or {})
    assert (total[SAVED], total[LOADED]) == ({"": 64}, {"": 64})


def test_blocks_that_a_window_has_left_are_not_written(
    closing: ExitStack, served: ServedStore
) -> None:
    specs = (full(), SlidingWindowSpec(num_kv_heads=HEADS, sliding_window=BLOCK))
    writer = started(closing, served, specs=specs)
    asked = Request("r", list(range(70)))
    writer.matched(asked)
    writer.step(asked, 70, ([3, 9, 4, 1, 7], [6, 2, 5, 8, 7]))
    writer.saved(2)
    reader = started(closing, served, specs=specs)
    null_before = reader.lead.blocks([0])
    again = Request("r", list(range(70)))
    assert reader.matched(again) == 64
    assert reader.load(again, ([2, 5, 8, 6], [0, 0, 0, 9]), 64) == [set()]
    for before, after in zip(null_before, reader.lead.blocks([0]), strict=True):
        assert torch.equal(before.view(torch.uint8), after.view(torch.uint8))
    sliding = slice(3, 6)
    for ours, theirs in zip(
        reader.lead.blocks([9])[sliding], writer.lead.blocks([8])[sliding], strict=True
    ):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def test_a_failed_load_is_told_once_and_less_is_promised(
    closing: ExitStack, served: ServedStore
) -> None:
    writer = started(closing, served, ranks=2)
    asked = Request("r", list(range(130)))
    writer.matched(asked)
    writer.step(asked, 130, ([3, 9, 4, 1, 7, 2, 5, 6],))
    writer.saved(4)
    reader = started(closing, served, ranks=2)
    again = Request("r", list(range(130)))
    assert reader.matched(again) == 128
    client = reader.lead.daemon.reach()
    assert client is not None
    keys = reader.lead.identity.keys(again.block_hashes)
    assert client.drop(reader.lead.identity.bound(), keys[2:]) == 2
    table = ([2, 5, 8, 6, 1, 3, 4, 7],)
    assert reader.load(again, table, 128) == [{"r"}, {"r"}]
    reader.heard()
    assert reader.matched(again) == 64
    assert reader.load(again, table, 64) == [set(), set()]
    assert reader.step(again, 1, table).saves == []


def test_engines_of_other_salts_do_not_meet(closing: ExitStack, served: ServedStore) -> None:
    writer = started(closing, served)
    asked = Request("r", list(range(70)))
    writer.matched(asked)
    writer.step(asked, 70, ([3, 9, 4, 1, 7],))
    writer.saved(2)
    assert started(closing, served, salt="another").matched(Request("r", list(range(70)))) == 0


def test_layers_that_are_not_stored_are_no_matter(closing: ExitStack, served: ServedStore) -> None:
    writer = started(closing, served)
    writer.lead.worker.layer("model.layers.99.mlp")
    assert writer.lead.worker.take_finished() == (set(), set())


class OutOfMemoryError(RuntimeError):
    """What a forward may raise."""


def failed(worker: WorkerSide, error: type[BaseException], *layers: str) -> None:
    """A forward raises after some layers, and vLLM ends the step while that is under way."""
    try:
        for name in layers:
            worker.layer(name)
        raise error
    finally:
        worker.finish()
        worker.take_finished()


def planned(writer: Engine, name: str = "r") -> StepPlan:
    """A step in which a request's two blobs become whole."""
    asked = Request(name, list(range(70)))
    assert writer.matched(asked) == 0
    plan = writer.lead.scheduler.plan(FakeOutput({name: 70}, {name: ([3, 9, 4, 1, 7],)}))
    assert len(plan.saves) == 1
    return plan


def stored(served: ServedStore) -> int:
    with Client(served.address) as client:
        return int(client.stats()["tiers"]["dram"]["blobs"])


@pytest.mark.parametrize("error", [OutOfMemoryError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("layerwise", [False, True])
def test_what_a_failed_forward_left_is_never_stored(
    closing: ExitStack, served: ServedStore, layerwise: bool, error: type[BaseException]
) -> None:
    writer = started(closing, served, layerwise=layerwise)
    plan, worker = planned(writer), writer.lead.worker
    writer.lead.begin(plan)
    with pytest.raises(error):
        failed(worker, error, *list(writer.lead.tensors)[: 2 * layerwise])
    worker.close(5.0)
    assert stored(served) == 0


def test_after_a_failed_forward_nothing_is_saved(
    closing: ExitStack, served: ServedStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Its blocks are in vLLM's prefix cache, whose hits others would go on from."""
    writer = started(closing, served)
    plan, worker = planned(writer), writer.lead.worker
    writer.lead.begin(plan)
    with pytest.raises(OutOfMemoryError):
        failed(worker, OutOfMemoryError)
    for _ in range(2):
        writer.lead.begin(plan)
        worker.finish()
    assert worker.take_outcomes() == Outcomes({}, {"r": 0})
    worker.close(5.0)
    assert stored(served) == 0
    assert caplog.text.count("nothing is saved any more until the engine is restarted") == 1


def test_a_step_that_was_never_finished_is_a_failed_forward(
    closing: ExitStack, served: ServedStore
) -> None:
    writer = started(closing, served)
    plan, worker = planned(writer), writer.lead.worker
    writer.lead.begin(plan)
    writer.lead.begin(plan)
    worker.finish()
    worker.close(5.0)
    assert stored(served) == 0


def test_steps_that_compute_nothing_may_end_anyhow(closing: ExitStack, served: ServedStore) -> None:
    writer = started(closing, served)
    plan, worker = planned(writer), writer.lead.worker
    worker.begin(StepPlan(idle=True))
    worker.begin(StepPlan(idle=True))
    with pytest.raises(KeyboardInterrupt):
        failed(worker, KeyboardInterrupt)
    writer.lead.begin(plan)
    worker.finish()
    writer.saved(2)


def test_an_exception_that_the_engine_runs_under_is_no_matter(
    closing: ExitStack, served: ServedStore
) -> None:
    """Its user may run it while handling something."""
    writer = started(closing, served)
    plan = planned(writer)
    try:
        raise ValueError("something")
    except ValueError:
        writer.lead.begin(plan)
        writer.lead.worker.finish()
    writer.saved(2)


def test_what_ends_while_a_forward_raises_is_told_in_the_next_step(
    closing: ExitStack, served: ServedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM asks then, too, and drops what it is told."""
    worker = started(closing, served).lead.worker
    ended = [[Ended("r", 1, whole=False)]]
    monkeypatch.setattr(worker._loads, "take", lambda *args, **kwargs: ended.pop())
    worker.begin(StepPlan())
    try:
        raise OutOfMemoryError
    except OutOfMemoryError:
        worker.finish()
        assert worker.take_finished() == (set(), set())
        assert worker.take_outcomes() is None
    worker.begin(StepPlan())
    worker.finish()
    assert worker.take_finished() == ({"r"}, {"r"})
    outcomes = worker.take_outcomes()
    assert outcomes is not None
    assert outcomes.loaded == {"r": 1}


@pytest.mark.parametrize(
    ("plan", "waited"),
    [
        (StepPlan(), (0.0, False)),
        (StepPlan(waiting=True), (0.0, True)),
        (StepPlan(idle=True), (IDLE_S, False)),
        (StepPlan(idle=True, waiting=True), (IDLE_S, True)),
        (StepPlan(idle=True, waiting=True, at_once=True), (0.0, True)),
    ],
)
def test_an_idle_step_waits_also_while_requests_wait_for_an_answer(
    closing: ExitStack, served: ServedStore, monkeypatch: pytest.MonkeyPatch,
    plan: StepPlan, waited: tuple[float, bool],
) -> None:  # fmt: skip
    worker, asked = started(closing, served).lead.worker, list[tuple[float, bool]]()

    def take(wait_s: float, *, anyway: bool) -> list[Any]:
        asked.append((wait_s, anyway))
        return []

    monkeypatch.setattr(worker._loads, "take", take)
    worker.begin(plan)
    worker.finish()
    assert worker.take_finished() == (set(), set())
    assert asked == [waited]


def test_copies_are_not_bound_to_the_cores_that_compute(served: ServedStore) -> None:
    """vLLM binds a worker on CPUs to some cores before it makes the connector."""
    cores, found = os.sched_getaffinity(0), list[set[int]]()

    def worker() -> None:
        os.sched_setaffinity(0, {min(cores)})  # this thread alone
        with ExitStack() as stack:
            rank = Rank(served.address, (full(),), 0, 1)
            stack.callback(rank.close)
            loads, saves = rank.worker._loads, rank.worker._saves
            for lane in (loads._lane, saves._reserving, saves._sealing):
                ids = [thread.native_id for thread in lane._threads]
                found.extend(os.sched_getaffinity(number) for number in ids if number)

    thread = threading.Thread(target=worker)
    thread.start()
    thread.join(30.0)
    assert found
    assert all(each >= os.sched_getaffinity(os.getppid()) for each in found)

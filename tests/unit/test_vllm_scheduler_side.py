"""The scheduler's half: what is promised, what is loaded where, what is saved and when."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from blobstore.clients.hit import Hit
from blobstore.clients.vllm.faults import Faults
from blobstore.clients.vllm.geometry import Group
from blobstore.clients.vllm.lookups import IDLE_PATIENCE_S, PATIENCE_S, Lookups
from blobstore.clients.vllm.metadata import Outcomes, StepPlan
from blobstore.clients.vllm.options import Options
from blobstore.clients.vllm.recorder import FOUND, MISSED, Recorder
from blobstore.clients.vllm.scheduler_side import FAILED_SAVES_MAX, RETRY_S, SchedulerSide
from tests.support.polling import poll_until
from tests.support.vllm_fakes import (
    BLOB_TOKENS,
    FakeClient,
    FakeDaemon,
    FakeIdentity,
    FakeOutput,
    FakeRequest,
)

TABLE = list(range(1, 100))
"""Block ids of a request, in order."""


class Bench:
    """A scheduler's half whose store holds as many leading blobs as the test says."""

    def __init__(self, identity: FakeIdentity | None = None, **roles: bool) -> None:
        self.identity = identity or FakeIdentity()
        self.client = FakeClient(Hit(0, 0))
        self.daemon = FakeDaemon(self.client)
        self.recorder = Recorder()
        daemon: Any = self.daemon
        self.now_s = 0.0
        options, faults = Options(), Faults()
        self.lookups = Lookups(self.identity, daemon, options, faults, clock=lambda: self.now_s)
        self.side = SchedulerSide(
            self.identity,
            self.lookups,
            options,
            self.recorder,
            faults,
            clock=lambda: self.now_s,
            **roles,
        )

    def holds(self, blobs: int, warm: int | None = None) -> None:
        self.client.hit = Hit(blobs, blobs * BLOB_TOKENS, warm=blobs if warm is None else warm)

    def matched(self, request: FakeRequest, local: int = 0) -> int | None:
        """What is promised once the store has answered."""
        self.side.matched(request, local)
        state = self.side._requests[request.request_id]
        if state.lookup is not None:
            poll_until(state.lookup.done.is_set)
        return self.side.matched(request, local)

    def load(self, request: FakeRequest, tokens: int) -> None:
        """So many tokens are promised, and there are blocks for them."""
        assert self.matched(request) == tokens
        self.side.allocated(request, (TABLE,), tokens)

    def step(
        self, request: FakeRequest, tokens: int, table: tuple[list[int], ...] = (TABLE,)
    ) -> StepPlan:
        """One step that computes `tokens` of the request."""
        output = FakeOutput({request.request_id: tokens}, {request.request_id: table})
        plan = self.side.plan(output)
        request.num_computed_tokens += tokens
        return plan


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.lookups.close(5.0)


def request(n: int = 36, **fields: Any) -> FakeRequest:
    return FakeRequest("r", list(range(n)), **fields)


def test_whole_blobs_beyond_the_local_hit_are_promised(bench: Bench) -> None:
    bench.holds(4)
    assert bench.matched(request(), local=0) == 32
    assert bench.matched(request(), local=8) == 24
    assert bench.matched(request(), local=32) == 0


def test_a_local_hit_inside_a_blob_leaves_the_rest_of_it_to_be_loaded(bench: Bench) -> None:
    bench.holds(4)
    asked = request()
    assert bench.matched(asked, local=12) == 20
    bench.side.allocated(asked, (TABLE,), 20)
    (load,) = bench.step(asked, 0).loads
    assert load.skip == 4
    assert load.blocks == [TABLE[2:8]]
    assert load.keys == b"".join(bench.identity.keys(asked.block_hashes)[1:4])


def test_the_last_token_is_never_promised(bench: Bench) -> None:
    bench.holds(4)
    assert bench.matched(request(32)) == 24


def test_nothing_is_promised_before_there_is_an_answer(bench: Bench) -> None:
    bench.holds(4)
    bench.client.answers.clear()
    asked = request()
    assert bench.side.matched(asked, 0) is None
    assert bench.side.matched(asked, 0) is None
    bench.client.answers.set()
    assert bench.matched(asked) == 32


def test_who_has_all_in_the_engine_need_not_wait(bench: Bench) -> None:
    bench.client.answers.clear()
    assert bench.side.matched(request(), 32) == 0
    bench.client.answers.set()


def test_asking_twice_changes_nothing(bench: Bench) -> None:
    bench.holds(2)
    asked = request()
    assert [bench.matched(asked) for _ in range(3)] == [16, 16, 16]
    data = bench.recorder.take()
    assert data is not None
    assert MISSED not in data


def test_a_miss_is_counted_once_with_its_reason(bench: Bench) -> None:
    asked = request()
    for _ in range(3):
        assert bench.matched(asked) == 0
    data = bench.recorder.take()
    assert data is not None
    assert data[MISSED] == {"absent": 1}


def test_requests_that_read_no_cache_are_promised_nothing(bench: Bench) -> None:
    bench.holds(4)
    assert bench.matched(request(skip_reading_prefix_cache=True)) == 0


@pytest.mark.parametrize(("params", "roles"), [({"no_load": True}, {}), ({}, {"reads": False})])
def test_who_does_not_read_is_promised_nothing(
    params: dict[str, Any], roles: dict[str, bool]
) -> None:
    bench = Bench(None, **roles)
    bench.holds(4)
    assert bench.matched(request(kv_transfer_params=params)) == 0
    bench.lookups.close(5.0)


def test_the_tiers_of_a_hit_are_told(bench: Bench) -> None:
    bench.holds(4, warm=2)
    bench.client.hit = Hit(4, 32, warm=2, eta_s=0.0)
    asked = request()
    bench.matched(asked, local=8)
    bench.now_s += 0.006  # as long as a load from SSD is given at least
    assert bench.matched(asked, local=8) == 24
    assert bench.side.tiers(asked, 24) == (8, 16)
    bench.side.allocated(asked, (TABLE,), 24)
    (load,) = bench.step(asked, 0).loads
    assert load.stream
    data = bench.recorder.take()
    assert data is not None
    assert data[FOUND] == {"dram": 8, "ssd": 16}


def test_what_came_up_from_ssd_for_a_request_counts_as_from_there(bench: Bench) -> None:
    bench.client.hit = Hit(4, 32, warm=2, eta_s=0.5)
    asked = request()
    assert bench.matched(asked, local=8) is None
    bench.holds(4)
    bench.now_s += 0.006
    assert bench.matched(asked, local=8) == 24
    assert bench.side.tiers(asked, 24) == (8, 16)
    bench.side.allocated(asked, (TABLE,), 24)
    (load,) = bench.step(asked, 0).loads
    assert not load.stream


def test_workers_hear_that_requests_wait_for_the_store(bench: Bench) -> None:
    bench.client.hit = Hit(4, 32, warm=2, eta_s=0.5)
    asked = request()
    assert bench.matched(asked) is None
    assert bench.side.plan(FakeOutput({}, {})) == StepPlan(idle=True, waiting=True)
    assert bench.side.plan(FakeOutput({}, {})) == StepPlan(idle=True)


def test_workers_in_step_with_others_hear_that_they_must_not_wait() -> None:
    bench = Bench(None, in_step=True)
    assert bench.side.plan(FakeOutput({}, {})) == StepPlan(idle=True, at_once=True)
    bench.lookups.close(5.0)


def test_what_the_engine_has_of_its_own_is_waited_for_by_nobody(bench: Bench) -> None:
    bench.client.answers.clear()
    assert bench.side.matched(request(), 32) == 0
    bench.client.answers.set()


def test_a_request_is_saved_as_its_blobs_become_whole(bench: Bench) -> None:
    asked = request(21)
    bench.matched(asked)
    assert bench.step(asked, 7).saves == []
    (save,) = bench.step(asked, 10).saves
    keys = bench.identity.keys(asked.block_hashes)
    assert (save.first, save.parent, save.keys) == (0, b"", keys[0:2].packed)
    assert save.blocks == [TABLE[0:4]]
    assert bench.step(asked, 4).saves == []
    asked.token_ids += [7] * 3
    assert bench.step(asked, 1).saves == []
    assert bench.step(asked, 1).saves == []
    (save,) = bench.step(asked, 1).saves
    keys = bench.identity.keys(asked.block_hashes)
    assert (save.first, save.parent, save.keys) == (2, keys[1], keys[2:3].packed)
    assert save.blocks == [TABLE[4:6]]


def test_what_the_store_holds_is_not_saved_again(bench: Bench) -> None:
    bench.holds(2)
    asked = request()
    bench.load(asked, 16)
    asked.num_computed_tokens = 16
    (save,) = bench.step(asked, 20).saves
    assert save.first == 2


def test_tokens_that_are_not_told_yet_are_not_saved(bench: Bench) -> None:
    """Async scheduling and drafts: the engine computes ahead of what it tells."""
    asked = request(9)
    bench.matched(asked)
    (save,) = bench.step(asked, 20).saves
    assert (len(save.keys), save.blocks) == (32, [TABLE[:2]])
    asked.token_ids += [7] * 10
    (save,) = bench.step(asked, 1).saves
    assert (save.first, save.blocks) == (1, [TABLE[2:4]])


def test_nothing_is_saved_while_the_store_has_not_said_what_it_holds(bench: Bench) -> None:
    bench.client.answers.clear()
    asked = request()
    bench.side.matched(asked, 32)
    assert bench.step(asked, 20).saves == []
    bench.holds(1)
    bench.client.answers.set()
    bench.matched(asked, 32)
    (save,) = bench.step(asked, 4).saves
    assert save.first == 1


@pytest.mark.parametrize(("params", "roles"), [({"no_store": True}, {}), ({}, {"writes": False})])
def test_who_does_not_write_saves_nothing(params: dict[str, Any], roles: dict[str, bool]) -> None:
    bench = Bench(None, **roles)
    asked = request(kv_transfer_params=params)
    bench.matched(asked)
    assert bench.step(asked, 36).saves == []
    bench.lookups.close(5.0)


def test_nothing_is_saved_while_the_daemon_is_away(bench: Bench) -> None:
    asked = request()
    bench.matched(asked)
    bench.daemon.usable = False
    assert bench.step(asked, 20).saves == []
    bench.daemon.usable = True
    (save,) = bench.step(asked, 4).saves
    assert (save.first, len(save.keys)) == (0, 3 * 32)


def test_what_slid_out_of_a_window_ends_the_saving() -> None:
    bench = Bench(FakeIdentity(groups=(Group(0, 4, 0), Group(1, 8, 8))))
    asked = request(40)
    bench.matched(asked)
    (save,) = bench.step(asked, 16, (TABLE, [41, 42])).saves
    assert save.blocks == [TABLE[:4], [41, 42]]
    assert bench.step(asked, 8, (TABLE, [0, 0, 0])).saves == []
    assert bench.step(asked, 8, (TABLE, [0, 0, 43, 44])).saves == []
    bench.lookups.close(5.0)


def test_a_step_saves_a_bounded_part_of_what_earlier_ones_computed() -> None:
    bench = Bench(FakeIdentity(blob_bytes=40 << 20))
    asked = request(100, num_computed_tokens=80)
    bench.matched(asked, 80)
    (save,) = bench.step(asked, 8).saves
    assert len(save.keys) == 2 * 32  # one that this step makes whole, and one of the others
    (save,) = bench.step(asked, 1).saves
    assert (save.first, len(save.keys)) == (2, 32)
    bench.lookups.close(5.0)


def test_a_resumed_request_has_other_blocks(bench: Bench) -> None:
    asked = request()
    bench.matched(asked)
    bench.step(asked, 8)
    asked.num_computed_tokens = 0
    other = [block + 100 for block in TABLE]
    (save,) = bench.step(asked, 24, (other,)).saves
    assert save.first == 1
    assert save.blocks == [other[2:6]]


def test_a_preemption_is_told_once(bench: Bench) -> None:
    asked = request()
    bench.matched(asked)
    asked.num_preemptions = 1
    for _ in range(3):
        bench.matched(asked)
    bench.side.finished(asked, "stop")
    poll_until(lambda: bench.client.hints[-1].get("finish") == "stop")
    told = [hint.get("finish") for hint in bench.client.hints]
    assert told.count("preempted") == 1


def test_after_a_failed_load_less_is_promised_each_time(bench: Bench) -> None:
    bench.holds(4)
    asked = request(44)
    bench.load(asked, 32)
    bench.side.heard(Outcomes(loaded={"r": 3}))
    bench.load(asked, 24)
    bench.side.heard(Outcomes(loaded={"r": 0}))
    assert bench.matched(asked) == 0
    (save,) = bench.step(asked, 44).saves
    assert save.first == 4  # the store says again that it holds so many


def test_of_ranks_that_tell_in_different_steps_the_least_counts(bench: Bench) -> None:
    bench.holds(4)
    asked = request(44)
    bench.load(asked, 32)
    bench.side.heard(Outcomes(loaded={"r": 1}))
    bench.side.heard(Outcomes(loaded={"r": 3}))
    assert bench.matched(asked) == 8


def test_saves_that_come_further_each_time_are_never_given_up(bench: Bench) -> None:
    asked = request(200)
    bench.matched(asked)
    for first in range(1, 2 * FAILED_SAVES_MAX):
        (save,) = bench.step(asked, 16).saves
        assert save.first == first - 1
        bench.side.heard(Outcomes(unsaved={"r": first}))
        bench.now_s += RETRY_S


def test_saves_go_on_from_the_first_blob_that_any_rank_lacks(bench: Bench) -> None:
    asked = request(44)
    bench.matched(asked)
    assert len(bench.step(asked, 40).saves) == 1
    for first in (1, 3):
        bench.side.heard(Outcomes(unsaved={"r": first}))
    bench.now_s += 4 * RETRY_S
    (save,) = bench.step(asked, 4).saves
    assert save.first == 1


def test_a_hit_counts_once_though_its_load_is_tried_again(bench: Bench) -> None:
    bench.holds(4)
    asked = request(44)
    bench.load(asked, 32)
    bench.side.heard(Outcomes(loaded={"r": 3}))
    bench.load(asked, 24)
    data = bench.recorder.take()
    assert data is not None
    assert data[FOUND] == {"dram": 32}


@pytest.mark.parametrize(("tokens", "patience_s"), [(0, IDLE_PATIENCE_S), (4, PATIENCE_S)])
def test_who_computes_nothing_waits_longer_for_answers(
    bench: Bench, tokens: int, patience_s: float
) -> None:
    bench.side.plan(FakeOutput({"r": tokens} if tokens else {}, {}))
    assert bench.lookups._patience_s == patience_s


def test_after_a_failed_load_the_store_is_asked_again(bench: Bench) -> None:
    bench.holds(4)
    asked = request(44)
    bench.load(asked, 32)
    bench.holds(1)
    bench.side.heard(Outcomes(loaded={"r": 3}))
    assert bench.matched(asked) == 8


def test_blobs_that_could_not_be_saved_are_tried_again_a_few_times(bench: Bench) -> None:
    asked = request(100)
    bench.matched(asked)
    firsts = []
    for failures in range(FAILED_SAVES_MAX + 2):
        firsts += [save.first for save in bench.step(asked, 8).saves]
        bench.side.heard(Outcomes(unsaved={"r": 0}))
        assert bench.step(asked, 1).saves == []
        bench.now_s += RETRY_S * 2**failures
    assert firsts == [0] * FAILED_SAVES_MAX


def test_other_blocks_than_promised_are_not_loaded_into(bench: Bench) -> None:
    bench.holds(4)
    asked = request()
    bench.matched(asked)
    bench.side.allocated(asked, (TABLE,), 16)
    (load,) = bench.step(asked, 0).loads
    assert load.keys == b""


def test_a_load_is_planned_once(bench: Bench) -> None:
    bench.holds(4)
    asked = request()
    bench.matched(asked)
    bench.side.allocated(asked, (TABLE,), 32)
    bench.side.allocated(asked, (TABLE,), 0)
    assert len(bench.step(asked, 0).loads) == 1
    assert bench.step(asked, 0).loads == []


def test_a_finished_request_is_forgotten_and_its_end_told(bench: Bench) -> None:
    asked = request(kv_transfer_params={"session": "s"})
    bench.matched(asked)
    bench.side.finished(asked, "stop")
    bench.side.heard(Outcomes(loaded={"r": 0}, unsaved={"r": 0}))
    bench.side.finished(asked, "stop")
    poll_until(lambda: any("finish" in hint for hint in bench.client.hints))
    assert bench.step(asked, 8).saves == []


def test_turns_of_a_session_are_numbered(bench: Bench) -> None:
    for name in ("a", "b"):
        asked = FakeRequest(name, list(range(16)), session_id="s")
        bench.matched(asked)
    assert [hint["turn"] for hint in bench.client.hints] == [0, 1]


def test_a_request_whose_params_cannot_be_read_is_neither_stored_nor_read(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.holds(2)
    asked = request(kv_transfer_params={"no_store": "yes"})
    assert bench.matched(asked) == 0
    assert bench.step(asked, 36).saves == []
    assert "no_store is true or false" in caplog.text


def test_after_starting_anew_nothing_that_runs_is_saved(bench: Bench) -> None:
    asked, later = request(), FakeRequest("later", list(range(36)))
    bench.matched(asked)
    (before,) = bench.step(asked, 8).saves
    bench.side.start_anew()
    assert bench.step(asked, 8).saves == []
    bench.matched(later)
    (after,) = bench.step(later, 8).saves
    assert before.namespace != after.namespace


def test_one_request_that_breaks_takes_no_other_along(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    good, odd = request(), FakeRequest("odd", list(range(50, 86)))
    bench.matched(good)
    bench.matched(odd)
    output = FakeOutput({"odd": 8, "r": 8}, {"r": (TABLE,)})  # the table of one is not told
    assert [save.request_id for save in bench.side.plan(output).saves] == ["r"]
    assert "KeyError" in caplog.text
    assert [save.request_id for save in bench.side.plan(output).saves] == []
    assert len(caplog.records) == 1


def test_a_request_that_cannot_be_read_is_computed(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    odd: Any = object()
    bench.side.add(odd)
    assert bench.side.matched(odd, 0) == 0
    assert "AttributeError" in caplog.text

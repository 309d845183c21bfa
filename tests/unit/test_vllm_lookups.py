"""Questions of the scheduler: answered by a thread, bounded in time, asked again while cold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from blobstore.clients.hit import Hit
from blobstore.clients.vllm.faults import Faults
from blobstore.clients.vllm.lookups import (
    FRESH_S,
    IDLE_PATIENCE_S,
    PATIENCE_S,
    POLL_S,
    WAITING_MAX,
    Lookup,
    Lookups,
)
from blobstore.clients.vllm.options import Options
from blobstore.hint import Hint
from tests.support.polling import poll_until
from tests.support.vllm_fakes import FakeClient, FakeDaemon, FakeIdentity, FakeLora, block_hashes

TOKENS = list(range(40))
HASHES = block_hashes(TOKENS)
ALL = range(5)
"""The blobs of the request."""


class Bench:
    """Lookups over a client of the test's choice, with a clock that it turns."""

    def __init__(self, identity: FakeIdentity | None = None, *, in_step: bool = False) -> None:
        self.now_s = 100.0
        self.client = FakeClient(Hit(3, 24, warm=3))
        self.daemon = FakeDaemon(self.client)
        self.identity = identity or FakeIdentity()
        daemon: Any = self.daemon
        self.lookups = Lookups(
            self.identity, daemon, Options(lookup_timeout_s=0.1), Faults(),
            clock=lambda: self.now_s, in_step=in_step,
        )  # fmt: skip

    def begin(self, lora: Any = None, needed: range = ALL) -> Lookup:
        return self.lookups.begin(lora, HASHES, Hint(session="s", turn=1), needed)

    def settled(self, lookup: Lookup, needed: range = ALL) -> bool:
        self.lookups.next_step()
        return self.lookups.settled(lookup, HASHES, needed)

    def answered(self, lookup: Lookup) -> None:
        poll_until(lookup.done.is_set)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.client.answers.set()
    made.lookups.close(5.0)


def test_an_answer_says_how_much_is_held(bench: Bench) -> None:
    lookup = bench.begin()
    bench.answered(lookup)
    assert bench.settled(lookup)
    assert lookup.hit.blobs == 3
    assert len(lookup.keys) == 5
    assert bench.client.hints == [{"session": "s", "turn": 1}]


def test_the_namespace_is_declared_before_the_first_request(bench: Bench) -> None:
    poll_until(lambda: bench.client.declared == [bench.identity.bound().namespace])


def test_a_daemon_that_is_slow_is_asked_again_and_then_given_up(bench: Bench) -> None:
    bench.client.answers.clear()
    lookup = bench.begin()
    assert not bench.settled(lookup)
    bench.now_s += 0.05
    assert not bench.settled(lookup)
    bench.now_s += 0.06
    assert bench.settled(lookup)
    assert (lookup.hit.blobs, lookup.hit.reason) == (0, "deadline")


def test_a_late_answer_is_taken_by_who_asks_again(bench: Bench) -> None:
    bench.client.answers.clear()
    lookup = bench.begin()
    assert bench.client.asked.wait(10.0)
    bench.now_s += 0.2
    assert bench.settled(lookup)
    bench.client.answers.set()
    bench.answered(lookup)
    assert bench.settled(lookup)
    assert lookup.hit.blobs == 3


def test_what_waited_too_long_behind_others_is_not_asked_at_all(bench: Bench) -> None:
    bench.client.answers.clear()
    first, second = bench.begin(), bench.begin()
    assert bench.client.asked.wait(10.0)
    bench.now_s += 0.2
    bench.client.answers.set()
    bench.answered(second)
    bench.answered(first)
    assert second.answer.reason == "deadline"
    assert len(bench.client.hints) == 1
    assert second.ns is not None  # what it computes can be saved nevertheless


def test_one_step_waits_a_moment_for_all_of_its_requests(bench: Bench) -> None:
    bench.client.answers.clear()
    lookups = [bench.begin() for _ in range(3)]
    clock = iter(100.0 + 0.001 * n for n in range(1000))
    bench.lookups._clock = lambda: next(clock)
    bench.lookups.next_step()
    for lookup in lookups:
        bench.lookups.settled(lookup, HASHES, ALL)
    assert bench.lookups._patience_s <= 0


@pytest.mark.parametrize(("idle", "waited_s"), [(True, IDLE_PATIENCE_S), (False, PATIENCE_S)])
def test_an_answer_is_waited_for_longer_where_nothing_is_computed(
    bench: Bench, idle: bool, waited_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.client.answers.clear()
    lookup = bench.begin()
    waits: list[float | None] = []
    monkeypatch.setattr(lookup.done, "wait", waits.append)
    bench.lookups.next_step(idle=idle)
    bench.lookups.settled(lookup, HASHES, ALL)
    assert waits == [waited_s]


def test_without_a_daemon_nothing_is_asked(bench: Bench) -> None:
    bench.daemon.usable = False
    lookup = bench.begin()
    assert bench.settled(lookup)
    assert lookup.hit.reason == "unavailable"
    assert bench.client.hints == []


def test_a_daemon_that_cannot_be_reached_is_a_miss(bench: Bench) -> None:
    bench.daemon.client = None
    lookup = bench.begin()
    bench.answered(lookup)
    assert bench.settled(lookup)
    assert lookup.hit.reason == "unavailable"


def test_what_is_on_ssd_is_brought_up_and_waited_for(bench: Bench) -> None:
    bench.client.hit = Hit(3, 24, warm=1, eta_s=0.5)
    lookup = bench.begin()
    bench.answered(lookup)
    assert not bench.settled(lookup)
    assert bench.client.prefetched == [2]
    bench.client.hit = Hit(3, 24, warm=3)
    bench.now_s += 2 * POLL_S
    bench.settled(lookup)
    bench.answered(lookup)
    assert bench.settled(lookup)
    assert bench.settled(lookup)
    assert (lookup.hit.warm, lookup.warm_at_first) == (3, 1)  # what it tells is of before
    assert bench.client.prefetched == [2]


def test_what_does_not_come_up_in_time_is_loaded_from_where_it_is(bench: Bench) -> None:
    bench.client.hit = Hit(3, 24, warm=1, eta_s=0.5)
    lookup = bench.begin()
    bench.answered(lookup)
    assert not bench.settled(lookup)
    bench.now_s += 1.01
    bench.settled(lookup)
    bench.answered(lookup)
    assert bench.settled(lookup)
    assert lookup.hit.warm == 1


def test_an_old_answer_is_asked_for_again(bench: Bench) -> None:
    lookup = bench.begin()
    bench.answered(lookup)
    bench.client.hit = Hit(1, 8, warm=1)
    bench.now_s += FRESH_S / 2
    assert bench.settled(lookup)
    assert lookup.hit.blobs == 3
    bench.now_s += FRESH_S
    bench.settled(lookup)
    bench.answered(lookup)
    assert bench.settled(lookup)
    assert lookup.hit.blobs == 1


def test_a_doubted_answer_is_asked_for_again(bench: Bench) -> None:
    lookup = bench.begin()
    bench.answered(lookup)
    lookup.doubt()
    bench.client.hit = Hit(0, 0)
    bench.settled(lookup)
    bench.answered(lookup)
    assert bench.settled(lookup)
    assert lookup.hit.blobs == 0


def test_an_answer_that_came_during_a_long_step_is_used(bench: Bench) -> None:
    lookup = bench.begin()
    bench.answered(lookup)
    assert bench.settled(lookup)
    bench.client.answers.clear()
    bench.now_s += 2 * FRESH_S
    assert not bench.settled(lookup)  # too old: asked again
    bench.client.answers.set()
    bench.answered(lookup)
    bench.client.answers.clear()
    bench.now_s += 2 * FRESH_S
    assert bench.settled(lookup)


def test_slow_answers_do_not_prolong_the_wait_for_the_ssd(bench: Bench) -> None:
    bench.client.hit = Hit(3, 24, warm=1, eta_s=0.02)
    lookup = bench.begin()
    bench.answered(lookup)
    assert not bench.settled(lookup)
    bench.client.answers.clear()
    for _ in range(4):  # steps of 9 ms, and no answer: twice the estimate is 40 ms
        bench.now_s += 0.009
        assert not bench.settled(lookup)
    bench.now_s += 0.009
    assert bench.settled(lookup)
    assert (lookup.hit.blobs, lookup.hit.warm) == (3, 1)


def test_what_the_engine_has_itself_is_neither_waited_for_nor_brought_up(bench: Bench) -> None:
    bench.client.hit = Hit(3, 24, warm=0, eta_s=0.5)
    lookup = bench.begin(needed=range(3, 5))
    bench.answered(lookup)
    assert bench.settled(lookup, range(3, 5))
    assert bench.client.prefetched == []


def test_of_a_chain_whose_head_is_not_in_dram_the_rest_is_looked_at(bench: Bench) -> None:
    bench.client.hit, bench.client.tail = Hit(3, 24, warm=0, eta_s=0.5), Hit(1, 8, warm=1)
    lookup = bench.begin(needed=range(2, 5))
    bench.answered(lookup)
    assert bench.settled(lookup, range(2, 5))
    assert (bench.client.tails, bench.client.prefetched) == ([1], [])
    bench.client.tail = Hit(1, 8, warm=0, eta_s=0.5)
    colder = bench.begin(needed=range(2, 5))
    bench.answered(colder)
    assert not bench.settled(colder, range(2, 5))
    assert bench.client.prefetched == [1]


def test_where_nothing_is_needed_nothing_is_waited_for(bench: Bench) -> None:
    bench.client.answers.clear()
    lookup = bench.begin(needed=range(0))
    assert bench.settled(lookup, range(0))
    bench.client.answers.set()
    bench.answered(lookup)
    lookup.doubt()
    bench.client.hit = Hit(1, 8, warm=1)
    assert bench.settled(lookup, range(0))
    bench.answered(lookup)
    assert lookup.answer.blobs == 1


def test_more_questions_than_can_wait_are_misses_of_their_own_kind(bench: Bench) -> None:
    bench.client.answers.clear()
    lookups = [bench.begin() for _ in range(WAITING_MAX + 2)]
    assert bench.settled(lookups[-1])
    assert lookups[-1].hit.reason == "busy"


def test_an_answer_that_nobody_needed_grows_old_too(bench: Bench) -> None:
    lookup = bench.begin(needed=range(0))
    bench.answered(lookup)
    assert bench.settled(lookup, range(0))
    bench.client.hit = Hit(5, 40, warm=5)
    bench.now_s += 2 * FRESH_S
    bench.settled(lookup)
    bench.answered(lookup)
    assert bench.settled(lookup)
    assert lookup.hit.blobs == 5


def test_what_found_no_room_or_left_again_is_brought_up_again(bench: Bench) -> None:
    bench.client.hit, bench.client.room = Hit(3, 24, warm=0, eta_s=0.5), 2
    lookup = bench.begin()
    for prefetched in ([3], [3, 3], [3, 3]):
        bench.answered(lookup)
        assert not bench.settled(lookup)
        assert bench.client.prefetched == prefetched
        bench.client.room = 3
        bench.now_s += 2 * POLL_S
        bench.settled(lookup)
    for warm in (3, 0):
        bench.client.hit = Hit(3, 24, warm=warm, eta_s=0.5)
        bench.answered(lookup)
        bench.now_s += 2 * FRESH_S
        bench.settled(lookup)
    bench.answered(lookup)
    assert bench.client.prefetched == [3, 3, 3]


def test_that_a_name_is_known_again_is_told(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    bench.identity.unnamed.add("a")
    bench.answered(bench.begin(FakeLora("a")))
    bench.identity.unnamed.clear()
    bench.answered(bench.begin(FakeLora("a")))
    assert "works again" in caplog.text


def test_an_engine_in_step_with_others_never_waits_longer() -> None:
    bench = Bench(in_step=True)
    bench.lookups.next_step(idle=True)
    assert bench.lookups._patience_s == PATIENCE_S
    bench.lookups.close(5.0)


def test_adapters_have_namespaces_of_their_own(bench: Bench) -> None:
    plain, adapted = bench.begin(), bench.begin(FakeLora("a"))
    bench.answered(plain)
    bench.answered(adapted)
    assert plain.ns is not None
    assert adapted.ns is not None
    assert plain.ns.id != adapted.ns.id


def test_an_adapter_without_a_name_is_a_miss(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.identity.unnamed.add("a")
    lookup = bench.begin(FakeLora("a"))
    bench.answered(lookup)
    assert bench.settled(lookup)
    assert (lookup.hit.reason, lookup.ns) == ("unnamed", None)
    assert "a cannot be named" in caplog.text


def test_other_hashes_than_declared_are_never_used(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(FakeIdentity(hashes_are_wrong=True))
    lookup = bench.begin()
    bench.answered(lookup)
    assert lookup.ns is None
    assert bench.client.hints == []
    assert "begin otherwise" in caplog.text
    bench.lookups.close(5.0)


def test_starting_anew_leaves_what_was_stored_before(bench: Bench) -> None:
    before = bench.begin()
    bench.answered(before)
    bench.lookups.start_anew()
    after, later = bench.begin(), bench.begin()
    bench.answered(later)
    assert before.ns is not None
    assert after.ns is not None
    assert later.ns is not None
    assert before.ns.id != after.ns.id == later.ns.id


def test_why_the_model_stopped_is_told(bench: Bench) -> None:
    lookup = bench.begin()
    bench.answered(lookup)
    bench.lookups.tell(lookup, HASHES, "stop")
    poll_until(lambda: len(bench.client.hints) == 2)
    assert bench.client.hints[1] == {"session": "s", "turn": 1, "finish": "stop"}

from __future__ import annotations

import gc
import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import permutations

import pytest

from blobstore import uses
from blobstore.hint import Hint
from blobstore.index import Index, Record, identity
from blobstore.layout import KVLayout
from blobstore.namespace import Namespace
from blobstore.sessions import Sessions
from blobstore.tiering.policy import Use
from blobstore.uses import BACKLOG_PAUSE_S, PAUSE_S, REQUEST_S, SAME_S, WAITING_MAX, Uses
from tests.support.clock import FakeClock

TOKENS = 16
NAMESPACE = Namespace("m", KVLayout.opaque(100), tokens_per_blob=TOKENS)


@dataclass(slots=True)
class Timer:
    """One `call_later`."""

    seconds: float
    run: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


@dataclass(slots=True)
class World:
    """Uses of blobs that are in an index alone, and what was told of them."""

    clock: FakeClock = field(default_factory=FakeClock)
    index: Index = field(default_factory=Index)
    told: list[Use[Record]] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    timers: list[Timer] = field(default_factory=list)
    sessions: Sessions = field(default_factory=Sessions)
    uses: Uses = field(init=False)

    def __post_init__(self) -> None:
        self.uses = Uses(
            self.told.append, self.sessions, self.gaps.append, self.clock, self._call_later
        )

    def _call_later(self, seconds: float, run: Callable[[], None]) -> Timer:
        self.timers.append(Timer(seconds, run))
        return self.timers[-1]

    def chain(self, n: int, parent: Record | None = None, name: str = "") -> list[Record]:
        """Blobs that continue `parent`."""
        state = self.index.declare(NAMESPACE)
        made: list[Record] = []
        for number in range(n):
            depth = parent.depth if parent is not None else 0
            key = hashlib.sha256(f"{name}/{depth}/{number}".encode()).digest()
            parent = Record(state, key, parent, 100, TOKENS)
            parent.last_used = self.clock()
            parent.ssd = True
            self.index.add(parent)
            made.append(parent)
        return made

    def last(self) -> Use[Record]:
        """What was told last."""
        self.uses.drain()
        return self.told[-1]

    def after(self, seconds: float) -> World:
        """Everything is told, and time passes."""
        self.uses.drain()
        self.clock.advance(seconds)
        return self


@pytest.fixture
def world() -> World:
    return World()


def depths(records: Sequence[Record]) -> list[int]:
    return [record.depth for record in records]


class TestGets:
    def test_a_get_is_a_use_of_the_whole_chain(self, world: World) -> None:
        chain = world.chain(5)
        world.clock.advance(7)
        world.uses.got(chain[2], 3, 10, Hint(kind="main", finish="stop"))
        use = world.last()
        assert list(use.items) == chain[:3]
        assert (use.n_held, use.continues) == (3, False)
        assert (use.item_tokens, use.prompt_tokens) == (TOKENS, 10 * TOKENS)
        assert (use.now_s, use.session, use.turn) == (world.clock(), "", -1)
        assert (use.kind, use.finish) == ("main", "stop")
        assert world.gaps == [7]

    def test_a_partial_last_blob_counts_its_own_tokens(self, world: World) -> None:
        chain = world.chain(2)
        chain[1].tokens = 5
        world.uses.got(chain[1], 2, 2, None)
        assert world.last().prompt_tokens == TOKENS + 5

    def test_ranks_that_lease_one_chain_at_once_are_one_use(self, world: World) -> None:
        chain = world.chain(3)
        for _ in range(4):
            world.uses.got(chain[-1], 3, 3, None)
        assert len(world.uses) == 1
        world.after(SAME_S / 2)
        world.uses.got(chain[-1], 3, 3, None)
        world.after(SAME_S)
        assert len(world.told) == 1
        world.uses.got(chain[-1], 3, 3, None)
        world.uses.drain()
        assert len(world.told) == 2

    def test_sessions_that_share_a_chain_use_it_each(self, world: World) -> None:
        chain = world.chain(3)
        for name in ("a", "b", "a"):
            world.uses.got(chain[-1], 3, 3, Hint(session=name))
        world.uses.drain()
        assert [use.session for use in world.told] == ["a", "b"]

    def test_a_turn_that_gets_its_chain_again_uses_it_once(self, world: World) -> None:
        chain = world.chain(3)
        for turn in (1, 1, 2):
            world.uses.got(chain[-1], 3, 3, Hint(session="s", turn=turn))
            world.after(SAME_S / 4 if turn == 2 else 100)
        assert [use.turn for use in world.told] == [1, 2]

    def test_windows_of_one_long_get_are_one_use_and_its_continuations(self, world: World) -> None:
        chain = world.chain(9)
        for end in (3, 6, 9):
            world.uses.got(chain[end - 1], 3, 3, None)
            world.after(1)
        assert [(depths(use.items)[-1], use.n_held, use.continues) for use in world.told] == [
            (3, 3, False), (6, 3, True), (9, 6, True),
        ]  # fmt: skip
        assert [use.prompt_tokens for use in world.told] == [3 * TOKENS, 0, 0]
        assert len(world.gaps) == 1

    def test_blobs_that_are_got_one_by_one_at_a_moment_are_one_use(self, world: World) -> None:
        chain = world.chain(6)
        for record in chain:
            world.uses.got(record, 1, 1, None)
        assert len(world.uses) == 1
        assert list(world.last().items) == chain
        assert world.told == [world.last()]

    def test_blobs_asked_for_before_their_parents_at_a_moment_are_one_use(
        self, world: World
    ) -> None:
        chain = world.chain(4)
        for number in (3, 1, 0, 2):
            world.uses.got(chain[number], 1, 1, Hint(session="s", turn=5))
        world.uses.drain()
        assert [list(use.items) for use in world.told] == [chain]
        assert world.sessions.facts("s", 0.0)["turn"] == 5
        assert world.sessions.facts_of(chain[3], 0.0)["session"] == "s"

    @pytest.mark.parametrize("order", list(permutations(range(4))))
    @pytest.mark.parametrize("hint", [None, Hint(session="s", turn=3)])
    def test_blobs_got_out_of_order_are_told_of_once(
        self, world: World, order: tuple[int, ...], hint: Hint | None
    ) -> None:
        chain = world.chain(4)
        for number in order:
            world.uses.got(chain[number], 1, 1, hint)
            world.after(0.1)
        first, *more = world.told
        new = [record for use in more for record in use.items[use.n_held :]]
        assert sorted(depths([*first.items, *new])) == [1, 2, 3, 4]
        assert [use.continues for use in world.told] == [False] + [True] * len(more)

    def test_the_end_of_a_chain_alone_is_a_use_of_all_of_it(self, world: World) -> None:
        chain = world.chain(6)
        world.uses.got(chain[-1], 2, 2, None)
        use = world.last()
        assert (list(use.items), use.n_held, use.continues) == (chain, 6, False)
        assert use.prompt_tokens == 6 * TOKENS

    def test_a_later_window_is_a_use_of_its_own(self, world: World) -> None:
        chain = world.chain(6)
        world.uses.got(chain[2], 3, 3, None)
        world.after(uses.WINDOW_S + 1)
        world.uses.got(chain[5], 3, 3, None)
        assert not world.last().continues

    def test_what_went_meanwhile_is_not_told_of(self, world: World) -> None:
        chain = world.chain(4)
        world.uses.got(chain[3], 4, 4, None)
        for record in reversed(chain[2:]):
            world.index.discard(record)
        use = world.last()
        assert (list(use.items), use.n_held) == (chain[:2], 2)
        world.uses.got(chain[3], 1, 1, None)
        world.index.discard(chain[1])
        world.index.discard(chain[0])
        world.uses.drain()
        assert len(world.told) == 1

    def test_chains_that_were_put_as_roots_of_their_own_are_told_of_to_their_last(
        self, world: World
    ) -> None:
        world.chain(2, name="a")
        (lone,) = world.chain(1, name="b")
        world.uses.got(lone, 3, 3, None)
        assert list(world.last().items) == [lone]

    def test_drafts_are_not_told_of_before_they_are_published(self, world: World) -> None:
        chain = world.chain(2)
        draft = Record(chain[0].ns, b"d" * 32, chain[-1], 100, TOKENS)
        world.uses.got(draft, 3, 3, None)
        assert list(world.last().items) == chain
        assert world.gaps == []  # how long the draft was idle says nothing of these


class TestPuts:
    def test_a_put_after_the_get_of_what_it_continues_is_its_continuation(
        self, world: World
    ) -> None:
        chain = world.chain(3)
        world.uses.got(chain[-1], 3, 5, None)
        world.after(REQUEST_S - 1)
        new = world.chain(2, chain[-1])
        world.uses.stored(new[-1], 2, Hint(finish="tool_use"))
        use = world.last()
        assert list(use.items) == chain + new
        assert (use.n_held, use.continues, use.finish) == (3, True, "tool_use")

    def test_a_put_that_nothing_went_before_is_a_use(self, world: World) -> None:
        chain = world.chain(3)
        new = world.chain(2, chain[-1])
        world.uses.stored(new[-1], 2, None)
        use = world.last()
        assert (list(use.items), use.n_held, use.continues) == (chain + new, 3, False)
        assert use.prompt_tokens == 5 * TOKENS
        assert world.gaps == []

    def test_a_first_put_is_a_use_of_nothing_that_was_held(self, world: World) -> None:
        chain = world.chain(3)
        world.uses.stored(chain[-1], 3, None)
        assert (world.last().n_held, world.last().continues) == (0, False)

    def test_pieces_of_one_answer_are_one_use(self, world: World) -> None:
        leaf: Record | None = None
        for _ in range(4):
            (leaf,) = world.chain(1, leaf)
            world.uses.stored(leaf, 1, None)
            world.after(2)
        assert [(use.n_held, use.continues) for use in world.told] == [
            (0, False), (1, True), (2, True), (3, True),
        ]  # fmt: skip

    def test_a_next_turn_that_puts_without_a_get_is_a_use(self, world: World) -> None:
        chain = world.chain(2)
        world.uses.stored(chain[-1], 2, None)
        world.after(uses.PUT_AFTER_PUT_S + 1)
        world.uses.stored(world.chain(1, chain[-1])[-1], 1, None)
        assert not world.last().continues

    def test_turns_tell_requests_apart_however_close_they_are(self, world: World) -> None:
        chain = world.chain(2)
        world.uses.stored(chain[-1], 2, Hint(session="s", turn=1))
        world.uses.stored(world.chain(1, chain[-1])[-1], 1, Hint(session="s", turn=2))
        assert not world.last().continues
        assert [use.turn for use in world.told] == [1, 2]

    def test_a_put_of_another_session_does_not_continue_this_ones_get(self, world: World) -> None:
        chain = world.chain(2)
        world.uses.got(chain[-1], 2, 2, Hint(session="a"))
        world.uses.drain()
        world.uses.stored(world.chain(1, chain[-1])[-1], 1, Hint(session="b"))
        assert not world.last().continues

    def test_ranks_that_seal_every_other_blob_store_each_once(self, world: World) -> None:
        chain = world.chain(4)
        world.uses.stored(chain[2], 3, None)  # stored 1 and 3
        world.uses.drain()
        world.uses.stored(chain[3], 3, None)  # stored 2 and 4
        use = world.last()
        assert (use.n_held, use.continues, len(use.items)) == (3, True, 4)

    def test_a_put_whose_blobs_went_meanwhile_is_not_told_of(self, world: World) -> None:
        chain = world.chain(2)
        world.uses.stored(chain[1], 1, None)
        world.index.discard(chain[1])
        world.uses.drain()
        assert world.told == []

    def test_what_was_evicted_and_is_stored_again_is_told_of_again(self, world: World) -> None:
        world.index.on_discarded = world.uses.forget
        chain = world.chain(3)
        world.uses.stored(chain[-1], 3, None)
        world.uses.drain()
        world.index.discard(chain[2])
        (again,) = world.chain(1, chain[1])
        world.uses.stored(again, 1, None)
        use = world.last()
        assert (list(use.items), use.n_held, use.continues) == ([*chain[:2], again], 2, True)

    def test_many_sessions_of_one_head_are_not_all_remembered(self, world: World) -> None:
        chain = world.chain(1)
        for number in range(uses.REQUESTS_OF_ONE_MAX + 5):
            world.uses.got(chain[0], 1, 1, Hint(session=f"s{number}"))
        world.uses.drain()
        assert len(world.uses._told[chain[0]]) == uses.REQUESTS_OF_ONE_MAX

    def test_a_put_and_the_get_of_the_next_turn_are_told_in_their_order(self, world: World) -> None:
        chain = world.chain(4)
        for record in chain:
            world.uses.stored(record, 1, Hint(session="s", turn=40))
        for number in (0, 2, 1, 3):
            world.uses.got(chain[number], 1, 1, Hint(session="s", turn=41))
        world.uses.drain()
        assert [use.turn for use in world.told if not use.continues] == [40, 41]
        assert world.sessions.facts("s", 0.0)["turn"] == 41


class TestSharedHeads:
    """Requests without sessions that have a head in common, and go on each in its own way."""

    def test_gets_that_ask_for_other_ends_are_requests_of_their_own(self, world: World) -> None:
        (head,) = world.chain(1)
        for asked in (b"a", b"b", b"a"):
            world.uses.got(head, 1, 3, None, asked=asked)
        world.after(SAME_S / 2)
        world.uses.got(head, 1, 3, None, asked=b"b")  # another rank of the same request
        world.uses.drain()
        assert [use.continues for use in world.told] == [False, False]

    def test_each_put_goes_on_from_the_get_that_asked_for_it(self, world: World) -> None:
        (head,) = world.chain(1)
        ends = [world.chain(2, head, name) for name in ("a", "b", "c")]
        for end in ends:
            world.uses.got(head, 1, 3, None, asked=end[-1].key)
        world.after(1)
        for end in reversed(ends):
            world.uses.stored(end[-1], 2, None)
        world.uses.drain()
        assert [use.continues for use in world.told] == [False] * 3 + [True] * 3
        assert [use.n_held for use in world.told[3:]] == [1, 1, 1]

    def test_a_put_that_nothing_asked_for_goes_on_from_the_last_get(self, world: World) -> None:
        (head,) = world.chain(1)
        first, second, third = (world.chain(2, head, name) for name in ("a", "b", "c"))
        world.uses.got(head, 1, 1, None)
        world.after(SAME_S * 2)
        for end in (first, second):
            world.uses.stored(end[-1], 2, None)
        world.after(1)
        assert [use.continues for use in world.told] == [False, True, False]
        assert (world.told[2].n_held, list(world.told[2].items)) == (1, [head, *second])
        world.uses.got(head, 1, 1, None)
        world.uses.stored(third[-1], 2, None)
        world.uses.drain()
        assert [use.continues for use in world.told[3:]] == [False, True]

    def test_each_get_is_for_what_a_match_before_it_has_missed(self, world: World) -> None:
        (head,) = world.chain(1)
        ends = [world.chain(n, head, name) for n, name in ((2, "a"), (5, "b"))]
        for end in (*ends, ends[0]):  # a rank of the first asks once more
            world.uses.matched(head, len(end), None, end[-1].key)
        for _ in range(3):
            world.uses.got(head, 1, 1, None)
        world.after(1)
        assert [use.prompt_tokens // TOKENS for use in world.told] == [3, 6]
        for end in reversed(ends):
            world.uses.stored(end[-1], len(end), None)
        world.uses.drain()
        assert [use.continues for use in world.told[2:]] == [True, True]

    def test_what_matches_of_one_blob_missed_is_bounded(self, world: World) -> None:
        (head,) = world.chain(1)
        for number in range(uses.MISSED_OF_ONE_MAX + 3):
            world.uses.matched(head, 1, None, b"%d" % number)
        assert len(world.uses._missed[head, ""]) == uses.MISSED_OF_ONE_MAX


class TestMatches:
    def test_the_prompt_is_as_long_as_the_match_before_the_get_has_asked(
        self, world: World
    ) -> None:
        chain = world.chain(4)
        world.uses.matched(chain[-1], 6, None)
        world.uses.got(chain[-1], 4, 4, Hint(session="s"))
        assert world.last().prompt_tokens == 10 * TOKENS
        world.after(SAME_S + 1)
        world.uses.got(chain[-1], 4, 4, None)
        assert world.last().prompt_tokens == 4 * TOKENS

    def test_what_a_match_missed_is_soon_not_worth_knowing(self, world: World) -> None:
        chain = world.chain(4)
        world.uses.matched(chain[-1], 6, None)
        world.after(REQUEST_S + 1)
        world.uses.got(chain[-1], 4, 4, None)
        assert world.last().prompt_tokens == 4 * TOKENS

    def test_no_more_than_so_many_are_remembered(self, world: World) -> None:
        state = world.index.declare(NAMESPACE)
        for number in range(uses.MISSED_MAX + 10):
            leaf = Record(state, number.to_bytes(32, "little"), None, 100, TOKENS)
            world.uses.matched(leaf, 1, None)
        assert len(world.uses._missed) == uses.MISSED_MAX
        assert len(world.uses) == 0

    def test_a_match_alone_is_no_use(self, world: World) -> None:
        chain = world.chain(2)
        world.uses.matched(chain[-1], 0, Hint(session="s", finish="stop"))
        world.uses.matched(chain[-1], 3, Hint(session="s"))
        world.uses.drain()
        assert world.told == []
        assert len(world.sessions) == 0

    def test_it_tells_why_the_model_stopped_where_no_put_does(self, world: World) -> None:
        chain = world.chain(3)
        world.uses.got(chain[-1], 3, 4, Hint(session="s", turn=2))
        world.after(30)
        world.uses.matched(chain[-1], 0, Hint(session="s", turn=2, finish="tool_use"))
        use = world.last()
        assert (list(use.items), use.n_held, use.continues) == (chain, 3, True)
        assert (use.session, use.turn, use.finish) == ("s", 2, "tool_use")
        assert world.sessions.facts("s", world.clock())["turn"] == 2

    @pytest.mark.parametrize(("turn", "seconds"), [(3, 1.0), (2, REQUEST_S + 1)])
    def test_of_another_request_it_tells_nothing(
        self, world: World, turn: int, seconds: float
    ) -> None:
        chain = world.chain(3)
        world.uses.got(chain[-1], 3, 4, Hint(session="s", turn=2))
        world.after(seconds)
        world.uses.matched(chain[-1], 0, Hint(session="s", turn=turn, finish="stop"))
        world.uses.drain()
        assert len(world.told) == 1


class TestTelling:
    def test_it_is_told_a_moment_later_by_one_timer(self, world: World) -> None:
        for number in range(3):
            world.uses.got(world.chain(1, name=str(number))[0], 1, 1, None)
        (timer,) = world.timers
        assert timer.seconds == PAUSE_S
        assert world.told == []
        timer.run()
        assert len(world.told) == 3
        assert len(world.timers) == 1

    def test_others_get_the_loop_between_slices(self, world: World) -> None:
        def slow(use: Use[Record]) -> None:
            world.told.append(use)
            world.clock.advance(0.0015)

        world.uses._tell = slow
        for number in range(5):
            world.uses.got(world.chain(1, name=str(number))[0], 1, 1, None)
        world.timers[0].run()
        assert len(world.told) == 2
        assert world.timers[1].seconds == BACKLOG_PAUSE_S
        while len(world.uses):
            world.timers[-1].run()
        assert len(world.told) == 5

    def test_no_more_than_so_many_wait(self, world: World) -> None:
        state = world.index.declare(NAMESPACE)
        for number in range(WAITING_MAX + 10):
            record = Record(state, number.to_bytes(32, "little"), None, 100, TOKENS)
            world.index.add(record)
            world.uses.got(record, 1, 1, None)
        assert world.uses.stats() == {"told": 0, "waiting": WAITING_MAX, "lost": 10}
        assert len(world.timers) == 1

    def test_what_is_remembered_is_bounded(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(uses, "TOLD_MAX", 20)
        for number in range(50):
            world.uses.got(world.chain(3, name=str(number))[-1], 3, 3, None)
        world.uses.drain()
        assert len(world.uses._told) == 20

    def test_blobs_that_are_gone_are_not_kept_in_memory(self, world: World) -> None:
        chain = world.chain(3)
        world.uses.got(chain[-1], 3, 3, None)
        world.uses.drain()
        state = chain[0].ns
        world.index.on_discarded = world.uses.forget
        for record in reversed(chain):
            world.index.discard(record)
        world.told.clear()
        del chain, record
        gc.collect()
        alive = [found for found in gc.get_objects() if type(found) is Record]
        assert not [found for found in alive if found.ns is state]

    def test_a_policy_that_raises_stops_nothing(
        self, world: World, caplog: pytest.LogCaptureFixture
    ) -> None:
        def broken(use: Use[Record]) -> None:
            raise ValueError("no")

        first, second = world.chain(1, name="a")[0], world.chain(1, name="b")[0]
        world.uses._tell = broken
        world.uses.got(first, 1, 1, None)
        with caplog.at_level(logging.ERROR):
            world.timers[0].run()
        assert "a use was not taken in" in caplog.text
        world.uses._tell = world.told.append
        world.uses.got(second, 1, 1, None)
        world.timers[1].run()
        assert [list(use.items) for use in world.told] == [[second]]

    def test_closing_tells_of_the_rest(self, world: World) -> None:
        world.uses.got(world.chain(1)[0], 1, 1, None)
        world.uses.close()
        assert len(world.told) == 1
        assert world.timers[0].cancelled


def test_identity_stays_with_key_and_namespace() -> None:
    other = Namespace("other", KVLayout.opaque(100), tokens_per_blob=TOKENS)
    records = [
        Record(Index().declare(namespace), key, None, 100, TOKENS)
        for namespace in (NAMESPACE, other, NAMESPACE)
        for key in (b"k" * 32, b"l" * 32)
    ]
    found = [identity(record) for record in records]
    assert len(set(found)) == 4
    assert found[:2] == found[4:]
    assert found[0] == 4469775560222329536

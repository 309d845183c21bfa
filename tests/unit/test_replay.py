"""Replays of a small trace: what is counted, what is told to policies, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from blobstore.bench import replay as replay_module
from blobstore.bench.optimum import OptimalCache
from blobstore.bench.replay import NAMES, ReplayRow, ReplaySettings, replay
from blobstore.bench.trace import Request, Trace, made_trace
from blobstore.errors import InvalidRequest
from blobstore.tiering.plan import PlanSettings, make_plan
from blobstore.tiering.policy import Use
from blobstore.tiering.prefill_cost import COST_DOUBLES_AT_TOKEN

TRACE = made_trace()
SIZES = (0.05, 0.2)


def rows(*policies: str, sizes: tuple[float, ...] = SIZES, **settings: Any) -> list[ReplayRow]:
    return list(replay(TRACE, policies, sizes, ReplaySettings(**settings)))


def without_times(row: ReplayRow) -> ReplayRow:
    return replace(row, us_per_decision=0.0, train_s=0.0)


def test_there_is_a_row_for_each_policy_at_each_size_in_order() -> None:
    found = [(row.size, row.policy) for row in rows("lru", "arc", "min")]
    assert found == [(size, policy) for size in SIZES for policy in ("lru", "arc", "min")]


def test_hits_are_counted_in_tokens_and_in_cost() -> None:
    requests = [Request(0.0, [0, 1], 100), Request(1.0, [0, 1], 100), Request(2.0, [0, 2], 90)]
    [row] = replay(Trace("small", 64, requests, 3), ["lru"], [1.0], ReplaySettings())
    assert row.token_hit_ratio == pytest.approx((100 + 64) / 290)
    doubles = COST_DOUBLES_AT_TOKEN

    def cost(n: int) -> float:
        return sum(1 + position / doubles for position in range(n))

    expected = (cost(100) + cost(64)) / (2 * cost(100) + cost(90))
    assert row.cost_saved == pytest.approx(expected)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("min", "oracle")])
def test_no_policy_beats_the_optimum(name: str) -> None:
    for ours, best in zip(rows(name), rows("min"), strict=True):
        assert 0 < ours.token_hit_ratio <= best.token_hit_ratio
        assert 0 < ours.cost_saved < 1
        assert ours.us_per_decision is not None
        assert ours.us_per_decision > 0
        assert ours.ssd_bytes_written == 0


def test_a_replay_has_one_outcome_also_with_learning() -> None:
    longer = made_trace(n_sessions=80)
    settings = ReplaySettings(ssd_size=0.2, hints=True)
    once, again = (list(replay(longer, ["ours"], [0.1], settings)) for _ in range(2))
    assert once[0].train_s > 0
    assert [*map(without_times, once)] == [*map(without_times, again)]


def test_all_of_the_trace_in_memory_misses_only_what_is_new() -> None:
    seen: set[int] = set()
    hit_tokens = 0
    for request in TRACE.requests:
        n_held = sum(block in seen for block in request.blocks)
        hit_tokens += min(n_held * TRACE.block_tokens, request.prompt_tokens)
        seen.update(request.blocks)
    for row in rows("lru", "min", sizes=(1.0,)):
        assert row.token_hit_ratio == pytest.approx(hit_tokens / TRACE.prompt_tokens)


def test_a_second_tier_serves_more_and_what_is_written_is_counted() -> None:
    alone, tiered = rows("lru")[0], rows("lru", ssd_size=0.2)[0]
    assert tiered.token_hit_ratio > alone.token_hit_ratio
    assert 0 < tiered.ssd_bytes_read_again < tiered.ssd_bytes_written
    assert tiered.ssd_bytes_written % TRACE.block_tokens == 0


def test_two_tiers_hold_no_more_than_one_of_their_size_with_foresight() -> None:
    best = rows("min", ssd_size=0.2)[0]
    cache = OptimalCache(TRACE, int(0.25 * TRACE.n_blocks))
    hit_tokens = sum(
        min(cache.use(request.blocks) * TRACE.block_tokens, request.prompt_tokens)
        for request in TRACE.requests
    )
    assert best.token_hit_ratio == pytest.approx(hit_tokens / TRACE.prompt_tokens)
    assert rows("lru", ssd_size=0.2)[0].token_hit_ratio < best.token_hit_ratio


def test_an_oracle_writes_less_and_serves_no_less() -> None:
    everything, foreseen = rows("lru", "oracle", sizes=(0.05,), ssd_size=0.1)
    assert foreseen.ssd_bytes_written < 0.7 * everything.ssd_bytes_written
    assert foreseen.token_hit_ratio >= everything.token_hit_ratio


def test_hints_are_told_only_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Use[int]] = []

    def listening(*arguments: Any) -> Any:
        plan = make_plan(*arguments)
        use_it = plan.use

        def listen(use: Use[int]) -> None:
            told.append(use)
            use_it(use)

        monkeypatch.setattr(plan, "use", listen)
        return plan

    monkeypatch.setattr(replay_module, "make_plan", listening)
    for hints in (False, True):
        told.clear()
        rows("lru", sizes=(0.05,), hints=hints)
        assert len(told) == len(TRACE.requests)
        hinted = {(use.session, use.turn, use.kind, use.finish) for use in told}
        assert (hinted == {("", -1, "", "")}) == (not hints)
        use, request = told[-1], TRACE.requests[-1]
        assert (use.item_tokens, use.prompt_tokens) == (512, request.prompt_tokens)
        assert (use.answer_tokens, use.now_s) == (request.answer_tokens, request.time_s)
        assert max(use.n_held for use in told) > 0


def test_the_plan_is_told_what_is_gone_and_when_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[int] = []
    ticks: list[float] = []

    def listening(name: str, dram: Any, ssd: Any, settings: PlanSettings) -> Any:
        assert settings.inline
        assert settings.objective == "cost"
        plan = make_plan(name, dram, ssd, settings)
        monkeypatch.setattr(plan, "forget", forgotten.append)
        monkeypatch.setattr(plan, "tick", ticks.append)
        return plan

    monkeypatch.setattr(replay_module, "make_plan", listening)
    rows("lru", sizes=(0.1,), ssd_size=0.1, objective="cost")
    assert forgotten
    assert all(after - before >= 1 for before, after in pairwise(ticks))
    assert len(ticks) > 50


@pytest.mark.parametrize(
    ("policies", "sizes", "ssd", "told"),
    [
        (["belady"], [0.1], None, "unknown policy 'belady': use some of ours, lru"),
        (["oracle"], [0.1], None, "give --ssd a size"),
        (["lru"], [0.0], None, "distinct blocks, above 0 and at most 1, found 0"),
        (["lru"], [5.0], None, "found 5"),
        (["lru"], [0.1], -1.0, "found -1"),
        (["lru"], [0.1], 0.0, "found 0"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(
    policies: list[str], sizes: list[float], ssd: float | None, told: str
) -> None:
    with pytest.raises(InvalidRequest, match=told):
        replay(TRACE, policies, sizes, ReplaySettings(ssd_size=ssd))

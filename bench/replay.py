"""`bench replay`: traces of requests through the policies in virtual time, beside the optimum.

What is replayed is the code that runs in the store: the plan of a node with its orders,
its filter and its learning, on caches without bytes. A block counts as many bytes as it
has tokens, so that sizes are shares of the trace's distinct blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from blobstore.bench.future import Future
from blobstore.bench.optimum import OptimalCache
from blobstore.bench.replay_tiers import DramAndSsd, DramOnly, Tiers
from blobstore.bench.trace import Request, Trace
from blobstore.errors import InvalidRequest
from blobstore.tiering.plan import POLICY_NAMES, PlanSettings, make_plan
from blobstore.tiering.policy import PolicyTerms, Use
from blobstore.tiering.prefill_cost import prefill_cost

MIN, ORACLE = "min", "oracle"
"""Not policies: the optimum of one tier as large as all, and LRU whose SSD admits by foresight."""

NAMES = (*POLICY_NAMES, MIN, ORACLE)

SIZES = (0.005, 0.01, 0.02, 0.05, 0.1)

_SEED = 1


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """How a trace is replayed.

    Args:
        hints: tell the session, its turn, the kind of request and why the answer ended.
        ssd_size: of a second tier, as a share of the distinct blocks; None: there is none.
        objective: of ours.
    """

    hints: bool = False
    ssd_size: float | None = None
    objective: Literal["tokens", "cost"] = "tokens"


@dataclass(frozen=True, slots=True)
class ReplayRow:
    """What one policy did at one size, a share of the trace's distinct blocks.

    Args:
        token_hit_ratio: hit tokens ÷ prompt tokens.
        cost_saved: the same, with each token weighed by what it costs at its position.
        ssd_bytes_written: a byte for each token; the optimum writes nothing.
        us_per_decision: CPU time without training per evicted block; None: not measured.
        train_s: CPU time of all training.
        ssd_bytes_read_again: of those written, before they left; an oracle saves the others.
    """

    policy: str
    size: float
    token_hit_ratio: float
    cost_saved: float
    ssd_bytes_written: int
    us_per_decision: float | None
    train_s: float
    ssd_bytes_read_again: int = 0


def replay(
    trace: Trace, policies: Sequence[str], sizes: Sequence[float], settings: ReplaySettings
) -> Iterator[ReplayRow]:
    """A row for each policy at each size. Raises InvalidRequest before it begins."""
    for policy in policies:
        if policy not in NAMES:
            raise InvalidRequest(f"unknown policy {policy!r}: use some of {', '.join(NAMES)}")
        if policy == ORACLE and settings.ssd_size is None:
            raise InvalidRequest("the oracle says what goes to SSD: give --ssd a size")
    ssd_size = 1.0 if settings.ssd_size is None else settings.ssd_size
    for size in (*sizes, ssd_size):
        if not 0 < size <= 1:
            raise InvalidRequest(
                f"a size is a share of the distinct blocks, above 0 and at most 1, found {size}"
            )
    return (_row(trace, policy, size, settings) for size in sizes for policy in policies)


def _row(trace: Trace, policy: str, size: float, settings: ReplaySettings) -> ReplayRow:
    if policy == MIN:
        return _optimum(trace, size, settings)
    return _Replay(trace, policy, size, settings).row()


class Score:
    """Tokens and cost: of what was hit, and of all."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._hit_tokens = self._prompt_tokens = 0
        self._saved = self._cost = 0.0

    def add(self, n_held: int, prompt_tokens: int) -> None:
        """A prompt, of which so many leading blocks were held."""
        hit_tokens = min(n_held * self._block_tokens, prompt_tokens)
        self._hit_tokens += hit_tokens
        self._prompt_tokens += prompt_tokens
        self._saved += prefill_cost(hit_tokens)
        self._cost += prefill_cost(prompt_tokens)

    @property
    def token_hit_ratio(self) -> float:
        """Hit tokens ÷ prompt tokens."""
        return self._hit_tokens / max(1, self._prompt_tokens)

    @property
    def cost_saved(self) -> float:
        """The cost of the hit tokens ÷ that of all."""
        return self._saved / max(1.0, self._cost)


def _optimum(trace: Trace, size: float, settings: ReplaySettings) -> ReplayRow:
    cache = OptimalCache(trace, int((size + (settings.ssd_size or 0)) * trace.n_blocks))
    score = Score(trace.block_tokens)
    begun = time.thread_time()
    for request in trace.requests:
        score.add(cache.use(request.blocks), request.prompt_tokens)
    cpu_s = time.thread_time() - begun
    row = (MIN, size, score.token_hit_ratio, score.cost_saved)
    return ReplayRow(*row, 0, _us_each(cpu_s, cache.n_evicted), 0.0)


class _Replay:
    """One policy at one size."""

    def __init__(self, trace: Trace, policy: str, size: float, settings: ReplaySettings) -> None:
        self._trace, self._policy, self._size = trace, policy, size
        self._hints = settings.hints
        block_bytes = trace.block_tokens
        dram_bytes = int(size * trace.n_blocks) * block_bytes
        ssd_bytes = int((settings.ssd_size or 0) * trace.n_blocks) * block_bytes
        self._plan = make_plan(
            "lru" if policy == ORACLE else policy,
            PolicyTerms(dram_bytes, _identity, _SEED),
            PolicyTerms(ssd_bytes, _identity, _SEED) if settings.ssd_size is not None else None,
            PlanSettings(objective=settings.objective, inline=True),
        )
        self._future = Future(trace) if policy == ORACLE else None
        self._tiers: Tiers
        if settings.ssd_size is None:
            self._tiers = DramOnly(self._plan, dram_bytes, block_bytes)
        else:
            sizes = (dram_bytes, ssd_bytes, block_bytes)
            self._tiers = DramAndSsd(self._plan, *sizes, self._foresight())

    def row(self) -> ReplayRow:
        """Replay the whole trace."""
        score = Score(self._trace.block_tokens)
        begun, ticked_s = time.thread_time(), 0.0
        for request in self._trace.requests:
            score.add(self._serve(request), request.prompt_tokens)
            if request.time_s >= ticked_s + 1:
                ticked_s = request.time_s
                self._plan.tick(ticked_s)
        cpu_s = time.thread_time() - begun
        train_s = _number(self._plan.stats().get("train_s", 0.0))
        self._plan.close()
        tiers = self._tiers
        row = (self._policy, self._size, score.token_hit_ratio, score.cost_saved)
        us_each = _us_each(cpu_s - train_s, tiers.n_evicted)
        return ReplayRow(
            *(*row, tiers.ssd_bytes_written, us_each, train_s), tiers.ssd_bytes_read_again
        )

    def _serve(self, request: Request) -> int:
        if self._future is not None:
            self._future.go_on()
        n_held = self._tiers.n_held(request.blocks)
        hints = (request.session, request.turn, request.kind, request.finish)
        self._tiers.use(
            Use(
                *(request.blocks, n_held, request.time_s, self._trace.block_tokens),
                *(request.prompt_tokens, request.answer_tokens, False),
                *(hints if self._hints else ()),
            )
        )
        return n_held

    def _foresight(self) -> Callable[[int], bool] | None:
        future = self._future
        if future is None:
            return None
        return lambda block: future.next_use(block) < future.never


def _identity(block: int) -> int:
    return block


def _us_each(seconds: float, n: int) -> float:
    return 1e6 * max(0.0, seconds) / max(1, n)


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0

"""All decisions of one node about where its blobs are: who leaves, and who is let onto SSD.

Made by `make_plan`. It moves nothing itself: the service asks, and tells it what happened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, Literal

from blobstore.errors import InvalidRequest
from blobstore.tiering.admission import Admission, Odds
from blobstore.tiering.budget import Budget
from blobstore.tiering.classifier import (
    MODEL_VERSION,
    Classifier,
    Fitted,
    fit,
)
from blobstore.tiering.fallback import Fallback
from blobstore.tiering.learning import Learner, Learning, MakeLearner, Method
from blobstore.tiering.policies import POLICIES
from blobstore.tiering.policy import Policy, PolicyTerms, T, Use
from blobstore.tiering.prefill_cost import prefill_cost
from blobstore.tiering.run_shadow import REFERENCE_SHADOWS
from blobstore.tiering.switched_order import SwitchedOrder

OURS = "ours"

POLICY_NAMES = (OURS, *POLICIES)

METHOD = Method(MODEL_VERSION, fit, Fitted.to_parts, Fitted.from_parts)

REFERENCES = tuple(REFERENCE_SHADOWS)
"""What ours falls back to: the best references on the traces that it was measured with. The
first is in force until there is a model."""


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """What a plan is told besides its name and its tiers.

    Args:
        objective: what is to be saved: tokens, or the cost of computing them again.
        ssd_writes_per_day: bytes; None sets no limit, 0 keeps everything off the SSD.
        ssd_spare: share of the SSD that is kept free of what nobody has judged.
        model_path: where what was learned is kept; None: nowhere.
        inline: learn inside `tick`, on the caller's thread, for replays.
    """

    objective: Literal["tokens", "cost"] = "tokens"
    ssd_writes_per_day: int | None = None
    ssd_spare: float = 0.05
    model_path: Path | None = None
    inline: bool = False


class Plan(Generic[T]):
    """The orders of the tiers, and the filter before the SSD. One thread uses it.

    `fallbacks` keep the best order in force in their tiers; `learning` is None where
    nothing is learned.
    """

    def __init__(
        self,
        name: str,
        dram: SwitchedOrder[T],
        ssd: SwitchedOrder[T] | None,
        admission: Admission[T],
        learning: Learning[T] | None = None,
        fallbacks: Sequence[Fallback[T]] = (),
    ) -> None:
        self.name = name
        self.admission = admission
        self._dram = dram
        self._ssd = ssd
        self._orders = [dram] if ssd is None else [dram, ssd]
        self._learning = learning
        self._fallbacks = fallbacks
        self._now_s = 0.0

    @property
    def dram(self) -> Policy[T]:
        """The order in which DRAM is left."""
        return self._dram

    @property
    def ssd(self) -> Policy[T] | None:
        """The order in which SSD is left; None without one."""
        return self._ssd

    def use(self, use: Use[T]) -> None:
        """A request uses a chain of items, in whatever tier they are."""
        if self._learning is not None:
            self._learning.learner.use(use)
        for order in self._orders:
            order.tell(use)
        for fallback in self._fallbacks:
            fallback.note(use)

    def forget(self, item: T) -> None:
        """`item` is in no tier any more."""
        if self._learning is not None:
            self._learning.learner.forget(item)
        for fallback in self._fallbacks:
            fallback.forget(item)

    def tick(self, now_s: float) -> None:
        """What is due by the clock; call it about once a second."""
        self._now_s = now_s
        if self._learning is not None:
            self._learning.tick(now_s)
        for fallback in self._fallbacks:
            fallback.tick()

    def explain(
        self, item: T, now_s: float, chain: Sequence[T] = (), nbytes: int = 1
    ) -> dict[str, object]:
        """What would be decided about `item` now, and by which numbers.

        `chain` is what would be written to SSD with it, itself last, and `nbytes` its size.
        """
        verdict = self.admission.outlook(chain or [item], nbytes, now_s)
        known = self._learning.learner.explain(item, now_s) if self._learning is not None else {}
        return {
            "policy": self._dram.in_force,
            "policy_why": self._policy_why(),
            "in_force": {tier: order.in_force for tier, order in self._by_tier()},
            **known,
            "floor": {tier: self._floor(order, now_s) for tier, order in self._by_tier()},
            "admission": {
                "verdict": "admit" if verdict.admit else "refuse",
                "reason": verdict.reason,
                "p_reuse": verdict.p_reuse,
                "threshold": verdict.threshold,
            },
        }

    def stats(self) -> dict[str, object]:
        """What is in force, and how well it does; `ssd` for that tier where it differs."""
        return {
            "policy": self._dram.in_force,
            "wanted": self.name,
            "fallback": self._dram.in_force != self.name,
            "write_budget": self._write_budget(),
            "admission": {"threshold": self.admission.threshold(self._now_s)},
            **(self._learning.stats(self._now_s) if self._learning is not None else {}),
            **(self._fallbacks[0].stats() if self._fallbacks else {}),
            "ssd": self._ssd_stats(),
        }

    def close(self) -> None:
        """Stop learning and keep what was learned; blocks for as long as a fit may take."""
        if self._learning is not None:
            self._learning.close()

    def _by_tier(self) -> Iterator[tuple[str, SwitchedOrder[T]]]:
        return zip(("dram", "ssd"), self._orders, strict=False)

    def _policy_why(self) -> str:
        if self._dram.in_force == self.name:
            return ""
        assert self._learning is not None
        if self._learning.fitted is None:
            return "too little has been seen for a model"
        return "it has saved more lately, in shadows of both"

    def _floor(self, order: SwitchedOrder[T], now_s: float) -> float | None:
        """The worth of what would leave next."""
        victim = next(order.victims(), None)
        if victim is None or self._learning is None:
            return None
        return float(self._learning.learner.worth([victim], now_s)[0])

    def _write_budget(self) -> dict[str, float | None]:
        budget = self.admission.write_budget
        left_bytes = budget.left_bytes(self._now_s) if budget.limited else None
        return {"day_left_bytes": left_bytes, "day_bytes": budget.day_bytes}

    def _ssd_stats(self) -> dict[str, object]:
        if self._ssd is None:
            return {}
        shadows = self._fallbacks[1].stats() if len(self._fallbacks) > 1 else {}
        return {"policy": self._ssd.in_force, **shadows}


def make_plan(
    name: str,
    dram: PolicyTerms[T],
    ssd: PolicyTerms[T] | None = None,
    settings: PlanSettings | None = None,
) -> Plan[T]:
    """The plan called `name`: "ours", or a reference. Raises InvalidRequest for other names."""
    settings = settings or PlanSettings()
    if name not in POLICY_NAMES:
        raise InvalidRequest(f"unknown policy {name!r}: use one of {', '.join(POLICY_NAMES)}")
    if name == OURS:
        return make_learned_plan(_make_classifier(settings), METHOD, dram, ssd, settings)
    dram_order = SwitchedOrder({name: partial(POLICIES[name], dram)}, name)
    ssd_order = None if ssd is None else SwitchedOrder({name: partial(POLICIES[name], ssd)}, name)
    return Plan(name, dram_order, ssd_order, _make_admission(ssd, ssd_order, settings))


def make_learned_plan(
    make_learner: MakeLearner,
    method: Method,
    dram: PolicyTerms[T],
    ssd: PolicyTerms[T] | None,
    settings: PlanSettings,
) -> Plan[T]:
    """A plan that goes by what is learned, by `method`, and falls back where that loses."""
    learner = make_learner(dram.identity, dram.seed)
    orders: list[SwitchedOrder[T]] = []
    fallbacks: list[Fallback[T]] = []
    for terms in (dram,) if ssd is None else (dram, ssd):
        factories: dict[str, Callable[[], Policy[T]]] = {
            name: partial(POLICIES[name], terms) for name in REFERENCES
        }
        factories[OURS] = partial(learner.order, terms.capacity_bytes)
        order = SwitchedOrder(factories, REFERENCES[0])
        orders.append(order)
        fallbacks.append(
            Fallback(
                order,
                terms,
                learner,
                (OURS, *REFERENCES),
                inline=settings.inline,
                weigh=prefill_cost if settings.objective == "cost" else float,
            )
        )

    def on_fit(fitted: Any) -> None:
        for fallback in fallbacks:
            fallback.fitted()

    learning = Learning(learner, method, settings.model_path, on_fit, inline=settings.inline)
    ssd_order = orders[1] if ssd is not None else None
    admission = _make_admission(ssd, ssd_order, settings, learning)
    return Plan(OURS, orders[0], ssd_order, admission, learning, fallbacks)


def _make_classifier(settings: PlanSettings) -> MakeLearner:
    def make(identity: Callable[[T], int], seed: int) -> Learner[T]:
        return Classifier(identity, seed, objective=settings.objective)

    return make


def _make_admission(
    ssd: PolicyTerms[T] | None,
    order: SwitchedOrder[T] | None,
    settings: PlanSettings,
    odds: Odds[T] | None = None,
) -> Admission[T]:
    capacity_bytes = ssd.capacity_bytes if ssd is not None else 0
    return Admission(
        capacity_bytes,
        Budget.per_day(settings.ssd_writes_per_day),
        odds,
        lambda: next(order.victims(), None) if order is not None else None,
        spare_bytes=int(capacity_bytes * settings.ssd_spare),
    )

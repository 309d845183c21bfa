"""What each item is worth, learned online from this node's own past only.

The classifier is told of every use. It takes samples and watches what becomes of them;
a fit, made elsewhere of a snapshot, tells classes of items apart by when they are used
again; what an item is worth follows from its class and its age. Classes are looked up
when an item is a candidate, not when it is used.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal

import numpy as np
import numpy.typing as npt

from blobstore.tiering.hazard_trees import FloatArray, IntArray
from blobstore.tiering.item_table import ItemTable
from blobstore.tiering.learned_order import LearnedOrder
from blobstore.tiering.policy import Policy, T, Use
from blobstore.tiering.prefill_cost import COST_DOUBLES_AT_TOKEN
from blobstore.tiering.reuse_features import (
    N_FEATURES,
    N_REQUEST,
    Float32Array,
    Request,
    follow,
    item_rows,
    request_row,
)
from blobstore.tiering.reuse_model import MODEL_VERSION, Fitted, Snapshot, fit
from blobstore.tiering.reuse_samples import ReuseSamples
from blobstore.tiering.shadow_order import ShadowOrder
from blobstore.tiering.tree_growth import TreeSettings
from blobstore.tiering.worth import N_WORTHS, WORTH_STARTS_S, worth_steps

__all__ = ["MODEL_VERSION", "Classifier", "ClassifierSettings", "Fitted", "Snapshot", "fit"]

_AGE_MIN_S = 1e-3
_STEP_STARTS_S = WORTH_STARTS_S[1:].tolist()

_FIT_AFTER_SHARE = 8
"""While little is known, fits are due after so small a part more of all uses."""

_CHAIN = 32
"""So far up a chain is judged at once."""


@dataclass(frozen=True, slots=True)
class ClassifierSettings:
    """How much is sampled, remembered and fitted.

    Args:
        samples: kept at most.
        samples_per_use: of each request's chain, about; of every second one its end, too.
        first_fit_uses, fit_every_uses: fits are due after so many uses; until there have
            been eight times the latter, after an eighth more than at the last fit.
        requests: remembered, for what hangs together.
        sessions: remembered by the caller's names.
        words: told apart of what callers say about requests.
        trees: how a fit is made.
    """

    samples: int = 60_000
    samples_per_use: int = 20
    first_fit_uses: int = 150
    fit_every_uses: int = 500
    requests: int = 32_768
    sessions: int = 65_536
    words: int = 64
    trees: TreeSettings = field(default_factory=TreeSettings)


class Classifier(Generic[T]):
    """Knows items by `identity` after they have left. One thread uses it.

    `use` costs some 100 µs for a chain of 300 items; all else is bounded, too.
    """

    def __init__(
        self,
        identity: Callable[[T], int],
        seed: int = 0,
        *,
        objective: Literal["tokens", "cost"] = "tokens",
        settings: ClassifierSettings | None = None,
    ) -> None:
        self._settings = settings or ClassifierSettings()
        self._seed = seed
        self._by_cost = objective == "cost"
        self._rng = np.random.default_rng(seed)
        self._table: ItemTable[T] = ItemTable(identity)
        self._samples = ReuseSamples(self._settings.samples, self._rng)
        self._requests: list[Request | None] = [None] * self._settings.requests
        self._rows = np.zeros((self._settings.requests, N_REQUEST), np.float32)
        self._sessions: OrderedDict[str, int] = OrderedDict()
        self._words: dict[str, int] = {"": 0}
        self._n_uses = 0
        self._fit_at_uses = self._settings.first_fit_uses
        self._now_s = float("-inf")
        self._fitted: Fitted | None = None
        self._worth_rows: list[list[float]] = []
        self._n_fits = 0
        self._n_orders = 0

    def use(self, use: Use[T]) -> None:
        """A request uses a chain: as Policy.use, for the orders of all tiers."""
        n = len(use.items)
        if not n:
            return
        self._now_s = use.now_s
        slots = self._table.admit(use.items)
        told = use.n_held if use.continues else 0
        request = self._continued(use, slots) if told else None
        if request is None:
            told = 0
            request = self._new_request(use, slots)
        at = request.serial % len(self._requests)
        self._requests[at] = request
        self._rows[at] = request_row(request)
        self._note(slots, told, request)
        if told < n:
            self._sample(slots[told:], self._rows[at], use.now_s)

    def forget(self, item: T) -> None:
        """`item` is in no tier any more; what is known of it stays for a while."""
        self._table.forget(item)

    def order(self, capacity_bytes: int) -> Policy[T]:
        """An order of eviction by worth, for one tier."""
        return LearnedOrder(self, self._next_rng())

    def shadow_order(self) -> ShadowOrder[T]:
        """The same for a shadow of a tier, which need not tell its uses."""
        return ShadowOrder(self, self._table.find, self._next_rng())

    def p_reuse(
        self, items: Sequence[T], now_s: float, within_s: float = float("inf")
    ) -> FloatArray:
        """The chance of a use in the time from now on; 1 while nothing has been learned."""
        if self._fitted is None:
            return np.ones(len(items))
        slots = self._table.slots(items)
        return self._fitted.p_reuse(self._classes(slots), self._ages_s(slots, now_s), within_s)

    def worth(self, items: Sequence[T], now_s: float) -> FloatArray:
        """Hits per second of holding each, or what they save at the cost of their position."""
        return self._worths(self._table.slots(items), now_s)

    def fit_due(self) -> bool:
        """Whether enough was seen since the last snapshot."""
        return self._n_uses >= self._fit_at_uses and len(self._samples) > 0

    def snapshot(self) -> Snapshot:
        """What a fit needs; the next one is due some uses later."""
        every = self._settings.fit_every_uses
        self._fit_at_uses = self._n_uses + min(every, max(self._n_uses // _FIT_AFTER_SHARE, 1))
        uses = self._samples.copy(self._now_s)
        return Snapshot(uses, self._settings.trees, self._seed, tuple(self._words))

    def adopt(self, fitted: Fitted) -> None:
        """Go by `fitted` from now on."""
        if self._n_uses == 0:
            self._words = {word: code for code, word in enumerate(fitted.words)}
        self._fitted = fitted
        self._worth_rows = fitted.worth_per_s.tolist()
        self._n_fits += 1

    def explain(self, item: T, now_s: float) -> dict[str, object]:
        """What is thought of `item`, in plain words and numbers."""
        slot = self._table.slot(item)
        if slot < 0:
            return {"known": False}
        table = self._table
        age_s = max(now_s - float(table.last_s[slot]), 0.0)
        said: dict[str, object] = {
            "known": True,
            "uses": int(table.uses[slot]),
            "age_s": age_s,
            "gap_s": None if np.isnan(table.gap_s[slot]) else float(table.gap_s[slot]),
            "children": int(table.children[slot]),
        }
        if self._fitted is None:
            return said | {"class": "nothing has been learned yet"}
        return said | self._judgement(np.array([slot]), np.array([age_s]), now_s)

    def stats(self) -> dict[str, int]:
        """How much is remembered."""
        return {
            "samples": len(self._samples),
            "classes": len(self._fitted.centres) if self._fitted else 0,
            "identities": len(self._table),
            "ghosts": self._table.n_ghosts,
            "sessions": len(self._sessions),
        }

    def slot_of(self, item: T, last_used: float) -> int:
        """As Judge.slot_of."""
        table = self._table
        slot = table.slot(item)
        if slot < 0:
            slot = int(table.admit((item,))[0])
        if not table.view.uses[slot]:
            table.last_s[slot] = last_used
        return slot

    def worths(self, slots: IntArray) -> FloatArray:
        """As Judge.worths."""
        if self._fitted is None or self._by_cost:
            return self._worths(slots, self._now_s)
        table = self._table
        stale = (table.judged.take(slots) != self._n_fits).nonzero()[0]
        if len(stale):
            self._judge(slots.take(stale))
        at = table.item_class.take(slots).astype(np.int64)
        at *= N_WORTHS
        at += worth_steps(self._now_s - table.last_s.take(slots))
        worths: FloatArray = self._fitted.worth_per_s.take(at)
        worths *= table.level.take(slots)
        return worths

    def worth_of(self, slot: int) -> float | None:
        """As Judge.worth_of."""
        view = self._table.view
        if self._fitted is None or view.judged[slot] != self._n_fits:
            return None
        step = bisect_right(_STEP_STARTS_S, self._now_s - view.last_s[slot])
        worth = self._worth_rows[view.item_class[slot]][step] * view.level[slot]
        if self._by_cost:
            worth *= 1 + view.position_tokens[slot] / COST_DOUBLES_AT_TOKEN
        return worth

    def above(self, slot: int) -> int:
        """As Judge.above."""
        return self._table.view.parent[slot]

    def look_up(self, slots: Iterable[int]) -> None:
        """As Judge.look_up."""
        if self._fitted is None:
            return
        parent, judged, n_fits = self._table.view.parent, self._table.view.judged, self._n_fits
        found: dict[int, None] = {}
        for slot in slots:
            if judged[slot] == n_fits:
                slot = parent[slot]
            for _ in range(_CHAIN):
                if slot < 0 or slot in found or judged[slot] == n_fits:
                    break
                found[slot] = None
                slot = parent[slot]
        if found:
            self._judge(np.array([*found]))

    def _next_rng(self) -> np.random.Generator:
        self._n_orders += 1
        return np.random.default_rng((self._seed, self._n_orders))

    def _new_request(self, use: Use[T], slots: IntArray) -> Request:
        table = self._table
        uses = table.uses.take(slots)
        unknown = (uses == 0).nonzero()[0]
        known = int(unknown[0]) if len(unknown) else len(slots)
        self._n_uses += 1
        request = Request(
            serial=self._n_uses,
            time_s=use.now_s,
            n_items=len(slots),
            known_items=known,
            deepest_known_uses=int(uses[known - 1]) if known else 0,
            prompt_tokens=use.prompt_tokens,
            answer_tokens=use.answer_tokens,
            item_tokens=max(use.item_tokens, 1),
            finish=self._code(use.finish),
            kind=self._code(use.kind),
            hinted_turn=use.turn,
            fork_uses=_fork_uses(uses[:known]) if known else 0,
        )
        before = self._request(int(table.request[slots[known - 1]])) if known else None
        shared = known
        of_session = self._last_of_session(use.session, request.serial)
        if of_session is not None:
            before = of_session
            mine = (table.request.take(slots) == before.serial).nonzero()[0]
            shared = int(mine[-1]) + 1 if len(mine) else 0
        follow(request, before, shared, of_session is not None)
        return request

    def _continued(self, use: Use[T], slots: IntArray) -> Request | None:
        """The request that this use tells more of, if it is remembered."""
        request = self._request(int(self._table.request[slots[use.n_held - 1]]))
        if request is None:
            return None
        request.n_items = len(slots)
        request.prompt_tokens = max(request.prompt_tokens, use.prompt_tokens)
        request.answer_tokens = max(request.answer_tokens, use.answer_tokens)
        # Why an answer ended is known only once it has been stored.
        request.finish = self._code(use.finish) or request.finish
        request.kind = self._code(use.kind) or request.kind
        request.hinted_turn = max(request.hinted_turn, use.turn)
        return request

    def _request(self, serial: int) -> Request | None:
        request = self._requests[serial % len(self._requests)] if serial >= 0 else None
        return request if request is not None and request.serial == serial else None

    def _last_of_session(self, session: str, serial: int) -> Request | None:
        if not session:
            return None
        last = self._sessions.pop(session, -1)
        self._sessions[session] = serial
        if len(self._sessions) > self._settings.sessions:
            self._sessions.popitem(last=False)
        return self._request(last)

    def _code(self, word: str) -> int:
        code = self._words.get(word)
        if code is None:
            code = len(self._words) if len(self._words) < self._settings.words else 0
            if "\n" in word:  # stands between words in the file of a model
                code = 0
            if code:
                self._words[word] = code
        return code

    def _note(self, slots: IntArray, told: int, request: Request) -> None:
        """Bring the table up to date; the first `told` items have been used by this request."""
        table, now_s, n = self._table, request.time_s, len(slots)
        table.parent[slots[1:]] = slots[:-1]
        table.request[slots] = request.serial
        table.judged[slots] = -1
        if told:
            table.features[slots[:told], 0] = np.log2(n - np.arange(told))
        if told == n:
            return
        touched, positions = slots[told:], np.arange(told, n)
        self._end_samples(touched, now_s)
        uses = table.uses.take(touched)
        first_s, gap_s = self._times(slots, told, uses, now_s)
        table.features[touched] = item_rows(
            positions,
            n,
            request.known_items,
            uses,
            np.maximum(gap_s, 0.0),
            np.maximum(now_s - first_s, 0.0),
            table.children.take(touched),
            table.features.take(touched, 0),
        )
        table.position_tokens[touched] = positions * float(request.item_tokens)
        uses += 1
        table.uses[touched] = uses
        table.last_s[touched] = now_s

    def _times(
        self, slots: IntArray, told: int, uses: npt.NDArray[np.int32], now_s: float
    ) -> tuple[FloatArray, FloatArray]:
        """When each item that is touched was used first, and how long before now last (nan)."""
        table, touched = self._table, slots[told:]
        gap_s: FloatArray = now_s - table.last_s.take(touched)
        fresh = (uses == 0).nonzero()[0]
        if len(fresh):
            gap_s[fresh] = np.nan
            table.first_s[touched[fresh]] = now_s
            bearing = fresh + (told - 1)
            table.children[slots[bearing[int(bearing[0] < 0) :]]] += 1
        table.gap_s[touched] = gap_s
        return table.first_s.take(touched), gap_s

    def _end_samples(self, slots: IntArray, now_s: float) -> None:
        tokens = self._table.sample.take(slots)
        watched = (tokens >= 0).nonzero()[0]
        if len(watched):
            self._samples.end(tokens[watched], now_s)
            self._table.sample[slots[watched]] = -1

    def _sample(self, slots: IntArray, row: Float32Array, now_s: float) -> None:
        n, with_end = len(slots), self._n_uses % 2
        n_drawn = min(self._settings.samples_per_use, n) - with_end
        places = {int(share * n) for share in self._rng.random(n_drawn).tolist()}
        if with_end:
            places.add(n - 1)
        chosen = slots.take(sorted(places))
        features = np.empty((len(chosen), N_FEATURES), np.float32)
        features[:, :N_REQUEST] = row
        features[:, N_REQUEST:] = self._table.features.take(chosen, 0)
        self._table.sample[chosen] = self._samples.watch(features, now_s)

    def _ages_s(self, slots: IntArray, now_s: float) -> FloatArray:
        ages_s: FloatArray = np.maximum(now_s - self._table.last_s[slots], _AGE_MIN_S)
        return np.where(slots < 0, np.inf, ages_s)

    def _worths(self, slots: IntArray, now_s: float) -> FloatArray:
        ages_s = self._ages_s(slots, now_s)
        if self._fitted is None:
            worths: FloatArray = 1 / ages_s
        else:
            worths = self._fitted.worth_per_s[self._classes(slots), worth_steps(ages_s)]
            worths = worths * np.where(slots < 0, 1.0, self._table.level[slots])
        if self._by_cost:
            worths = worths * (1 + self._table.position_tokens[slots] / COST_DOUBLES_AT_TOKEN)
        return worths

    def _classes(self, slots: IntArray) -> IntArray:
        assert self._fitted is not None
        table = self._table
        stale = table.judged[slots] != self._n_fits
        if stale.any():
            self._judge(slots[stale & (slots >= 0)])
        return np.where(slots < 0, self._fitted.unknown_class, table.item_class[slots])

    def _judge(self, slots: IntArray) -> None:
        """Look up the classes of items as of their last use."""
        assert self._fitted is not None
        table, n_requests = self._table, len(self._requests)
        serials = table.request.take(slots)
        features = np.empty((len(slots), N_FEATURES), np.float32)
        features[:, :N_REQUEST] = self._rows.take(serials % n_requests, 0)
        features[:, N_REQUEST:] = table.features.take(slots, 0)
        classes, levels = self._fitted.classes(features)
        # Older than what is remembered of requests, or never told of a use.
        unknown = (serials <= max(self._n_uses - n_requests, 0)).nonzero()[0]
        if len(unknown):
            classes[unknown], levels[unknown] = self._fitted.unknown_class, 1.0
        table.item_class[slots], table.level[slots] = classes, levels
        table.judged[slots] = self._n_fits

    def _judgement(self, slots: IntArray, ages_s: FloatArray, now_s: float) -> dict[str, object]:
        assert self._fitted is not None
        fitted, classes = self._fitted, self._classes(slots)
        p_reuse = float(fitted.p_reuse(classes, ages_s, float("inf"))[0])
        number = int(classes[0])
        n_classes = len(fitted.centres)
        if number == fitted.unknown_class:
            name = "of which nothing is known"
        else:
            name = f"{number + 1} of {n_classes}, the last being used again soonest and most"
        later_s = ages_s[0] + np.concatenate([[0.0], np.logspace(-1, 6, 141)])
        chances = -np.expm1(
            fitted.expected_uses(classes, ages_s)
            - fitted.expected_uses(np.repeat(classes, len(later_s)), later_s)
        )
        half = int(np.argmax(chances >= p_reuse / 2))
        return {
            "class": name,
            "p_reuse": p_reuse,
            "expected_reuse_s": float(later_s[half] - ages_s[0]) if p_reuse > 0 else None,
            "worth": float(self._worths(slots, now_s)[0]),
        }


def _fork_uses(uses: npt.NDArray[np.int32]) -> int:
    """Of the last item of a chain that has more than its end, 0 if none has."""
    more = (uses > uses[-1]).nonzero()[0]
    return int(uses[more[-1]]) if len(more) else 0

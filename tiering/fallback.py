"""Falling back to a reference while it does better than the order that is wanted.

Each contender drives a shadow, a cache without bytes, with the same sample of chains and
room in proportion; what the shadows save decides who is in force in the tier itself.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic

from blobstore.tiering.chain_sample import ChainSample
from blobstore.tiering.learning import Learner, SeeingPolicy
from blobstore.tiering.policy import PolicyTerms, T, Use
from blobstore.tiering.race import Race
from blobstore.tiering.run_shadow import REFERENCE_SHADOWS, RunShadow
from blobstore.tiering.shadow_cache import ShadowCache
from blobstore.tiering.switched_order import SwitchedOrder

SHADOW_ITEMS_MIN = 512
"""In one shadow, about: fewer would hold too few chains to be like the tier. A smaller tier is
followed as a whole."""

SHADOW_ITEMS_MAX = 32 * SHADOW_ITEMS_MIN

SHARE = 1 / 8
"""Of all chains, that are followed where these bounds allow it."""

TICK_S = 0.005
"""For the shadows at each tick: single uses cost milliseconds, which nobody should wait for at
a use. What they have no time for they do not see, neither of them."""

_PENDING_MAX = 64

MARGIN = 0.002
"""Share of all tokens that a reference must save more, to be fallen back to."""


_log = logging.getLogger(__name__)


class Fallback(Generic[T]):
    """Keeps the best of several orders in force in the tier that `terms` describe.

    `names` are of `order`'s: the learned one first, references after it. The first
    reference is in force until there is a fit to go by. `inline`: shadows are told at once,
    and of all that is sampled, instead of at the next tick. `weigh` says what the first so
    many tokens of a prompt are worth.
    """

    def __init__(
        self,
        order: SwitchedOrder[T],
        terms: PolicyTerms[T],
        learner: Learner[T],
        names: Sequence[str],
        *,
        inline: bool = False,
        weigh: Callable[[float], float] = float,
    ) -> None:
        self._order = order
        self._terms = terms
        self._learner = learner
        self._weigh = weigh
        self._race = Race(names, MARGIN)
        self._fitted = False
        self._learned: SeeingPolicy[T] | None = None
        self._sample: ChainSample[T] = ChainSample(1.0, terms.identity, terms.seed)
        self._shadows: list[ShadowCache[int] | RunShadow] = []
        self._pending: deque[Use[T]] | None = None if inline else deque()
        self._entered = self._entered_sampled = 0
        self.n_switches = 0

    def fitted(self) -> None:
        """The learned order goes by a new fit; with the first one it takes over."""
        if not self._fitted:
            self._put_in_force(self._race.names[0])
        self._fitted = True

    def note(self, use: Use[T]) -> None:
        """A request uses a chain, held in the tier or not."""
        if not self._shadows and not self._start():
            return
        n_new = len(use.items) - use.n_held
        self._entered += n_new
        self._sample.note(use.items, use.n_held)
        if self._sample.picks(use.items):
            self._entered_sampled += n_new
            if self._pending is None:
                self._follow_safely(use)
            elif len(self._pending) < _PENDING_MAX:
                self._pending.append(use)

    def forget(self, item: T) -> None:
        """`item` is gone for good."""
        self._sample.forget(item)

    def tick(self) -> None:
        """Adapt the shadows' room to the tier's, and let the best contender take over."""
        self._order.step()
        self._catch_up()
        if self._shadows and self._order.n_items:  # an empty tier tells nothing of sizes
            self._fit_room()
        if self._fitted and self._race.judge():
            self._order.switch(self._race.in_front)
            self.n_switches += 1

    def stats(self) -> dict[str, object]:
        """What the shadows save, and how much the wanted order is behind the best of them."""
        ratios = self._race.ratios()
        wanted = ratios[self._race.names[0]]
        others = (ratio for name, ratio in ratios.items() if name != self._race.names[0])
        return {
            "shadows": ratios,
            "regret": max(others) - wanted,
            "sample": self._sample.share,
            "switches": self.n_switches,
        }

    def _start(self) -> bool:
        """Make shadows once the tier is filling, so that its items' sizes are known."""
        if self._order.used_bytes * 2 < self._terms.capacity_bytes or not self._order.n_items:
            return False
        n_items = self._n_items()
        share = _share(n_items)
        room = max(round(n_items * share), 1)
        self._sample = ChainSample(share, self._terms.identity, self._terms.seed)
        self._learned = self._learner.shadow_order()
        self._shadows = [ShadowCache(room, self._learned, _one)]
        for name in self._race.names[1:]:
            self._shadows.append(REFERENCE_SHADOWS[name](room))
        self._race.put_in_front(self._order.wanted)
        self._entered = self._entered_sampled = 0
        return True

    def _catch_up(self) -> None:
        """Follow what is pending, for as long as there is time."""
        end_s = time.perf_counter() + TICK_S
        while self._pending and self._shadows and time.perf_counter() < end_s:
            self._follow_safely(self._pending.popleft())

    def _put_in_force(self, name: str) -> None:
        self._race.put_in_front(name)
        self._order.switch(name)

    def _n_items(self) -> float:
        """What the tier can hold of items like those that it holds."""
        held_bytes = max(self._order.used_bytes, 1)
        return self._terms.capacity_bytes * self._order.n_items / held_bytes

    def _fit_room(self) -> None:
        """Give the shadows their share of the room: that of what comes, as far as it is known.

        A hash gives conversations their places, and these are of very unequal length.
        """
        share, n_items = self._sample.share, self._n_items()
        if not share / 4 < _share(n_items) < share * 4:
            self._shadows = []  # blobs of another size have come: sample anew
            return
        if share < 1 and self._entered > n_items:
            found = self._entered_sampled / self._entered
            share = min(max(found, share / 4), share * 4)
        for shadow in self._shadows:
            shadow.capacity_bytes = max(round(n_items * share), 1)

    def _follow_safely(self, use: Use[T]) -> None:
        try:
            self._follow(use)
        except Exception:  # an item may have come back elsewhere in its tree
            _log.exception("the shadows of the tiering policies start anew")
            self._shadows = []

    def _follow(self, use: Use[T]) -> None:
        """Let each shadow serve the use, and compare what they save."""
        items = [self._terms.identity(item) for item in use.items]
        seen = Use(
            items,
            use.n_held,
            use.now_s,
            use.item_tokens,
            use.prompt_tokens,
            use.answer_tokens,
            use.continues,
            use.session,
            use.turn,
            use.kind,
            use.finish,
        )
        if self._learned is not None:
            self._learned.see(use.items, items)
        told = use.n_held if use.continues else 0
        before = self._weigh(told * use.item_tokens)
        saved = [
            self._weigh(max(shadow.use(seen), told) * use.item_tokens) - before
            for shadow in self._shadows
        ]
        tokens = use.prompt_tokens or len(items) * use.item_tokens
        self._race.note(saved, 0 if use.continues else self._weigh(tokens))


def _share(n_items: float) -> float:
    share = max(SHADOW_ITEMS_MIN / n_items, min(SHARE, SHADOW_ITEMS_MAX / n_items))
    return min(share, 1.0)


def _one(item: int) -> int:
    return 1

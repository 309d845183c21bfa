"""A learner that learns nothing: it counts what it is told, and orders by newest use first.

That order is as good as any when chains come round and round, more than fit, where LRU
saves nothing; and bad where what was just used is used again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic

import numpy as np

from blobstore.tiering.key_heap import KeyHeap
from blobstore.tiering.learning import FloatArray, Learner, Method, SeeingPolicy
from blobstore.tiering.model_file import Arrays, Values
from blobstore.tiering.policy import Policy, T, Use


class NewestFirst(Generic[T]):
    """A Policy: the most recently used goes first."""

    def __init__(self) -> None:
        self._heap: KeyHeap[T] = KeyHeap()

    def __len__(self) -> int:
        return len(self._heap)

    def use(self, use: Use[T]) -> None:
        """As Policy.use."""

    def enter(self, item: T, nbytes: int) -> None:
        """As Policy.enter."""

    def leave(self, item: T) -> None:
        """As Policy.leave."""
        self._heap.remove(item)

    def offer(self, item: T, last_used: float, nbytes: int) -> None:
        """As Policy.offer."""
        self._heap.place(item, -last_used)

    def withdraw(self, item: T) -> None:
        """As Policy.withdraw."""
        self._heap.remove(item)

    def victims(self) -> Iterator[T]:
        """As Policy.victims."""
        return self._heap.walk()


class _Seeing(NewestFirst[int], Generic[T]):
    def see(self, items: Sequence[T], identities: Sequence[int]) -> None:
        pass


class StandInLearner(Generic[T]):
    """A Learner; `fit_every` uses make a fit due, which counts them."""

    def __init__(self, identity: Callable[[T], int], *, fit_every: int = 10) -> None:
        self.identity = identity
        self.fit_every = fit_every
        self.n_uses = 0
        self.n_at_fit = 0
        self.forgotten: list[T] = []
        self.adopted: list[int] = []
        self.odds = 0.5
        self.n_shadows = 0

    def use(self, use: Use[T]) -> None:
        self.n_uses += 1

    def forget(self, item: T) -> None:
        self.forgotten.append(item)

    def order(self, capacity_bytes: int) -> Policy[T]:
        return NewestFirst()

    def shadow_order(self) -> SeeingPolicy[T]:
        self.n_shadows += 1
        return _Seeing()

    def p_reuse(self, items: Sequence[T], now_s: float, within_s: float) -> FloatArray:
        return np.full(len(items), self.odds)

    def worth(self, items: Sequence[T], now_s: float) -> FloatArray:
        return np.full(len(items), 2 * self.odds)

    def fit_due(self) -> bool:
        return self.n_uses - self.n_at_fit >= self.fit_every

    def snapshot(self) -> int:
        self.n_at_fit = self.n_uses
        return self.n_uses

    def adopt(self, fitted: int) -> None:
        self.adopted.append(fitted)

    def explain(self, item: T, now_s: float) -> dict[str, object]:
        return {"class": "a stand-in", "p_reuse": self.odds}

    def stats(self) -> dict[str, int]:
        return {"samples": self.n_uses}


class StandIns:
    """A MakeLearner that remembers what it made."""

    def __init__(self, fit_every: int = 10) -> None:
        self.fit_every = fit_every
        self.made: list[StandInLearner[int]] = []

    def __call__(self, identity: Callable[[T], int], seed: int) -> Learner[T]:
        learner = StandInLearner(identity, fit_every=self.fit_every)
        self.made.append(learner)  # type: ignore[arg-type]
        return learner


def _pack(fitted: int) -> tuple[Arrays, Values]:
    return {"n": np.array([fitted])}, {"kind": "stand-in"}


def _unpack(arrays: Arrays, values: Values) -> int:
    if values.get("kind") != "stand-in":
        raise ValueError("this is not a stand-in's")
    return int(arrays["n"][0].item())


METHOD = Method(version=1, fit=lambda n: n, pack=_pack, unpack=_unpack)

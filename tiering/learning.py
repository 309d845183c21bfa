"""Keeping a classifier up to date: when it is fitted anew, and what is kept over restarts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol

import numpy as np
import numpy.typing as npt

from blobstore.tiering.model_file import (
    Arrays,
    LoadedArrays,
    LoadedValues,
    Values,
    load_model,
    save_model,
)
from blobstore.tiering.policy import Policy, T, T_contra, Use
from blobstore.tiering.sealed_file import Unusable
from blobstore.tiering.training import Training

SAVE_EVERY_S = 600.0

FloatArray = npt.NDArray[np.float64]

_log = logging.getLogger(__name__)


class SeeingPolicy(Policy[int], Protocol[T_contra]):
    """A Policy of items by identity, as the shadows of tiers know them."""

    def see(self, items: Sequence[T_contra], identities: Sequence[int]) -> None:
        """The next use is of `items`, which go by `identities` here."""
        ...


class Learner(Protocol[T]):
    """What a plan needs of a classifier. Calls are cheap enough for the event loop."""

    def use(self, use: Use[T]) -> None:
        """A request uses a chain."""
        ...

    def forget(self, item: T) -> None:
        """`item` is in no tier any more."""
        ...

    def order(self, capacity_bytes: int) -> Policy[T]:
        """An order of eviction by what was learned, for one tier."""
        ...

    def shadow_order(self) -> SeeingPolicy[T]:
        """The same for a shadow of a tier, which need not tell its uses."""
        ...

    def p_reuse(self, items: Sequence[T], now_s: float, within_s: float) -> FloatArray:
        """The chance of a use in the time from now on, for each."""
        ...

    def worth(self, items: Sequence[T], now_s: float) -> FloatArray:
        """What each is worth for as long as it is held, by which the order goes."""
        ...

    def fit_due(self) -> bool:
        """Enough was seen since the last fit."""
        ...

    def snapshot(self) -> Any:
        """What a fit needs, which nobody else changes."""
        ...

    def adopt(self, fitted: Any) -> None:
        """Go by `fitted` from now on."""
        ...

    def explain(self, item: T, now_s: float) -> dict[str, object]:
        """What is thought of `item`, in plain words and numbers."""
        ...

    def stats(self) -> Mapping[str, int]:
        """How much is remembered."""
        ...


class MakeLearner(Protocol):
    """Makes a classifier of items of any kind."""

    def __call__(self, identity: Callable[[T], int], seed: int) -> Learner[T]:
        """A fresh one."""
        ...


@dataclass(frozen=True, slots=True)
class Method:
    """How snapshots become fits, on any thread, and fits become parts of a file.

    Args:
        version: of what the parts mean; a file of another version is not used.
        fit: makes a fit of a snapshot.
        pack: takes a fit apart.
        unpack: undoes `pack`; raises ValueError where the parts do not fit together.
    """

    version: int
    fit: Callable[[Any], Any]
    pack: Callable[[Any], tuple[Arrays, Values]]
    unpack: Callable[[LoadedArrays, LoadedValues], Any]


class Learning(Generic[T]):
    """One classifier, its fits, and the file at `path` (None: nothing is kept).

    Starts warm from the file if that is whole, cold otherwise. `on_fit` is called with
    each fit that the classifier goes by from then on.
    """

    def __init__(
        self,
        learner: Learner[T],
        method: Method,
        path: Path | None,
        on_fit: Callable[[Any], None],
        *,
        inline: bool = False,
    ) -> None:
        self.learner = learner
        self._method = method
        self._path = path
        self._on_fit = on_fit
        self._training: Training[Any] = Training(inline=inline)
        self._fitted: Any = None
        self._fitted_s: float | None = None
        self._unsaved = False
        self._saving: Future[None] | None = None
        self._save_at_s = float("-inf")
        self._warm, self._why_cold = self._load()

    @property
    def fitted(self) -> Any:
        """The fit in use; None while there is none."""
        return self._fitted

    def p_reuse(self, items: Sequence[T], now_s: float, within_s: float) -> FloatArray:
        """As Learner.p_reuse; 1, which keeps nothing out, while there is no fit."""
        if self._fitted is None:
            return np.ones(len(items))
        return self.learner.p_reuse(items, now_s, within_s)

    def worth(self, items: Sequence[T], now_s: float) -> FloatArray:
        """As Learner.worth."""
        return self.learner.worth(items, now_s)

    def tick(self, now_s: float) -> None:
        """Adopt a fit that has ended, start one that is due, save now and then."""
        fitted = self._training.collect()
        if fitted is not None:
            self._fitted_s = now_s
            self._adopt(fitted)
            self._unsaved = True
        if self.learner.fit_due() and self._training.may_start(now_s):
            snapshot, fit = self.learner.snapshot(), self._method.fit
            self._training.start(lambda: fit(snapshot), now_s)
        self._save_at_s = min(self._save_at_s, now_s + SAVE_EVERY_S)  # the clock may jump back
        if self._unsaved and now_s >= self._save_at_s and self._may_save():
            self._save_at_s = now_s + SAVE_EVERY_S
            self._save()

    def stats(self, now_s: float) -> dict[str, object]:
        """How often and how long it was fitted, and where it started from."""
        training = self._training
        age_s = None if self._fitted_s is None else max(now_s - self._fitted_s, 0.0)
        return {
            "fits": training.n_fits,
            "fits_failed": training.n_failed,
            "train_s": training.cpu_s,
            "last_fit_s": training.last_cpu_s,
            **self.learner.stats(),
            "model": {
                "source": "warm" if self._warm else "cold",
                "why": self._why_cold,
                "age_s": age_s,
            },
        }

    def close(self) -> None:
        """End training, and save what was not; blocks for as long as a fit may take."""
        if self._unsaved and self._path is not None:
            self._save()
        self._training.close()

    def _load(self) -> tuple[bool, str]:
        if self._path is None:
            return False, "nothing is kept"
        try:
            self._adopt(self._method.unpack(*load_model(self._path, self._method.version)))
        except (Unusable, ValueError, TypeError, LookupError) as error:
            level = logging.WARNING if self._path.exists() else logging.DEBUG
            _log.log(level, "tiering starts without a model: %s (%s)", error, self._path)
            return False, str(error)
        return True, ""

    def _adopt(self, fitted: Any) -> None:
        self.learner.adopt(fitted)
        self._fitted = fitted
        self._on_fit(fitted)

    def _may_save(self) -> bool:
        return self._path is not None and (self._saving is None or self._saving.done())

    def _save(self) -> None:
        path, method, fitted = self._path, self._method, self._fitted
        assert path is not None

        def save() -> None:
            try:
                save_model(path, method.version, *method.pack(fitted))
            except OSError as error:
                _log.warning("the tiering model could not be saved: %s", error)

        self._unsaved = False
        self._saving = self._training.run(save)

"""Blobs computed again from their tokens: some at a time, each portion on from the one before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blobstore.clients.transformers import layers, libraries
from blobstore.clients.transformers.states import States

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Portion:
    """Blobs whose keys and values the model has just computed."""

    blobs: range
    """Their numbers in what is computed, from 0 on."""
    _states: States
    _past: Any
    _before: int

    def write(self, blob: int, payload: memoryview) -> None:
        """Copy blob number `blob`, one of `blobs`, to `payload`. Only until the next portion."""
        self._states.write(self._past, self._before + blob, payload)


def portions(
    model: Any, states: States, ids: Ids, parent: Sequence[memoryview], blobs_at_once: int
) -> Iterator[Portion]:
    """Let `model` read the full blobs of `ids`, which follow those of `parent`.

    The payloads of `parent` are read in place, before the first portion comes. SizeMismatch
    if one is not of this model.
    """
    step, before = states.tokens, len(parent)
    past = _filled(states, parent)
    for start in range(0, len(ids) // step, blobs_at_once):
        end = min(len(ids) // step, start + blobs_at_once)
        _read(model, ids[start * step : end * step], past)
        yield Portion(range(start, end), states, past, before)
        states.forget(past, (before + end) * step)


def _filled(states: States, payloads: Sequence[memoryview]) -> Any:
    if not payloads:
        return states.empty()
    filling = states.filling(len(payloads))
    for blob in range(len(payloads)):
        filling.read(blob, payloads[blob])
    return filling.cache()


def _read(model: Any, ids: Ids, past: Any) -> None:
    torch = libraries.torch()
    with torch.no_grad():
        layers.run(model, torch.tensor(ids[None], device=model.device), past)

"""What is known of an item when it is used, as a row of numbers for the model.

A row has two parts: of the request, the same for its whole chain, and of the item in it.
Counts and times go in as logarithms, so that no trace's scale is built in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log2
from typing import TypeVar

import numpy as np
import numpy.typing as npt

REQUEST_FEATURES = (
    "chain_items",
    "known_items",
    "new_items",
    "covered",
    "dropped_items",
    "turn",
    "gap_s",
    "smoothed_gap_s",
    "gap_before_s",
    "prompt_tokens",
    "answer_tokens",
    "answer_before_tokens",
    "deepest_known_uses",
    "least_gap_s",
    "finish",
    "kind",
    "hinted_turn",
    "new_before_items",
    "conversation_s",
    "part_of_item",
    "gap_after_finish_s",
    "fork_uses",
)
ITEM_FEATURES = (
    "items_to_end",
    "position",
    "uses_before",
    "item_gap_s",
    "is_new",
    "children",
    "item_age_s",
    "items_to_deepest_known",
    "items_to_end_before",
    "smoothed_item_gap_s",
)
N_REQUEST = len(REQUEST_FEATURES)
N_ITEM = len(ITEM_FEATURES)
N_FEATURES = N_REQUEST + N_ITEM

_ABSENT = -5.0
"""In place of a gap that there is not: below any."""

_SMOOTHING = 0.4

Float32Array = npt.NDArray[np.float32]
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Smooth = TypeVar("Smooth", float, Float32Array)


@dataclass(slots=True)
class Request:
    """One request of a conversation, as far as the next one of it needs to know.

    `fork_uses` are those of the last known item that others used, too, before their ways
    parted; `after_finish` has the conversation's smoothed gaps by how the answer before
    ended, and is one for all its requests.
    """

    serial: int
    time_s: float
    n_items: int
    known_items: int
    deepest_known_uses: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    item_tokens: int = 1
    finish: int = 0
    kind: int = 0
    hinted_turn: int = -1
    shared_items: int = 0
    n_before_items: int = 0
    turn: int = 0
    gap_s: float = 0.0
    smoothed: float = _ABSENT
    least: float = _ABSENT
    began_s: float = 0.0
    continues: bool = False
    gap_before_s: float | None = None
    answer_before_tokens: int = 0
    new_before_items: int = 0
    fork_uses: int = 0
    after_finish: dict[int, float] = field(default_factory=dict)


def log_count(value: float) -> float:
    """Of a count or a length; 0 for 0."""
    return log2(1.0 + value) if value > 0 else 0.0


def log_gap(gap_s: float) -> float:
    """Of a time between uses, to a tenth of a second."""
    return log2(max(gap_s, 0.0) + 0.1)


def follow(request: Request, before: Request | None, shared_items: int, known: bool) -> None:
    """Put `request` into the conversation of `before`, of which it shares leading items.

    It continues it if the caller says so (`known`), or if it shares half of it or all
    but its end.
    """
    request.began_s = request.time_s
    if before is None:
        return
    request.shared_items = shared_items
    request.n_before_items = before.n_items
    missing = before.n_items - shared_items
    if not (known or missing <= 2 or 2 * shared_items >= before.n_items):
        return
    request.continues = True
    request.gap_before_s = before.gap_s if before.continues else None
    request.answer_before_tokens = before.answer_tokens
    request.new_before_items = before.n_items - before.shared_items
    request.turn = before.turn + 1
    request.gap_s = request.time_s - before.time_s
    request.began_s = before.began_s
    gap = log_gap(request.gap_s)
    after = request.after_finish = before.after_finish
    after[before.finish] = _smoothed(after.get(before.finish, gap), gap)
    if before.turn == 0:
        request.smoothed = request.least = gap
    else:
        request.smoothed = _smoothed(before.smoothed, gap)
        request.least = min(before.least, gap)


def _smoothed(before: Smooth, now: Smooth) -> Smooth:
    return (1 - _SMOOTHING) * before + _SMOOTHING * now


def request_row(request: Request) -> Float32Array:
    """REQUEST_FEATURES."""
    n, n_before, continues = request.n_items, request.n_before_items, request.continues
    gap_before_s = request.gap_before_s
    return np.array(
        (
            log_count(n),
            log_count(request.known_items),
            log_count(n - request.known_items),
            request.shared_items / n_before if n_before else 0.0,
            log_count(n_before - request.shared_items) if n_before else -1.0,
            log_count(request.turn),
            log_gap(request.gap_s) if continues else _ABSENT,
            request.smoothed,
            _ABSENT if gap_before_s is None else log_gap(gap_before_s),
            log_count(request.prompt_tokens),
            log_count(request.answer_tokens),
            log_count(request.answer_before_tokens) if continues else -1.0,
            log_count(request.deepest_known_uses) if request.known_items else -1.0,
            request.least,
            request.finish,
            request.kind,
            log_count(request.hinted_turn),
            log_count(request.new_before_items) if continues else -1.0,
            log_count(request.time_s - request.began_s),
            request.prompt_tokens % request.item_tokens / request.item_tokens,
            request.after_finish.get(request.finish, _ABSENT) if request.finish else _ABSENT,
            log_count(request.fork_uses) if request.known_items else -1.0,
        ),
        np.float32,
    )


def item_rows(
    positions: IntArray,
    n_items: int,
    known_items: int,
    uses_before: npt.NDArray[np.int32],
    gap_s: FloatArray,
    age_s: FloatArray,
    children: npt.NDArray[np.int32],
    before: Float32Array,
) -> Float32Array:
    """ITEM_FEATURES of the items at `positions` of a chain, each column as of this use.

    `before` has them as of the last one.
    """
    columns = np.empty((N_ITEM, len(positions)), np.float32)
    unknown = (uses_before == 0).nonzero()[0]
    columns[0] = n_items - 1 - positions
    columns[1] = positions
    columns[2] = uses_before
    columns[3] = gap_s
    columns[3] -= 0.9
    columns[6] = age_s
    np.maximum(known_items - 1 - positions, 0, out=columns[7], casting="unsafe")
    columns[6, unknown] = 0.0
    columns[3, unknown] = 0.0
    for logged in (columns[:4], columns[6:8]):
        logged += 1.0
        np.log2(logged, out=logged)
    columns[4] = 0.0
    columns[5] = children
    columns[8] = before[:, 0]
    columns[3, unknown] = _ABSENT
    columns[4, unknown] = 1.0
    columns[8, unknown] = -1.0
    columns[9] = columns[3]
    again = (uses_before > 1).nonzero()[0]
    columns[9, again] = _smoothed(before[again, 9], columns[3, again])
    return columns.T

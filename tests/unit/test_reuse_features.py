"""What a row says of a conversation's pace, and of an item's."""

from __future__ import annotations

import numpy as np
import pytest

from blobstore.tiering.classifier import Classifier
from blobstore.tiering.policy import Use
from blobstore.tiering.reuse_features import (
    ITEM_FEATURES,
    N_REQUEST,
    REQUEST_FEATURES,
    Request,
    follow,
    item_rows,
    log_count,
    log_gap,
    request_row,
)

TOOL, END = 1, 2


def _said(request: Request, name: str) -> float:
    return float(request_row(request)[REQUEST_FEATURES.index(name)])


def _conversation(*told: tuple[float, int]) -> list[Request]:
    """Requests at these times, whose answers ended so."""
    requests: list[Request] = []
    for serial, (time_s, finish) in enumerate(told):
        request = Request(serial, time_s, n_items=4, known_items=4, finish=finish)
        follow(request, requests[-1] if requests else None, 4, known=True)
        requests.append(request)
    return requests


def test_gaps_are_told_apart_by_how_the_answer_before_ended() -> None:
    *_, tool, end = _conversation((0, TOOL), (10, END), (610, TOOL), (620, TOOL), (630, END))
    assert _said(tool, "gap_after_finish_s") == pytest.approx(log_gap(10.0))
    assert _said(end, "gap_after_finish_s") == pytest.approx(log_gap(600.0))


def test_a_gap_that_has_not_been_yet_is_below_any() -> None:
    for told in ((0, TOOL),), ((0, TOOL), (10, END)):
        assert _said(_conversation(*told)[-1], "gap_after_finish_s") < log_gap(0.0)


def test_without_hints_nothing_is_said_of_finishes() -> None:
    *_, last = _conversation((0, 0), (10, 0), (20, 0))
    assert _said(last, "gap_after_finish_s") < log_gap(0.0)


def test_conversations_do_not_share_their_gaps() -> None:
    slow = _conversation((0, TOOL), (600, TOOL))[-1]
    fast = _conversation((0, TOOL), (6, TOOL))[-1]
    assert _said(slow, "gap_after_finish_s") > _said(fast, "gap_after_finish_s")


def _classifier(*uses: tuple[float, list[int]]) -> Classifier[int]:
    classifier = Classifier[int](lambda item: item, seed=1)
    for time_s, items in uses:
        classifier.use(Use(items, 0, time_s))
    return classifier


def _last_sampled(classifier: Classifier[int]) -> np.ndarray:
    row: np.ndarray = classifier.snapshot().uses.features[-1]
    return row


def test_the_fork_is_the_last_item_that_others_used_too() -> None:
    classifier = _classifier((0, [1, 2, 3]), (5, [1, 2, 7]), (9, [1, 2, 3]))
    row = _last_sampled(classifier)
    assert row[REQUEST_FEATURES.index("fork_uses")] == log_count(2)


def test_a_chain_that_nobody_shares_has_no_fork() -> None:
    classifier = _classifier((0, [1, 2, 3]), (9, [1, 2, 3]))
    assert _last_sampled(classifier)[REQUEST_FEATURES.index("fork_uses")] == 0.0


def test_an_item_has_its_own_smoothed_gap() -> None:
    classifier = _classifier((0, [1]), (100, [1]), (110, [1]), (120, [1]))
    said = _last_sampled(classifier)[N_REQUEST + ITEM_FEATURES.index("smoothed_item_gap_s")]
    assert said == pytest.approx(0.36 * log_gap(100.0) + 0.64 * log_gap(10.0), rel=1e-5)


def test_a_new_item_has_no_gap_to_smooth() -> None:
    before = np.full((2, len(ITEM_FEATURES)), 3.0, np.float32)
    uses = np.array([0, 1], np.int32)
    gaps_s, ages_s = np.array([0.0, 8.0]), np.array([0.0, 8.0])
    children = np.zeros(2, np.int32)
    rows = item_rows(np.arange(2), 2, 1, uses, gaps_s, ages_s, children, before)
    new, known = rows[:, ITEM_FEATURES.index("smoothed_item_gap_s")]
    assert new < log_gap(0.0)
    assert known == pytest.approx(log_gap(8.0))

"""What all ranks must say alike is known when they have, and never before."""

from __future__ import annotations

import threading

import pytest

from blobstore.clients.vllm import agreement
from blobstore.clients.vllm.agreement import WAITS_MAX, Agreement
from blobstore.errors import InvalidRequest
from tests.support.polling import poll_until

JOIN_S = 20.0


def test_all_ranks_have_to_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "WAIT_S", 0.0)
    ranks = Agreement(3)
    for said in ({0: "so"}, {1: "so", 0: "so"}):
        ranks.hear(said)
        with pytest.raises(InvalidRequest, match="of 3 ranks have said"):
            ranks.agreed()
    ranks.hear({2: "so"})
    assert ranks.agreed() == "so"


@pytest.mark.parametrize("said", [{1: "otherwise"}, {0: "otherwise", 1: "otherwise"}])
def test_what_was_said_is_never_taken_back(said: dict[int, str]) -> None:
    ranks = Agreement(2)
    ranks.hear({0: "so"})
    ranks.hear(said)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="different ways: otherwise; so"):
            ranks.agreed()
        ranks.hear({1: "so"})


def test_a_question_waits_for_those_who_are_about_to_say_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agreement, "WAIT_S", JOIN_S)
    ranks, answers = Agreement(1), list[str]()
    asking = threading.Thread(target=lambda: answers.append(ranks.agreed()))
    asking.start()
    poll_until(lambda: ranks._waits < WAITS_MAX, JOIN_S)
    assert answers == []
    ranks.hear({0: "so"})
    asking.join(JOIN_S)
    assert answers == ["so"]


def test_those_who_never_say_it_are_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited = []
    ranks = Agreement(1)
    monkeypatch.setattr(ranks._changed, "wait_for", lambda *_: waited.append(1))
    for _ in range(2 * WAITS_MAX):
        with pytest.raises(InvalidRequest, match="0 of 1 ranks"):
            ranks.agreed()
    assert len(waited) == WAITS_MAX
    ranks.hear({0: "so"})
    assert ranks.agreed() == "so"

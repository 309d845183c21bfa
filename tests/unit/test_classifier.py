"""What is learned of conversations, and that all that is remembered stays bounded."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import numpy as np
import pytest

from blobstore.tiering.classifier import Classifier, ClassifierSettings, Fitted, Snapshot, fit
from blobstore.tiering.policy import Use
from blobstore.tiering.reuse_features import ITEM_FEATURES, N_FEATURES, N_REQUEST
from blobstore.tiering.reuse_samples import WatchedUses
from blobstore.tiering.shadow_cache import ShadowCache
from blobstore.tiering.tree_growth import TreeSettings

SETTINGS = ClassifierSettings(samples=2000)


class Chats:
    """Conversations of which those with an even number come back each 10 s, the others never."""

    def __init__(self, *, hints: bool = False, settings: ClassifierSettings = SETTINGS) -> None:
        self.classifier: Classifier[int] = Classifier(lambda item: item, 3, settings=settings)
        self.now_s = 0.0
        self._hints = hints

    def use(self, chat: int, turn: int) -> list[int]:
        """Chats have 4 new items a turn; what the caller says tells them apart, or the answer."""
        items = [chat * 1000 + at for at in range(4 * turn + 4)]
        kind = {0: "main", 1: "once"}[chat % 2] if self._hints else ""
        use = Use(
            items, 4 * turn, self.now_s, 16, 16 * len(items), 0 if self._hints else chat % 2 * 500,
            session=f"chat {chat}" if self._hints else "", turn=turn, kind=kind,
        )  # fmt: skip
        self.classifier.use(use)
        return items

    def run(self, n_chats: int = 120) -> None:
        for chat in range(n_chats):
            for back in range(min(chat + 1, 3)):
                if back == 0 or (chat - back) % 2 == 0:
                    self.use(chat - back, back)
                self.now_s += 10 / 3
        self.classifier.adopt(fit(self.classifier.snapshot()))


@pytest.mark.parametrize("hints", [False, True])
def test_those_that_come_back_are_told_from_those_that_do_not(hints: bool) -> None:
    chats = Chats(hints=hints)
    chats.run()
    back, never = chats.use(500, 0), chats.use(501, 0)
    now_s = chats.now_s + 5
    p_back, p_never = chats.classifier.p_reuse([back[2], never[2]], now_s, 30.0)
    assert p_back > 0.6
    assert p_never < 0.3
    worth = chats.classifier.worth([back[2], never[2]], now_s)
    assert worth[0] > 2 * worth[1]


def test_chances_grow_with_the_time_given() -> None:
    chats = Chats()
    chats.run()
    items = chats.use(500, 0)
    chances = [
        float(chats.classifier.p_reuse(items[:1], chats.now_s, within_s)[0])
        for within_s in (0.0, 1.0, 30.0, math.inf)
    ]
    assert chances == sorted(chances)
    assert chances[0] == 0
    assert chances[-1] <= 1


def test_nothing_is_kept_out_before_anything_was_learned() -> None:
    chats = Chats()
    items = chats.use(0, 0)
    assert chats.classifier.p_reuse(items, 1.0, 5.0).tolist() == [1.0] * 4
    order = chats.classifier.order(10)
    for at, item in enumerate(items):
        order.offer(item, float(at), 1)
    assert len(list(order.victims())) == 4


def test_unknown_items_are_judged_like_the_average() -> None:
    chats = Chats()
    chats.run()
    assert 0 <= float(chats.classifier.p_reuse([-5], chats.now_s, 10.0)[0]) <= 1
    assert np.isfinite(chats.classifier.worth([-5], chats.now_s)).all()
    assert chats.classifier.explain(-5, chats.now_s) == {"known": False}


def test_fits_are_due_after_some_uses_and_ever_less_often() -> None:
    settings = dataclasses.replace(SETTINGS, first_fit_uses=40, fit_every_uses=10)
    chats = Chats(settings=settings)
    due_at = []
    for n in range(1, 120):
        chats.use(n, 0)
        if chats.classifier.fit_due():
            due_at.append(n)
            chats.classifier.snapshot()
    assert due_at == [40, 45, 50, 56, 63, 70, 78, 87, 97, 107, 117]


def test_a_fit_survives_being_taken_apart() -> None:
    chats = Chats(hints=True)
    chats.run()
    fitted = fit(chats.classifier.snapshot())
    again = Fitted.from_parts(*fitted.to_parts())
    assert again.words == fitted.words
    rows = chats.classifier.snapshot().uses.features
    (classes, levels), (found_classes, found_levels) = fitted.classes(rows), again.classes(rows)
    assert np.array_equal(classes, found_classes)
    assert np.array_equal(levels, found_levels)
    assert np.array_equal(again.worth_per_s, fitted.worth_per_s)


@pytest.mark.parametrize("part", ["pooled", "cuts", "feature", "values", "centres", "period_of"])
def test_parts_that_do_not_fit_together_are_refused(part: str) -> None:
    chats = Chats()
    chats.run()
    arrays, values = fit(chats.classifier.snapshot()).to_parts()
    short = arrays[part][:-1] if part == "cuts" else arrays[part][..., :-1]
    for damaged in (short, arrays[part][None]):
        with pytest.raises(ValueError, match="fit together"):
            Fitted.from_parts({**arrays, part: damaged}, values)
    del arrays[part]
    with pytest.raises(ValueError, match="missing"):
        Fitted.from_parts(arrays, values)


def test_a_sealed_model_that_makes_no_sense_is_refused() -> None:
    chats = Chats()
    chats.run()
    arrays, values = fit(chats.classifier.snapshot()).to_parts()
    no_depth = {
        "feature": arrays["feature"][:, :0],
        "cut": arrays["cut"][:, :0],
        "values": arrays["values"][:, :1],
    }
    no_trees = {name: arrays[name][:0] for name in no_depth}
    endless = {"pooled": np.full_like(arrays["pooled"], np.inf)}
    negative = {"pooled": np.full(len(arrays["pooled"]), -1.0)}
    skipped = {"period_of": arrays["period_of"] * 2}
    backwards = {"period_of": arrays["period_of"].max() - arrays["period_of"]}
    for damage in (no_depth, no_trees, endless, negative, skipped, backwards):
        with pytest.raises(ValueError, match="fit together"):
            Fitted.from_parts(arrays | damage, values)
    with pytest.raises(ValueError, match="infinity"):
        Fitted.from_parts(arrays, values | {"n_samples": math.inf})


def test_words_that_a_model_file_cannot_hold_are_told_apart_from_none() -> None:
    chats = Chats()
    chats.run()
    for kind in ("two\nlines", "main"):
        chats.classifier.use(Use([1], 0, chats.now_s, 16, 16, kind=kind))
    fitted = fit(chats.classifier.snapshot())
    assert fitted.words == ("", "main")
    assert Fitted.from_parts(*fitted.to_parts()).words == fitted.words


def test_words_keep_their_meaning_over_a_restart() -> None:
    chats, later = Chats(hints=True), Chats(hints=True)
    chats.run()
    later.classifier.adopt(fit(chats.classifier.snapshot()))
    later.now_s = 1e6
    never, back = later.use(1, 0), later.use(2, 0)
    p_never, p_back = later.classifier.p_reuse([never[2], back[2]], later.now_s + 5, 30.0)
    assert p_back > p_never + 0.3


def test_an_answer_told_of_later_is_the_same_use() -> None:
    chats = Chats(hints=True)
    chats.use(0, 0)
    items = [0, 1, 2, 3, 4, 5]
    chats.classifier.use(Use(items, 4, 3.0, continues=True, finish="stop"))
    told = [chats.classifier.explain(item, 5.0) for item in items]
    assert [each["uses"] for each in told] == [1] * 6
    assert chats.classifier.stats()["identities"] == 6


def test_what_enters_before_its_use_is_told_is_not_used_twice() -> None:
    chats = Chats()
    order = chats.classifier.order(10)
    order.enter(0, 1)
    order.offer(0, 1.0, 1)
    chats.use(0, 0)
    assert chats.classifier.explain(0, 2.0)["uses"] == 1


def test_explain_says_what_is_thought_in_words_and_numbers() -> None:
    chats = Chats()
    chats.run()
    items = chats.use(500, 0)
    said = chats.classifier.explain(items[1], chats.now_s + 2)
    assert said["known"] is True
    assert said["age_s"] == pytest.approx(2)
    assert isinstance(said["p_reuse"], float)
    assert said["expected_reuse_s"] == pytest.approx(10, abs=9)
    assert isinstance(said["worth"], float)


def test_keys_that_are_seen_once_leave_little_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blobstore.tiering.item_table._GHOSTS_MIN", 1000)
    chats = Chats(settings=dataclasses.replace(SETTINGS, requests=64, sessions=16, words=8))
    for n in range(3000):
        items = [10 * n + at for at in range(3)]
        name = f"name {n}"
        chats.classifier.use(Use(items, 0, float(n), session=name, kind=name, finish=name))
        for item in items:
            chats.classifier.forget(item)
    stats = chats.classifier.stats()
    assert stats["identities"] <= 1001
    assert stats["samples"] <= 2000
    assert stats["sessions"] <= 16
    assert len(chats.classifier.snapshot().words) <= 8


@pytest.mark.parametrize("jump_s", [-1e6, 1e9])
def test_clock_jumps_are_survived(jump_s: float) -> None:
    chats = Chats()
    chats.run()
    chats.now_s += jump_s
    chats.run(20)
    items = chats.use(500, 0)
    assert np.isfinite(chats.classifier.worth(items, chats.now_s - 1e7)).all()
    assert (chats.classifier.p_reuse(items, chats.now_s, 10.0) >= 0).all()


def test_by_cost_later_positions_are_worth_more() -> None:
    chats = Chats()
    chats.run()
    by_cost: Classifier[int] = Classifier(lambda item: item, 3, objective="cost")
    by_cost.adopt(fit(chats.classifier.snapshot()))
    by_cost.use(Use(list(range(8)), 0, 0.0, item_tokens=53_900))
    plain: Classifier[int] = Classifier(lambda item: item, 3)
    plain.adopt(fit(chats.classifier.snapshot()))
    plain.use(Use(list(range(8)), 0, 0.0, item_tokens=53_900))
    ratio = by_cost.worth(range(8), 1.0) / plain.worth(range(8), 1.0)
    assert ratio == pytest.approx(np.arange(1, 9))


def test_a_cache_under_it_keeps_those_that_come_back() -> None:
    chats = Chats()
    chats.run()
    cache: ShadowCache[int] = ShadowCache(60, chats.classifier.order(60), lambda _: 1)
    n_hits = 0
    for n in range(200):
        chat = 1000 + n
        for which in (chat, chat - 3):
            if which == chat or which % 2 == 0:
                items = chats.use(which, 0)
                n_hits += cache.touch(items, chats.now_s)
                cache.take_in(items, chats.now_s)
            chats.now_s += 10 / 6
    assert n_hits > 300


@pytest.mark.parametrize("objective", ["tokens", "cost"])
def test_an_item_is_worth_the_same_whether_it_is_looked_at_alone_or_with_others(
    objective: Literal["tokens", "cost"],
) -> None:
    chats = Chats()
    chats.run()
    fitted = fit(chats.classifier.snapshot())
    classifier: Classifier[int] = Classifier(lambda item: item, 3, objective=objective)
    chain = list(range(100))
    classifier.use(Use(chain, 0, 0.0, item_tokens=5000))
    assert classifier.worth_of(classifier.slot_of(99, 0.0)) is None
    classifier.adopt(fitted)
    classifier.use(Use([1000, 1001], 0, 7.0))
    classifier.look_up([classifier.slot_of(99, 0.0)])
    slots = [classifier.slot_of(item, 0.0) for item in chain]
    judged = [slot for slot in slots if classifier.worth_of(slot) is not None]
    assert len(judged) == 32
    alone = [classifier.worth_of(slot) for slot in judged]
    assert alone == pytest.approx(classifier.worths(np.array(judged)).tolist())
    assert classifier.above(judged[1]) == judged[0]


def test_what_was_used_again_is_worth_more_before_samples_say_anything() -> None:
    rows = np.zeros((200, N_FEATURES), np.float32)
    used = N_REQUEST + ITEM_FEATURES.index("uses_before")
    rows[::2, used] = 1.0  # the logarithm of one use and one
    watched = WatchedUses(rows, np.full(200, 0.01), np.zeros(200, np.bool_), np.ones(200))
    fitted = fit(Snapshot(watched, TreeSettings(), seed=1))
    again, new = fitted.trees.log_ratios(rows[:2])
    assert again - new == pytest.approx(1.0, abs=0.05)

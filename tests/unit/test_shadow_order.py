"""A shadow's order: judged as the items of the tiers, told nothing of its own."""

from __future__ import annotations

from blobstore.tiering.classifier import Classifier
from blobstore.tiering.policy import Use
from blobstore.tiering.shadow_cache import ShadowCache
from blobstore.tiering.shadow_order import ShadowOrder


def _identity(item: str) -> int:
    return sum(item.encode())


def _use(cache: ShadowCache[int], order: ShadowOrder[str], items: list[str], now_s: float) -> None:
    identities = [_identity(item) for item in items]
    order.see(items, identities)
    cache.use(Use(identities, cache.n_held(identities), now_s))


def test_items_leave_by_what_the_classifier_knows_of_their_uses() -> None:
    classifier: Classifier[str] = Classifier(_identity)
    order = classifier.shadow_order()
    cache: ShadowCache[int] = ShadowCache(3, order, lambda _: 1)
    for now_s, item in enumerate("abcad"):
        classifier.use(Use([item], 0, float(now_s)))
    for now_s, item in enumerate("abcd"):  # the shadow is behind, and has not seen a twice
        _use(cache, order, [item], float(now_s))
    assert {item for item in "abcd" if _identity(item) in cache} == set("acd")


def test_what_is_in_no_tier_any_more_is_judged_by_what_is_remembered() -> None:
    classifier: Classifier[str] = Classifier(_identity)
    order = classifier.shadow_order()
    cache: ShadowCache[int] = ShadowCache(2, order, lambda _: 1)
    classifier.use(Use(["b"], 0, 1.0))
    classifier.use(Use(["a"], 0, 5.0))
    for item in "ab":
        classifier.forget(item)
        _use(cache, order, [item], 5.0)
    _use(cache, order, ["never told of"], 6.0)
    assert _identity("b") not in cache
    assert _identity("a") in cache


def test_only_what_the_shadow_holds_is_remembered() -> None:
    classifier: Classifier[str] = Classifier(_identity)
    order = classifier.shadow_order()
    cache: ShadowCache[int] = ShadowCache(3, order, lambda _: 1)
    for second in range(200):
        items = [chr(1000 + 10 * second + at) for at in range(5)]  # more than there is room for
        classifier.use(Use(items, 0, float(second)))
        _use(cache, order, items, float(second))
    assert len(order._slots) == len(cache) == 3

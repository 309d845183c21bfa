"""What `blobstore explain` says about one blob, line by line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from blobstore.cli.output import duration, printable
from blobstore.explanation import KEPT
from blobstore.reasons import REFUSED, sentence
from blobstore.units import format_size

Facts = Mapping[str, Any]
Line = tuple[str, str]
"""A label, empty where it is that of the line before, and what is said."""

TIERS = {"dram": "DRAM", "ssd": "SSD"}

_IN = {"dram": "in DRAM", "ssd": "on SSD"}

_ENTERS = {"dram": ("put", "ssd>dram"), "ssd": ("dram>ssd",)}
"""The events with which a blob comes into each tier."""

ORDERS = {
    "ours": "what is worth least leaves first",
    "lru": "the least recently used leaves first",
    "lru2": "what was used twice longest ago leaves first",
    "fifo": "what came first leaves first",
    "lfu": "the least often used leaves first",
    "lfuda": "the least often used leaves first, and old uses fade",
    "arc": "what was used once and what was used again compete for room",
    "s3fifo": "what is not used again soon leaves first",
    "wtinylfu": "what is used less often than what comes leaves first",
    "gdsf": "the least often used for its size leaves first",
}
"""What each policy goes by."""

_SAID_ELSEWHERE = {
    "policy", "policy_why", "in_force", "known", "class", "uses", "age_s", "gap_s", "children",
    "p_reuse", "expected_reuse_s", "worth", "floor", "admission",
}  # fmt: skip
"""Of a decision: what has a sentence of its own."""


def lines(facts: Facts) -> Iterator[Line]:
    """All of it, for a person who knows what a blob and a tier are, and nothing else."""
    if not facts["known"]:
        yield "where", "in no tier: it has left, and only what follows is remembered"
        yield from _labelled("story", _story(facts["story"]))
        return
    yield "blob", _size(facts)
    yield from _labelled("where", _where(facts))
    if facts["session"]:
        yield "session", _session(facts["session"])
    yield from _labelled("story", _story(facts["story"]))
    decision = facts["decision"]
    if decision:
        yield from _labelled("expected", _expected(decision, facts["tiers"]))
        yield from _labelled("policy", _policy(decision, facts["tiers"]))
        yield from _labelled("beside", _beside(decision))
    yield from _labelled("next", _next(facts))


def _labelled(label: str, texts: Iterator[str]) -> Iterator[Line]:
    for text in texts:
        yield label, text
        label = ""


def _size(facts: Facts) -> str:
    n = facts["children"]
    below = f"{n:,} blobs continue it" if n > 1 else "one blob continues it"
    return (
        f"{facts['tokens']:,} tokens, {format_size(facts['nbytes'])}, {facts['retention']}; "
        f"number {facts['depth']:,} of its chain, {below if n else 'the end of it'}"
    )


def _where(facts: Facts) -> Iterator[str]:
    if facts["hole"]:
        yield "in no tier: its bytes were lost, and it is known because others continue it"
    for tier in facts["tiers"]:
        ago_s = _since(tier, facts["story"])
        since = f"for {duration(ago_s)}" if ago_s is not None else "since before what is remembered"
        yield f"{_IN.get(tier, tier)} {since}"
    yield f"used {duration(facts['idle_s'])} ago"
    first_in_s = facts["standing"].get("first_in_s")
    if first_in_s is not None:
        when = f" in {duration(first_in_s)}" if first_in_s else ""
        yield f"its context goes on as another one: unless it is used it leaves first{when}"


def _since(tier: str, story: Sequence[Facts]) -> float | None:
    """How long it has been in a tier where it is."""
    came = [event["ago_s"] for event in story if event["what"] in _ENTERS.get(tier, ())]
    return min(came, default=None)


def _session(session: Facts) -> str:
    said = [printable(str(session.get("session", "")))]
    if session.get("turn", -1) >= 0:
        said.append(f"turn {session['turn']:,}")
    if session.get("idle_s") is not None:
        said.append(f"silent for {duration(session['idle_s'])}")
    if session.get("gap_s"):
        said.append(f"a request every {duration(session['gap_s'])} or so")
    return ", ".join(said)


def _story(story: Sequence[Facts]) -> Iterator[str]:
    for event in story:
        told = printable(sentence(event["what"], event["why"]))
        yield f"{duration(event['ago_s'])} ago it {told}"
    if not story:
        yield "nothing is remembered: it has not moved since the start, or long ago"


def _expected(decision: Facts, tiers: Sequence[str]) -> Iterator[str]:
    if decision.get("known") is False:
        yield "nothing: the classifier has not met it since it started"
    if "p_reuse" in decision:
        chance = f"{_share(decision['p_reuse'])} to be used again"
        if decision.get("expected_reuse_s") is not None:
            chance += f", half of that within {duration(decision['expected_reuse_s'])}"
        yield chance
    if "class" in decision:
        yield f"kind: {decision['class']}"
    if "uses" in decision:
        yield _habits(decision)
    if "worth" in decision:
        yield from _worth(decision["worth"], decision.get("floor", {}), tiers)


def _habits(decision: Facts) -> str:
    said = _count(decision["uses"], "use")
    if decision.get("gap_s") is not None:
        said += f", the last {duration(decision['gap_s'])} after the one before"
    return said


def _worth(worth: float, floor: Facts, tiers: Sequence[str]) -> Iterator[str]:
    yield f"worth {worth:.3g} hits for each block and second that it is kept"
    for tier in tiers:
        least = floor.get(tier)
        if least is not None:
            name, compared = TIERS.get(tier, tier), "more than" if worth > least else "no more than"
            yield f"that is {compared} the next to leave {name}, which is worth {least:.3g}"


def _policy(decision: Facts, tiers: Sequence[str]) -> Iterator[str]:
    in_force = decision.get("in_force", {})
    names = [in_force[tier] for tier in tiers if tier in in_force]
    for tier, name in zip(tiers, names, strict=False):
        where = "" if len(set(names)) == 1 else f"in {TIERS.get(tier, tier)}, "
        yield f"{where}{name} is in force: {ORDERS.get(name, 'it has an order of its own')}"
        if not where:
            break
    if decision.get("policy_why"):
        yield f"and not the one that is wanted: {decision['policy_why']}"


def _share(part: float) -> str:
    if 0.995 <= part < 1:
        return "over 99%"
    return f"{part:.0%}" if part == 0 or part >= 0.01 else "under 1%"


def _beside(decision: Facts) -> Iterator[str]:
    """What a policy says that has no sentence here."""
    for name, value in decision.items():
        if name not in _SAID_ELSEWHERE:
            yield printable(f"{name.replace('_', ' ')}: {_value(name, value)}")


def _value(name: str, value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{inner} {_value(inner, leaf)}" for inner, leaf in value.items())
    if name.endswith("_s") and isinstance(value, int | float):
        return duration(value)
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _next(facts: Facts) -> Iterator[str]:
    for tier in facts["tiers"]:
        if tier in facts["kept"]:
            yield _standing(tier, facts)
    if "dram" in facts["tiers"] and "ssd" not in facts["tiers"]:
        yield _without_ssd(facts)
    for tier, keys in facts["next"].items():
        coldest = ", ".join(key[:12] for key in keys) or "nothing may"
        yield f"next to leave {TIERS.get(tier, tier)}: {coldest}"


def _standing(tier: str, facts: Facts) -> str:
    name = TIERS.get(tier, tier)
    kept = facts["kept"][tier]
    if kept:
        return f"may not leave {name} now: {'; '.join(_kept(code, facts) for code in kept)}"
    keys = facts["next"].get(tier, [])
    if facts["key"] in keys:
        before = keys.index(facts["key"])
        turn = f"after {_count(before, 'other')}" if before else "before all others"
        return f"leaves {name} {turn} when room is needed"
    return f"may leave {name} when room is needed, after others"


def _kept(code: str, facts: Facts) -> str:
    said = KEPT.get(code, code)
    if code == "client_pin" and facts.get("client_pin_s") is not None:
        said += f" for another {duration(facts['client_pin_s'])}"
    return said


def _without_ssd(facts: Facts) -> str:
    """What becomes of a blob that is in DRAM alone."""
    if facts["retention"] == "volatile":
        return "its bytes are dropped then: volatile blobs never go to SSD"
    if "ssd" not in facts["next"]:
        return "its bytes are dropped then: there is no SSD tier"
    standing = facts["standing"]
    if standing.get("first_in_s") == 0:
        return "its bytes are dropped then: its context goes on as another one"
    if facts["dirty"] or standing.get("coming"):
        return "it is being written to SSD"
    if standing.get("refused_ago_s") is not None:
        ago = duration(standing["refused_ago_s"])
        return f"its bytes are dropped then: it was not let onto SSD {ago} ago"
    admission = facts["decision"].get("admission") or {}
    if admission.get("verdict") == "refuse":
        why = REFUSED["ssd"].get(admission["reason"], admission["reason"])
        return f"its bytes are dropped then, by what is known now: {why}{_measured(admission)}"
    if admission.get("verdict") == "admit":
        return "it is written to SSD before, by what is known now"
    return "whether it is written to SSD before is decided then"


def _measured(admission: Facts) -> str:
    """The chance of another use beside the one that is wanted, if the decision goes by them."""
    if admission["reason"] != "unlikely":
        return ""
    return (
        f" ({admission['p_reuse']:.1%} to be used within the time that it would stay on SSD, "
        f"and {admission['threshold']:.1%} is wanted)"
    )


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"

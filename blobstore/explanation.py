"""Everything there is to say about one blob: where it is, why, and what would happen to it next.

Joins what the index, the stories and the policy in force know. Facts only, as plain
values; the command line puts them into words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, Protocol

from blobstore.index import Record, Retention
from blobstore.listing import blob_facts
from blobstore.mover import written_along
from blobstore.stories import Stories
from blobstore.tiering.policy import Policy

NEXT_SHOWN = 3
"""Of those that would leave a tier next."""
LOOKED_AT_MAX = 4096
"""Of those in the order of a tier, of whom many may be kept: bounds how long others wait."""


class Decides(Protocol):
    """What has the say about who leaves which tier."""

    def explain(
        self, item: Record, now_s: float, chain: Sequence[Record] = (), nbytes: int = 1
    ) -> dict[str, object]:
        """What it makes of one blob, with which a `chain` of `nbytes` would be written to SSD."""
        ...


def explained(
    namespace_id: bytes,
    key: bytes,
    record: Record | None,
    now_s: float,
    stories: Stories,
    plan: Decides,
    leaving: Mapping[str, Sequence[Record]],
    session: Mapping[str, object],
    standing: Mapping[str, object],
    pinned_s: float | None = None,
) -> dict[str, Any]:
    """All about one blob; {} if it is not known and nothing is remembered of it.

    Of a blob that is gone, whose `record` is None, only its story may be left. `leaving` is
    what `leaving_next` says, `session` what is known of the session that the blob
    belongs to, if any, and `standing` what the mover has decided (`Mover.standing`), if there
    is one; `pinned_s` for how long yet a client has pinned it, if one has.
    """
    story = stories.of(namespace_id, key)
    if record is None:
        names = {"namespace": namespace_id.hex(), "key": key.hex()}
        return {**names, "known": False, "story": story} if story else {}
    pinned = pinned_s is not None
    return {
        "namespace": namespace_id.hex(),
        **blob_facts(record, now_s),
        "known": True,
        "hole": record.hole,
        "children": sum(1 for _ in record.children()),
        "story": story,
        "kept": {
            "dram": kept_in_dram(record, waits=bool(standing.get("waits")), pinned=pinned),
            "ssd": kept_on_ssd(record, pinned=pinned),
        },
        "client_pin_s": pinned_s,
        "standing": dict(standing),
        "session": dict(session),
        "decision": _decision(plan, record, leaving, now_s) if record.held else {},
        "next": {tier: [each.key.hex() for each in first] for tier, first in leaving.items()},
    }


def leaving_next(
    dram: Policy[Record], ssd: Policy[Record] | None = None
) -> dict[str, list[Record]]:
    """By tier, those that would leave it next: an order may have some that are kept now."""
    # What waits for a decision may go, and what does not is in no order if it is the only copy.
    leaving = {"dram": _first(dram, partial(kept_in_dram, waits=True))}
    if ssd is not None:
        leaving["ssd"] = _first(ssd, kept_on_ssd)
    return leaving


def kept_in_dram(record: Record, *, waits: bool, pinned: bool = False) -> list[str]:
    """What keeps its bytes in DRAM, whatever they are worth: codes of `KEPT`; [] if it may go.

    `waits`: it will be decided before it goes whether it is written to SSD. `pinned`: one of
    its pins is a client's.
    """
    return list(_keep_in_dram(record, waits, pinned)) if record.packed else []


def kept_on_ssd(record: Record, *, pinned: bool = False) -> list[str]:
    """The same for SSD."""
    return list(_keep_on_ssd(record, pinned)) if record.ssd is not False else []


KEPT = {
    "client_pin": "pinned by a client",
    "pinned": "readers, writers or transfers hold it",
    "continued": "blobs that continue it are there",
    "dirty": "it is to be written to SSD first",
    "loading": "it is on its way",
    "only_copy": "it is the only copy, and others need it",
    "durable": "it was promised to be kept",
}
"""Why a blob may not leave a tier now."""


def _keep_in_dram(record: Record, waits: bool, pinned: bool) -> Iterator[str]:
    yield from _pins(record.pins, pinned)
    if record.dram_children:
        yield "continued"
    if record.dirty:
        yield "dirty"
    if record.fill is not None:
        yield "loading"
    if record.ssd is False and not waits:
        if record.retention is Retention.DURABLE:
            yield "durable"
        elif record.heirs or (record.has_children and not record.dram_children):
            yield "only_copy"


def _keep_on_ssd(record: Record, pinned: bool) -> Iterator[str]:
    if record.has_children:
        yield "continued"
    if record.retention is Retention.DURABLE:
        yield "durable"
    yield from _pins(record.pins + record.heirs, pinned)
    if record.dirty:
        yield "dirty"
    if record.fill is not None:
        yield "loading"


def _pins(n: int, pinned: bool) -> Iterator[str]:
    if pinned:
        yield "client_pin"
    if n > pinned:
        yield "pinned"


def _first(policy: Policy[Record], kept: Callable[[Record], list[str]]) -> list[Record]:
    looked_at = islice(policy.victims(), LOOKED_AT_MAX)
    return list(islice((record for record in looked_at if not kept(record)), NEXT_SHOWN))


def _decision(
    plan: Decides, record: Record, leaving: Mapping[str, Sequence[Record]], now_s: float
) -> dict[str, object]:
    """What the plan makes of a blob, beside the worth of those that would leave next."""
    chain = written_along(record, LOOKED_AT_MAX)
    decision = plan.explain(record, now_s, chain, sum(node.nbytes for node in chain))
    if "floor" in decision:
        decision["floor"] = {
            tier: plan.explain(first[0], now_s).get("worth") if first else None
            for tier, first in leaving.items()
        }
    return decision

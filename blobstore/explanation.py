"""Everything there is to say about one blob: where it is, why, and what would happen to it next.

Joins what the index, the stories and the policy in force know. Facts only, as plain
values; the command line puts them into words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Protocol

from blobstore.index import Record, Retention
from blobstore.listing import blob_facts
from blobstore.stories import Stories
from blobstore.tiering.policy import Policy

NEXT_SHOWN = 3
"""Of those that would leave a tier next."""


class Decides(Protocol):
    """What has the say about who leaves which tier."""

    @property
    def dram(self) -> Policy[Record]:
        """The order in which blobs leave DRAM."""
        ...

    @property
    def ssd(self) -> Policy[Record] | None:
        """The order in which blobs leave SSD; None without that tier."""
        ...

    def explain(self, item: Record, now_s: float) -> dict[str, object]:
        """What it makes of one blob."""
        ...


def explained(
    namespace_id: bytes,
    key: bytes,
    record: Record | None,
    now_s: float,
    stories: Stories,
    plan: Decides,
    session: Mapping[str, object],
    standing: Mapping[str, object],
) -> dict[str, Any]:
    """All about one blob; {} if it is not known and nothing is remembered of it.

    Of a blob that is gone, whose `record` is None, only its story may be left. `session`
    is what is known of the session that the blob belongs to, if any, and `standing` what
    the mover has decided (`Mover.standing`), if there is one.
    """
    story = stories.of(namespace_id, key)
    if record is None:
        names = {"namespace": namespace_id.hex(), "key": key.hex()}
        return {**names, "known": False, "story": story} if story else {}
    return {
        "namespace": namespace_id.hex(),
        **blob_facts(record, now_s),
        "known": True,
        "hole": record.hole,
        "children": sum(1 for _ in record.children()),
        "story": story,
        "kept": {
            "dram": kept_in_dram(record, waits=bool(standing.get("waits"))),
            "ssd": kept_on_ssd(record),
        },
        "standing": dict(standing),
        "session": dict(session),
        "decision": plan.explain(record, now_s) if record.held else {},
        "next": {
            "dram": _first(plan.dram),
            **({"ssd": _first(plan.ssd)} if plan.ssd is not None else {}),
        },
    }


def kept_in_dram(record: Record, *, waits: bool) -> list[str]:
    """What keeps its bytes in DRAM, whatever they are worth: codes of `KEPT`; [] if it may go.

    `waits`: it will be decided before it goes whether it is written to SSD.
    """
    return list(_keep_in_dram(record, waits)) if record.packed else []


def kept_on_ssd(record: Record) -> list[str]:
    """The same for SSD."""
    return list(_keep_on_ssd(record)) if record.ssd is not False else []


KEPT = {
    "pinned": "readers, writers or transfers hold it",
    "continued": "blobs that continue it are there",
    "dirty": "it is to be written to SSD first",
    "loading": "it is on its way",
    "only_copy": "it is the only copy, and others need it",
    "durable": "it was promised to be kept",
}
"""Why a blob may not leave a tier now."""


def _keep_in_dram(record: Record, waits: bool) -> Iterator[str]:
    if record.pins:
        yield "pinned"
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


def _keep_on_ssd(record: Record) -> Iterator[str]:
    if record.has_children:
        yield "continued"
    if record.retention is Retention.DURABLE:
        yield "durable"
    if record.pins or record.heirs:
        yield "pinned"
    if record.dirty:
        yield "dirty"
    if record.fill is not None:
        yield "loading"


def _first(policy: Policy[Record]) -> list[str]:
    return [record.key.hex() for record in islice(policy.victims(), NEXT_SHOWN)]

"""Why blobs move or are kept out: each reason's code, as counters have it, and what it means.

The codes are labels of metrics, so there are few of them and they stay. The meanings are
the ends of sentences that people read.
"""

from __future__ import annotations

from collections.abc import Mapping

MOVED: Mapping[str, Mapping[str, str]] = {
    "dram>ssd": {
        "room": "SSD had free room and write budget left when the blob was sealed",
        "durable": "the writer asked for it to be durable",
        "worth": "it was about to leave DRAM, and worth its room on SSD",
        "repair": "its copy on SSD was damaged",
        "retry": "the disk had refused it before",
        "diverged": "a model runner made it anew, with other bytes than those on SSD",
        "close": "the daemon was stopping",
        "asked": "a client asked for it to leave DRAM",
    },
    "ssd>dram": {
        "get": "a reader asked for it",
        "prefetch": "a client said that it would ask for it",
    },
    "none>dram": {
        "rebuilt": "a model runner made it again from its text",
    },
    "dram>none": {
        "kept_on_ssd": "room was needed, and SSD keeps a copy",
        "refused": "room was needed, and SSD did not keep it",
        "no_ssd": "room was needed, and there is no SSD tier",
        "volatile": "room was needed, and volatile blobs never go to SSD",
        "unsaved": "room was needed, and the disk had failed to take it",
        "superseded": "room was needed, and its context goes on as another one",
        "asked": "a client had it dropped",
        "corrupt": "the copy failed its digest",
    },
    "ssd>none": {
        "room": "room was needed on SSD, and it was worth least there",
        "superseded": "room was needed on SSD, and its context goes on as another one",
        "asked": "a client had it dropped",
        "corrupt": "the copy failed its digest",
        "diverged": "a model runner made it anew, with other bytes",
    },
}  # fmt: skip
"""By crossing; "none" is where a copy goes that is given up, whatever other copies there are."""

REFUSED: Mapping[str, Mapping[str, str]] = {
    "ssd": {
        "unlikely": "it is not likely enough to be used again",
        "worth_less": "what would have to leave SSD for it is worth more",
        "budget": "the write budget was spent",
        "parent": "what it continues is not on SSD, so it would be of no use there",
        "too_large": "it is larger than the tier",
        "full": "nothing on SSD might leave for it",
        "failing": "the disk was refusing writes",
        "superseded": "its context goes on as another one",
    },
    "dram": {
        "budget": "the budget for loading ahead was spent",
        "no_room": "everything in DRAM was in use",
    },
}
"""By tier."""

_CROSSINGS = {
    "put": "was put into DRAM",
    "dram>ssd": "was written to SSD",
    "ssd>dram": "was loaded into DRAM",
    "none>dram": "came back into DRAM",
    "diverged": "was made with other bytes than before",
    "dram>none": "left DRAM",
    "ssd>none": "left SSD",
    "refused ssd": "was not let onto SSD",
    "refused dram": "was not loaded into DRAM",
}


def sentence(what: str, why: str) -> str:
    """One event of a story in words; what is not known is given as it is.

    `why` is a code, or a code with a detail ("unlikely: p 0.03 < 0.12"), or else plain words.
    """
    kind, _, tier = what.partition(" ")
    meanings = REFUSED.get(tier, {}) if kind == "refused" else MOVED.get(what, {})
    told = _CROSSINGS.get(what, what)
    code, _, detail = why.partition(": ")
    if code in meanings:
        return f"{told}: {meanings[code]}" + (f" ({detail})" if detail else "")
    return f"{told}: {why}" if why else told

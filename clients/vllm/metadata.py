"""What the scheduler tells the workers to do, and what they tell it of how that went.

Plain values: vLLM carries them between its processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

Blocks = Sequence[Sequence[int]]
"""Ids of an engine's blocks, for each of its cache groups that are stored."""


@dataclass(slots=True)
class Load:
    """Blobs to be read into a request's blocks before the engine runs it.

    `keys` are those of consecutive blobs, packed; tokens from `skip` of the first blob on
    are wanted. `blocks` are those of the blobs. With `stream` some have yet to come
    from SSD. No keys: nothing can be read, and the request is to hear so.
    """

    request_id: str
    namespace: bytes
    keys: bytes
    key_bytes: int
    skip: int
    blocks: Blocks
    hint: dict[str, str | int]
    stream: bool


@dataclass(slots=True)
class Save:
    """Blobs of a request that are whole once this step has run.

    `first` is the number of the first one, and `parent` the key of the blob before it.
    """

    request_id: str
    namespace: bytes
    keys: bytes
    key_bytes: int
    parent: bytes
    first: int
    blocks: Blocks
    retention: str
    ttl_s: float
    hint: dict[str, str | int]


@dataclass(slots=True)
class StepPlan:
    """All for one step of the engine; an `idle` one computes nothing.

    `waiting`: some request waits for the store's answer, or for what comes from its SSD.
    `at_once`: other engines go in step with this one, so not even an idle step may wait.
    """

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    idle: bool = False
    waiting: bool = False
    at_once: bool = False


@dataclass(slots=True)
class Outcomes:
    """What went wrong at a worker since it was last asked.

    `loaded` are the leading blobs of each load that failed which could be read, `unsaved`
    the number of the first blob of each request that could not be saved.
    """

    loaded: dict[str, int] = field(default_factory=dict)
    unsaved: dict[str, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.loaded or self.unsaved)

    def merge(self, other: Outcomes) -> None:
        """Add another rank's: what all of them have is what there is."""
        for held, more in ((self.loaded, other.loaded), (self.unsaved, other.unsaved)):
            for request_id, blobs in more.items():
                held[request_id] = min(blobs, held.get(request_id, blobs))

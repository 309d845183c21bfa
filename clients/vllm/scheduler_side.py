"""The connector's half in the engine's scheduler: what to load for a request, what to save.

Nothing here blocks or raises. Knows vLLM's objects by their attributes only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from blobstore.clients.vllm.faults import Faults
from blobstore.clients.vllm.geometry import Group, blocks_of
from blobstore.clients.vllm.lookups import Lookup, Lookups, Spaces
from blobstore.clients.vllm.metadata import Blocks, Load, Outcomes, Save, StepPlan
from blobstore.clients.vllm.options import Options
from blobstore.clients.vllm.reasons import ABSENT
from blobstore.clients.vllm.recorder import Recorder
from blobstore.clients.vllm.tracked import Tracked
from blobstore.clients.vllm.wishes import Turns, Wishes
from blobstore.errors import InvalidRequest

BACKLOG_BYTES = 64 << 20
"""How much of what earlier steps computed is saved in one step: it is copied while all wait."""
FAILED_SAVES_MAX = 5
"""After so many failures of its saves, nothing more of a request is saved."""
RETRY_S = 0.25
"""After the first of them; twice as long after each other one."""

PREEMPTED = "preempted"
"""Why a request stopped that the engine will soon go on with."""
NULL_BLOCK = 0
"""vLLM's block that stands for those that slid out of a window."""

_PARAMS = "kv_transfer_params"

Table = Sequence[Sequence[int]]
"""A request's block ids, for each of the engine's cache groups."""


class Identified(Spaces, Protocol):
    """As Identity: of what sizes blobs and blocks are, too."""

    @property
    def blob_tokens(self) -> int:
        """Tokens per blob."""

    @property
    def hash_tokens(self) -> int:
        """Tokens per block hash."""

    @property
    def blob_bytes(self) -> int:
        """Of a whole blob."""

    @property
    def groups(self) -> tuple[Group, ...]:
        """Of the stored layers."""


class SchedulerSide:
    """Answers the scheduler, and plans each step for the workers.

    An engine that only `reads` saves nothing, one that only `writes` loads nothing.
    """

    def __init__(
        self,
        identity: Identified,
        lookups: Lookups,
        options: Options,
        recorder: Recorder,
        faults: Faults,
        *,
        reads: bool = True,
        writes: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._reads = reads
        self._writes = writes
        self._identity = identity
        self._lookups = lookups
        self._options = options
        self._recorder = recorder
        self._faults = faults
        self._turns = Turns()
        self._requests: dict[str, Tracked] = {}
        self._loads: list[Load] = []

    def add(self, request: Any) -> None:
        """A request is new; what it wishes is read now."""
        self._faults.guarded(None, self._track, request)

    def matched(self, request: Any, local_tokens: int) -> int | None:
        """How many tokens can be loaded beyond the engine's own `local_tokens`; None: ask again."""
        return self._faults.guarded(0, self._matched, request, local_tokens)

    def tiers(self, request: Any, tokens: int) -> tuple[int, int]:
        """How many of the `tokens` that are loaded for a request were in DRAM, and on SSD."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return tokens, 0
        return self._faults.guarded((tokens, 0), self._split, tracked, tokens)

    def allocated(self, request: Any, table: Table, tokens: int) -> None:
        """The scheduler gave a request blocks, of which `tokens` are to be loaded."""
        if tokens > 0:
            # Without a load that ends, the request would wait for ever.
            nothing = Load(request.request_id, b"", b"", 8, 0, (), {}, stream=False)
            load = self._faults.guarded(nothing, self._load, nothing, table, tokens)
            self._loads.append(load)

    def plan(self, output: Any) -> StepPlan:
        """What the workers are to do in the step that `output` describes."""
        self._lookups.next_step()
        loads, self._loads = self._loads, []
        idle = not output.num_scheduled_tokens
        if not self._lookups.usable:
            return StepPlan(loads, idle=idle)
        saves, now_s = [], self._clock()
        for request_id, tokens in output.num_scheduled_tokens.items():
            tracked = self._requests.get(request_id)
            if tracked is not None and tracked.saving and now_s >= tracked.saves_from_s:
                saves += self._saves(tracked, tokens, output)
        return StepPlan(loads, saves, idle)

    def heard(self, outcomes: Outcomes) -> None:
        """What the workers could not do."""
        self._faults.guarded(None, self._heard, outcomes)

    def finished(self, request: Any, finish: str) -> None:
        """A request has ended; `finish` says why."""
        tracked = self._requests.pop(request.request_id, None)
        if tracked is not None and tracked.lookup is not None and finish:
            tell = self._lookups.tell
            self._faults.guarded(None, tell, tracked.lookup, request.block_hashes, finish)

    def start_anew(self) -> None:
        """From now on nothing that was stored before is found.

        Requests that run are not saved any more: they may be of the old weights in part.
        """
        self._lookups.start_anew()
        for tracked in self._requests.values():
            tracked.lookup, tracked.saving = None, False

    def _track(self, request: Any) -> Tracked:
        wishes = Wishes(self._options.retention)
        try:
            wishes = Wishes.of(
                getattr(request, "kv_transfer_params", None),
                retention=self._options.retention,
                kind=self._options.kind,
                session=getattr(request, "session_id", None) or "",
            )
            self._faults.note(_PARAMS, "")
        except InvalidRequest as error:
            wishes = Wishes(no_store=True, no_load=True)  # as one of them may have asked for
            self._faults.note(_PARAMS, f"{error}; the request is neither stored nor read")
        wishes = replace(
            wishes,
            no_load=wishes.no_load or not self._reads,
            no_store=wishes.no_store or not self._writes,
            hint=self._turns.numbered(wishes.hint),
        )
        tracked = self._requests[request.request_id] = Tracked(request, wishes)
        return tracked

    def _matched(self, request: Any, local_tokens: int) -> int | None:
        tracked = self._requests.get(request.request_id) or self._track(request)
        most = self._most(tracked)
        if not most and tracked.wishes.no_store:
            return 0
        wanted = most * self._identity.blob_tokens > local_tokens
        lookup = self._lookup(tracked)
        if request.num_preemptions > tracked.preemptions:
            tracked.preemptions = request.num_preemptions
            self._lookups.tell(lookup, request.block_hashes, PREEMPTED)
        if not self._lookups.settled(lookup, request.block_hashes):
            return None if wanted else 0
        end = min(lookup.hit.blobs, most) * self._identity.blob_tokens
        tracked.promised = range(local_tokens, max(local_tokens, end))
        if wanted:
            self._settle(lookup, len(tracked.promised))
        return len(tracked.promised)

    def _heard(self, outcomes: Outcomes) -> None:
        for request_id, blobs in outcomes.loaded.items():
            tracked = self._requests.get(request_id)
            if tracked is not None:
                # Fewer than were promised: so it cannot be promised the same for ever.
                first = tracked.promised.start // self._identity.blob_tokens
                tracked.limit = first + blobs
                tracked.stored = None
                if tracked.lookup is not None:
                    tracked.lookup.doubt()
        for request_id, first in outcomes.unsaved.items():
            tracked = self._requests.get(request_id)
            if tracked is not None:
                tracked.stored = min(tracked.stored or 0, first)
                tracked.saves_from_s = self._clock() + RETRY_S * 2**tracked.failed_saves
                tracked.failed_saves += 1
                tracked.saving &= tracked.failed_saves < FAILED_SAVES_MAX

    def _lookup(self, tracked: Tracked) -> Lookup:
        if tracked.lookup is None:
            request = tracked.request
            tracked.lookup = self._lookups.begin(
                request.lora_request, request.block_hashes, tracked.wishes.hint
            )
        return tracked.lookup

    def _most(self, tracked: Tracked) -> int:
        """Leading blobs that may be loaded: the engine computes the last token itself."""
        request = tracked.request
        if tracked.wishes.no_load or request.skip_reading_prefix_cache:
            return 0
        most = (int(request.num_tokens) - 1) // self._identity.blob_tokens
        return most if tracked.limit is None else min(most, tracked.limit)

    def _split(self, tracked: Tracked, tokens: int) -> tuple[int, int]:
        """Tokens in DRAM and on SSD."""
        warm = tracked.lookup.hit.warm if tracked.lookup is not None else 0
        dram = min(tokens, max(0, warm * self._identity.blob_tokens - tracked.promised.start))
        return dram, tokens - dram

    def _settle(self, lookup: Lookup, tokens: int) -> None:
        """Count the answer, once for each request."""
        if lookup.settled:
            return
        lookup.settled = True
        self._recorder.waited(lookup.waited_s)
        if not tokens:
            self._recorder.missed(lookup.hit.reason or ABSENT)

    def _load(self, nothing: Load, table: Table, tokens: int) -> Load:
        """What was promised last, into these blocks; `nothing` if it was something else."""
        tracked = self._requests.get(nothing.request_id)
        if tracked is None or tracked.lookup is None or tokens != len(tracked.promised):
            return nothing
        lookup, blob_tokens = tracked.lookup, self._identity.blob_tokens
        first, end = tracked.promised.start // blob_tokens, tracked.promised.stop // blob_tokens
        if lookup.ns is None:
            return nothing
        keys = lookup.keys[first:end]
        dram, ssd = self._split(tracked, tokens)
        self._recorder.found("dram", dram)
        self._recorder.found("ssd", ssd)
        return Load(
            nothing.request_id, lookup.ns.namespace.encode(), keys.packed, keys.key_bytes,
            tracked.promised.start - first * blob_tokens, self._blocks(table, first, end),
            tracked.wishes.hint.as_dict(), stream=lookup.hit.warm < end,
        )  # fmt: skip

    def _saves(self, tracked: Tracked, tokens: int, output: Any) -> list[Save]:
        """What is to be saved of a request after this step, if anything."""
        try:
            new = self._new(tracked, tokens)
            save = self._save(tracked, new, output.kv_connector_block_state) if new else None
        except Exception as error:  # no more is saved of it; all else goes on
            self._faults.broke(self._save, error)
            tracked.saving, save = False, None
        return [save] if save is not None else []

    def _new(self, tracked: Tracked, tokens: int) -> range:
        """The blobs of a request that are whole after this step, and not stored yet."""
        request, lookup = tracked.request, tracked.lookup
        if lookup is None or lookup.ns is None or not lookup.done.is_set():
            return range(0)
        if tracked.stored is None:
            tracked.stored = lookup.hit.blobs
        # Of tokens that the engine has not told us of yet, keys are not known either.
        known = len(request.block_hashes) * self._identity.hash_tokens
        before = min(request.num_computed_tokens, known) // self._identity.blob_tokens
        whole = min(request.num_computed_tokens + tokens, known) // self._identity.blob_tokens
        backlog = max(1, BACKLOG_BYTES // self._identity.blob_bytes)
        return range(tracked.stored, min(whole, tracked.stored + backlog + whole - before))

    def _save(self, tracked: Tracked, new: range, state: Any) -> Save | None:
        request, lookup, first = tracked.request, tracked.lookup, new.start
        assert lookup is not None
        assert lookup.ns is not None
        blocks = self._blocks(state.resolve_block_ids(request.request_id), first, new.stop)
        end = first + self._complete(blocks, len(new))
        if end == first:
            tracked.saving = False  # they slid out of a window: nothing can follow them
            return None
        keys = self._identity.keys(request.block_hashes)
        tracked.stored = end
        return Save(
            request.request_id, lookup.ns.namespace.encode(), keys[first:end].packed,
            keys.key_bytes, keys[first - 1] if first else b"", first, blocks,
            tracked.wishes.retention, tracked.wishes.ttl_s, tracked.wishes.hint.as_dict(),
        )  # fmt: skip

    def _blocks(self, table: Table, first: int, end: int) -> Blocks:
        """The ids of the blocks of blobs `first` to `end`, for each stored group."""
        groups = self._identity.groups
        tables = [table[group.id] for group in groups]
        return blocks_of(groups, self._identity.blob_tokens, tables, range(first, end))

    def _complete(self, blocks: Blocks, blobs: int) -> int:
        """How many leading blobs have all of their blocks."""
        for group, ids in zip(self._identity.groups, blocks, strict=True):
            per_blob = self._identity.blob_tokens // group.block_tokens
            blobs = min(blobs, len(ids) // per_blob)
            if NULL_BLOCK in ids:
                blobs = min(blobs, ids.index(NULL_BLOCK) // per_blob)
        return blobs

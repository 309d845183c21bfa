"""The connector's half in the engine's scheduler: what to load for a request, what to save.

Nothing here blocks or raises. Knows vLLM's objects by their attributes only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from blobstore.clients.vllm.faults import Faults
from blobstore.clients.vllm.geometry import NULL_BLOCK, Group, blocks_of
from blobstore.clients.vllm.lookups import Lookup, Lookups, Namespaces
from blobstore.clients.vllm.metadata import Blocks, Load, Outcomes, Save, StepPlan
from blobstore.clients.vllm.options import Options
from blobstore.clients.vllm.reasons import ABSENT
from blobstore.clients.vllm.recorder import Recorder
from blobstore.clients.vllm.request_params import RequestParams, Turns
from blobstore.clients.vllm.request_state import RequestState
from blobstore.errors import InvalidRequest

BACKLOG_BYTES = 64 << 20
"""How much of what earlier steps computed is saved in one step: it is copied while all wait."""
FAILED_SAVES_MAX = 5
"""After so many failures of its saves at one blob, nothing more of a request is saved."""
RETRY_S = 0.25
"""After the first of them; twice as long after each other one."""

PREEMPTED = "preempted"
"""Why a request stopped that the engine will soon go on with."""

_PARAMS = "kv_transfer_params"

Table = Sequence[Sequence[int]]
"""A request's block ids, for each of the engine's cache groups."""


class Identified(Namespaces, Protocol):
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

    An engine that only `reads` saves nothing, one that only `writes` loads nothing. One that
    goes `in_step` with others never waits.
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
        in_step: bool = False,
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
        self._requests: dict[str, RequestState] = {}
        self._loads: list[Load] = []
        self._in_step = in_step
        self._waiting = False
        """Whether a request waits for an answer of the store, or for what comes from SSD."""

    def add(self, request: Any) -> None:
        """A request is new; what it asks for is read now."""
        self._faults.guarded(None, self._track, request)

    def matched(self, request: Any, local_tokens: int) -> int | None:
        """How many tokens can be loaded beyond the engine's own `local_tokens`; None: ask again."""
        return self._faults.guarded(0, self._matched, request, local_tokens)

    def tiers(self, request: Any, tokens: int) -> tuple[int, int]:
        """How many of the `tokens` that are loaded for a request were in DRAM, and on SSD."""
        state = self._requests.get(request.request_id)
        if state is None:
            return tokens, 0
        return self._faults.guarded((tokens, 0), self._split, state, tokens)

    def allocated(self, request: Any, table: Table, tokens: int) -> None:
        """The scheduler gave a request blocks, of which `tokens` are to be loaded."""
        if tokens > 0:
            # Without a load that ends, the request would wait for ever.
            nothing = Load(request.request_id, b"", b"", 8, 0, (), {}, stream=False)
            load = self._faults.guarded(nothing, self._load, nothing, table, tokens)
            self._loads.append(load)

    def plan(self, output: Any) -> StepPlan:
        """What the workers are to do in the step that `output` describes."""
        idle = not output.num_scheduled_tokens
        plan = StepPlan(self._loads, idle=idle, waiting=self._waiting, at_once=self._in_step)
        self._lookups.next_step(idle=plan.idle)
        self._loads, self._waiting = [], False
        if self._lookups.usable:
            plan.saves = self._all_saves(output)
        return plan

    def heard(self, outcomes: Outcomes) -> None:
        """What the workers could not do."""
        self._faults.guarded(None, self._heard, outcomes)

    def finished(self, request: Any, finish: str) -> None:
        """A request has ended; `finish` says why."""
        state = self._requests.pop(request.request_id, None)
        if state is not None and state.lookup is not None and finish:
            tell = self._lookups.tell
            self._faults.guarded(None, tell, state.lookup, request.block_hashes, finish)

    def start_anew(self) -> None:
        """From now on nothing that was stored before is found.

        Requests that run are not saved any more: they may be of the old weights in part.
        """
        self._lookups.start_anew()
        for state in self._requests.values():
            state.lookup, state.saving = None, False

    def _track(self, request: Any) -> RequestState:
        params = RequestParams(self._options.retention)
        try:
            params = RequestParams.of(
                getattr(request, "kv_transfer_params", None),
                retention=self._options.retention,
                kind=self._options.kind,
                session=getattr(request, "session_id", None) or "",
            )
            self._faults.note(_PARAMS, "")
        except InvalidRequest as error:
            params = RequestParams(no_store=True, no_load=True)  # as one of them may have asked for
            self._faults.note(_PARAMS, f"{error}; the request is neither stored nor read")
        params = replace(
            params,
            no_load=params.no_load or not self._reads,
            no_store=params.no_store or not self._writes,
            hint=self._turns.numbered(params.hint),
        )
        state = self._requests[request.request_id] = RequestState(request, params)
        return state

    def _matched(self, request: Any, local_tokens: int) -> int | None:
        state = self._requests.get(request.request_id) or self._track(request)
        most, blob_tokens = self._most(state), self._identity.blob_tokens
        if not most and state.params.no_store:
            return 0
        state.promised = range(local_tokens, local_tokens)
        needed = range(local_tokens // blob_tokens, most)
        lookup = self._lookup(state, needed)
        if request.num_preemptions > state.preemptions:
            state.preemptions = request.num_preemptions
            self._lookups.tell(lookup, request.block_hashes, PREEMPTED)
        if not self._lookups.settled(lookup, request.block_hashes, needed):
            self._waiting = True
            return None
        if not needed:
            return 0  # asked all the same: what is stored need not be saved
        end = min(lookup.hit.blobs, most) * blob_tokens
        state.promised = range(local_tokens, max(local_tokens, end))
        self._settle(lookup, len(state.promised))
        return len(state.promised)

    def _heard(self, outcomes: Outcomes) -> None:
        for request_id, blobs in outcomes.loaded.items():
            state = self._requests.get(request_id)
            if state is not None:
                # Fewer than were promised: so it cannot be promised the same for ever.
                first = state.promised.start // self._identity.blob_tokens
                read = first + blobs
                state.limit = read if state.limit is None else min(read, state.limit)
                state.stored = None
                if state.lookup is not None:
                    state.lookup.doubt()
        for request_id, first in outcomes.unsaved.items():
            state = self._requests.get(request_id)
            if state is not None:
                if first > state.failed_at:  # room for some was there: more may be next time
                    state.failed_saves = 0
                state.failed_at = first
                state.stored = min(state.stored or 0, first)
                state.saves_from_s = self._clock() + RETRY_S * 2**state.failed_saves
                state.failed_saves += 1
                state.saving &= state.failed_saves < FAILED_SAVES_MAX

    def _lookup(self, state: RequestState, needed: range) -> Lookup:
        if state.lookup is None:
            request = state.request
            state.lookup = self._lookups.begin(
                request.lora_request, request.block_hashes, state.params.hint, needed
            )
        return state.lookup

    def _most(self, state: RequestState) -> int:
        """Leading blobs that may be loaded: the engine computes the last token itself."""
        request = state.request
        if state.params.no_load or request.skip_reading_prefix_cache:
            return 0
        most = (int(request.num_tokens) - 1) // self._identity.blob_tokens
        return most if state.limit is None else min(most, state.limit)

    def _split(self, state: RequestState, tokens: int) -> tuple[int, int]:
        """Tokens that were in DRAM and on SSD when the request came."""
        warm = state.lookup.warm_at_first if state.lookup is not None else 0
        dram = min(tokens, max(0, warm * self._identity.blob_tokens - state.promised.start))
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
        state = self._requests.get(nothing.request_id)
        if state is None or state.lookup is None or tokens != len(state.promised):
            return nothing
        lookup, blob_tokens = state.lookup, self._identity.blob_tokens
        first, end = state.promised.start // blob_tokens, state.promised.stop // blob_tokens
        if lookup.ns is None:
            return nothing
        keys = lookup.keys[first:end]
        if state.limit is None:  # else it was counted when it was promised first
            dram, ssd = self._split(state, tokens)
            self._recorder.found("dram", dram)
            self._recorder.found("ssd", ssd)
        return Load(
            nothing.request_id, lookup.ns.namespace.encode(), keys.packed, keys.key_bytes,
            state.promised.start - first * blob_tokens, self._blocks(table, first, end),
            state.params.hint.as_dict(), stream=lookup.hit.warm < end,
        )  # fmt: skip

    def _all_saves(self, output: Any) -> list[Save]:
        saves, now_s = [], self._clock()
        for request_id, tokens in output.num_scheduled_tokens.items():
            state = self._requests.get(request_id)
            if state is not None and state.saving and now_s >= state.saves_from_s:
                saves += self._saves(state, tokens, output)
        return saves

    def _saves(self, state: RequestState, tokens: int, output: Any) -> list[Save]:
        """What is to be saved of a request after this step, if anything."""
        try:
            new = self._new(state, tokens)
            save = self._save(state, new, output.kv_connector_block_state) if new else None
        except Exception as error:  # no more is saved of it; all else goes on
            self._faults.broke(self._save, error)
            state.saving, save = False, None
        return [save] if save is not None else []

    def _new(self, state: RequestState, tokens: int) -> range:
        """The blobs of a request that are whole after this step, and not stored yet."""
        request, lookup = state.request, state.lookup
        if lookup is None or lookup.ns is None or not lookup.done.is_set():
            return range(0)
        if state.stored is None:
            state.stored = lookup.answer.blobs
        # Of tokens that the engine has not told us of yet, keys are not known either.
        known = len(request.block_hashes) * self._identity.hash_tokens
        before = min(request.num_computed_tokens, known) // self._identity.blob_tokens
        whole = min(request.num_computed_tokens + tokens, known) // self._identity.blob_tokens
        backlog = max(1, BACKLOG_BYTES // self._identity.blob_bytes)
        return range(state.stored, min(whole, state.stored + backlog + whole - before))

    def _save(self, state: RequestState, new: range, block_state: Any) -> Save | None:
        request, lookup, first = state.request, state.lookup, new.start
        assert lookup is not None
        assert lookup.ns is not None
        blocks = self._blocks(block_state.resolve_block_ids(request.request_id), first, new.stop)
        end = first + self._complete(blocks, len(new))
        if end == first:
            state.saving = False  # they slid out of a window: nothing can follow them
            return None
        keys = self._identity.keys(request.block_hashes)
        state.stored = end
        return Save(
            request.request_id, lookup.ns.namespace.encode(), keys[first:end].packed,
            keys.key_bytes, keys[first - 1] if first else b"", first, blocks,
            state.params.retention, state.params.ttl_s, state.params.hint.as_dict(),
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

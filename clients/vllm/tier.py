"""blobstore as a secondary tier of vLLM's own offloading.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
      "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": …,
        "secondary_tiers": [{"type": "BlobStoreTier",
          "module_path": "blobstore.clients.vllm.tier", "address": "unix:/run/blobstore.sock"}]}}'

The engine copies chunks of its cache to host memory of its own, and this tier moves them
between there and the store. All methods run in the scheduler, under its lock: they write
down, look up and return; threads do the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingMetricMetadata,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from blobstore.clients.vllm import daemon
from blobstore.clients.vllm.faults import Faults
from blobstore.clients.vllm.options import Options
from blobstore.clients.vllm.recorder import MISSED, UNSAVED, Recorder
from blobstore.clients.vllm.request_params import RequestParams, Turns
from blobstore.clients.vllm.tier_chunks import Chunk, Positions
from blobstore.clients.vllm.tier_identity import TierIdentity, chunk_tokens
from blobstore.clients.vllm.tier_jobs import Finished, TierJobs
from blobstore.clients.vllm.tier_lookups import TierLookups
from blobstore.clients.vllm.tier_store import TierStore
from blobstore.errors import DeadlineExceeded, InvalidRequest

METRICS = {
    MISSED: ("vllm:blobstore_tier_misses", "Chunks that the store did not give, by the reason."),
    UNSAVED: ("vllm:blobstore_tier_unsaved", "Chunks that were not stored, by the reason."),
}
"""Others are vLLM's own: bytes, seconds, queries and hits of each tier."""

DRAIN_CALLS = 2
"""Calls that a job may still begin and end, each with a deadline: a save puts, and then pins."""
CLOSE_S = 1.0
"""Beyond the deadline of a call that is under way when the engine ends, or drains."""

_CONNECTORS_OWN = ("tokens_per_blob", "prefetch_wait_s", "layerwise")

_NOTHING = RequestParams(no_store=True, no_load=True)


class BlobStoreTier(SecondaryTierManager):
    """Chunks in the store.

    vLLM tells a tier nothing of weights that are changed in place, and resets no tier with
    its caches: an engine that does so must not have one.

    Options are those of the connector, but for what the engine decides here: chunks are as
    long as its `block_size` says. Raises InvalidRequest for mistakes in them; a daemon that
    is not there is none.
    """

    medium: ClassVar[Medium | None] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        locality: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = Locality(locality) if locality is not None else None
        self._options = _checked(options)
        self._faults = Faults()
        self._recorder = Recorder()
        self._turns = Turns()
        self._chunk_tokens = chunk_tokens(offloading_spec)
        self._params: dict[str, RequestParams] = {}
        self._positions: dict[str, Positions] = {}
        self._identity = TierIdentity(
            offloading_spec, self._options, self.block_size_bytes, self._faults
        )
        timeout_s, lookup_s = self._options.timeout_s, self._options.lookup_timeout_s
        self._rows = primary_kv_view.cast("B")
        self._daemon = daemon.borrow(self._options.address)
        store = TierStore(
            self._daemon, self._identity.now, self._row, self._recorder, timeout_s, lookup_s
        )
        self._jobs = TierJobs(store, self._recorder, self._answered)
        self._lookups = TierLookups(self._jobs.ask, lookup_s, self._recorder.missed)

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Take in what a request asks of the store."""
        options = self._options
        try:
            params = RequestParams.of(
                req_context.kv_transfer_params, retention=options.retention, kind=options.kind
            )
            params = replace(params, hint=self._turns.numbered(params.hint))
        except InvalidRequest as error:
            self._faults.note("a request is neither stored nor read", str(error))
            params = _NOTHING
        self._params[req_context.req_id] = params
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """Whether a chunk is in the store; RETRY while that is being asked."""
        if self._params_of(req_context).no_load:
            return LookupResult.MISS
        held = self._lookups.held(bytes(key), req_context.req_id)
        if held is None:
            return LookupResult.RETRY
        return LookupResult.HIT if held else LookupResult.MISS

    def submit_store(self, job_metadata: Any) -> None:
        """Begin to store rows of the engine's memory."""
        params = self._params_of(job_metadata.req_context)
        self._jobs.save(job_metadata.job_id, self._chunks(job_metadata), params)

    def submit_load(self, job_metadata: Any) -> None:
        """Begin to fill rows of the engine's memory."""
        params = self._params_of(job_metadata.req_context)
        self._jobs.load(job_metadata.job_id, self._chunks(job_metadata), params)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """The jobs that have ended. What was not loaded is from now on a miss."""
        return [self._result(finished) for finished in self._jobs.finished()]

    def on_schedule_end(self, context: Any) -> None:
        """Ask the store about what this step has looked up."""
        self._lookups.end_of_step()

    def on_request_finished(self, req_context: Any) -> None:
        """Forget the request."""
        self._lookups.finished(req_context.req_id)
        self._params.pop(req_context.req_id, None)
        self._positions.pop(req_context.req_id, None)

    def drain_jobs(self) -> None:
        """Wait until nothing touches the engine's memory: at most the deadlines of calls.

        Raises DeadlineExceeded if something does even then. Nothing has been reset so far, and
        must not be: what is still copied would be of other chunks.
        """
        left = self._jobs.drain(DRAIN_CALLS * self._options.timeout_s + CLOSE_S)
        if left:
            raise DeadlineExceeded(
                f"{left} transfers with the store at {self._options.address} do not end: the "
                "engine's host memory cannot be reset now"
            )

    def shutdown(self) -> None:
        """Let the calls under way end, and go."""
        wait_s = self._options.timeout_s + CLOSE_S
        self._jobs.close(wait_s)
        self._identity.close(CLOSE_S)
        daemon.give_back(self._options.address)
        self._rows.release()

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        """What this tier counts besides what vLLM counts of every tier."""
        return {
            name: OffloadingCounterMetadata(documentation=help, labelnames=("tier", "reason"))
            for name, help in METRICS.values()
        }

    def get_stats(self) -> OffloadingConnectorStats | None:
        """What was counted since the last call."""
        data = self._recorder.take()
        if data is None:
            return None
        stats = OffloadingConnectorStats()
        for counted, (name, _) in METRICS.items():
            for reason, n in data.get(counted, {}).items():
                stats.increase_counter(name, n, (self.tier_type, reason))
        return stats

    def _params_of(self, req_context: Any) -> RequestParams:
        return self._params.get(req_context.req_id, _NOTHING)

    def _answered(self, keys: list[bytes], held: Sequence[bool]) -> None:
        self._lookups.answered(keys, held)

    def _row(self, number: int) -> memoryview:
        row_bytes = self.block_size_bytes
        return self._rows[number * row_bytes : (number + 1) * row_bytes]

    def _chunks(self, job: Any) -> list[Chunk]:
        """What a job moves, each chunk after the one that it continues."""
        context = job.req_context
        # vLLM tells where a key lies, but not which lies there; without it, chunks are roots.
        ends = getattr(context, "_offload_key_positions", {})
        positions = self._positions.get(context.req_id)
        if positions is None:
            positions = self._positions[context.req_id] = Positions(self._chunk_tokens)
        return positions.chunks(job.keys, job.chunk_ids, ends)

    def _result(self, finished: Finished) -> JobResult:
        if finished.is_load:
            self._lookups.missing(finished.failed)
        return JobResult(
            job_id=finished.job_id,
            success=not finished.failed,
            successful_keys=finished.done or None,
            transfer_time=finished.seconds,
            transfer_bytes=len(finished.done) * self.block_size_bytes,
        )


def _checked(given: dict[str, Any]) -> Options:
    for name in _CONNECTORS_OWN:
        if name in given:
            raise InvalidRequest(f"{name} is an option of the connector, not of the tier")
    return Options.of(given)

"""The class that vLLM loads: its calls, handed to the half that they are for.

The only module here, beside those of metrics and the tier, that imports vLLM.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed import kv_transfer
from vllm.distributed.kv_transfer.kv_connector.v1 import base

from blobstore.clients.vllm import daemon
from blobstore.clients.vllm.faults import Faults
from blobstore.clients.vllm.identity import identify
from blobstore.clients.vllm.lookups import Lookups
from blobstore.clients.vllm.metadata import Outcomes, StepPlan
from blobstore.clients.vllm.metrics import BlobStorePromMetrics, BlobStoreStats
from blobstore.clients.vllm.options import Options
from blobstore.clients.vllm.recorder import Recorder
from blobstore.clients.vllm.scheduler_side import SchedulerSide
from blobstore.clients.vllm.worker_side import WorkerSide
from blobstore.errors import InvalidRequest

log = logging.getLogger("blobstore.clients.vllm")

CLOSE_S = 5.0
"""How long a stopping engine waits until its saves are sealed: as long as vLLM for its workers."""

RECOMPUTE = "recompute"
"""The policy by which a request whose load failed is computed."""


@dataclass
class BlobStoreMetadata(base.KVConnectorMetadata):
    """One step's plan, as it travels to the workers."""

    plan: StepPlan


@dataclass
class BlobStoreHandshake(base.KVConnectorHandshakeMetadata):
    """How a rank's caches pack blocks, by its number, as it travels to the scheduler."""

    packing: dict[int, str]


@dataclass
class BlobStoreWorkerMetadata(base.KVConnectorWorkerMetadata):
    """What workers could not do, as it travels to the scheduler.

    With it goes how they pack blocks, if no handshake has said that.
    """

    outcomes: Outcomes
    packing: dict[int, str] = field(default_factory=dict)

    def aggregate(self, other: base.KVConnectorWorkerMetadata) -> base.KVConnectorWorkerMetadata:
        """Of two ranks."""
        assert isinstance(other, BlobStoreWorkerMetadata)
        self.outcomes.merge(other.outcomes)
        self.packing.update(other.packing)
        return self


class BlobStoreConnector(base.KVConnectorBase_V1, base.SupportsHMA):
    """Keeps the prefixes of a vLLM engine in a blobstore daemon beside it.

    Raises InvalidRequest, with what mends it, for an engine or options that cannot work.
    From then on nothing raises: what the store cannot give is computed.
    """

    def __init__(self, vllm_config: Any, role: base.KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._options = Options.of(self._kv_transfer_config.kv_connector_extra_config)
        _check_micro_batches(vllm_config, self._options)
        self._identity = identify(vllm_config, kv_cache_config, self._options)
        self._recorder = Recorder()
        self._unsaid: dict[int, str] = {}
        self._closed = False
        self._daemon = daemon.borrow(self._options.address)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        faults = Faults()
        if role == base.KVConnectorRole.SCHEDULER:
            in_step = getattr(vllm_config.parallel_config, "data_parallel_size", 1) > 1
            self._lookups = Lookups(
                self._identity, self._daemon, self._options, faults, in_step=in_step
            )
            self._scheduler = SchedulerSide(
                self._identity, self._lookups, self._options, self._recorder, faults,
                reads=self._kv_transfer_config.is_kv_consumer,
                writes=self._kv_transfer_config.is_kv_producer,
                in_step=in_step,
            )  # fmt: skip
            self._warn_of_policy()
        else:
            self._worker = WorkerSide(
                self._identity, self._daemon, self._options, self._recorder, faults,
                recomputes=self._policy == RECOMPUTE,
            )  # fmt: skip

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that does not happen is a miss one day, and nothing that others wait for."""
        return False

    # What the scheduler calls.

    def on_new_request(self, request: Any) -> None:
        """A request came."""
        self._for_scheduler.add(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens can be loaded beyond those; None: not known yet."""
        tokens = self._for_scheduler.matched(request, num_computed_tokens)
        return tokens, bool(tokens)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[base.CacheHitSource, int]:
        """From which tier they come."""
        dram, ssd = self._for_scheduler.tiers(request, num_external_tokens)
        found = {base.CacheHitSource.HOST: dram, base.CacheHitSource.DISK: ssd}
        return {source: tokens for source, tokens in found.items() if tokens}

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """These are the blocks of a request, to load that many tokens into."""
        if num_external_tokens:
            self._for_scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> BlobStoreMetadata:
        """What the workers are to do in this step."""
        return BlobStoreMetadata(self._for_scheduler.plan(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers did in a step."""
        told = getattr(connector_output, "kv_connector_worker_meta", None)
        if isinstance(told, BlobStoreWorkerMetadata):
            self._identity.hear(told.packing)
            self._for_scheduler.heard(told.outcomes)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended. Its blocks may go: what is saved was copied in its last step."""
        reason = request.get_finished_reason()
        self._for_scheduler.finished(request, str(reason) if reason is not None else "")
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As request_finished."""
        return self.request_finished(request, [])

    def reset_cache(self) -> bool:
        """Find nothing any more of what was stored before: the weights may have changed."""
        self._for_scheduler.start_anew()
        log.warning(
            "the prefix cache was reset with its connector, as vLLM also does when it sleeps, when "
            "it pauses and clears its cache, and when it releases the cache's memory: until it is "
            "restarted, this engine finds nothing that was stored before, and shares nothing"
        )
        return True

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """What ranks said before the first step; inside a MultiConnector also others' words."""
        for said in metadata.values():
            if isinstance(said, BlobStoreHandshake):
                self._identity.hear(said.packing)

    # What a worker calls.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """These are the cache's tensors. Raises InvalidRequest for an unknown layout."""
        self._for_worker.register(self._kv_cache_config, kv_caches)
        self._unsaid = self._identity.packing(kv_caches)

    def get_handshake_metadata(self) -> BlobStoreHandshake | None:
        """How this rank packs blocks.

        A MultiConnector hands what one of its connectors says to all, and some of them fail
        on it: there the first step's outcomes take it along.
        """
        among_others = (
            kv_transfer.has_kv_transfer_group() and kv_transfer.get_kv_transfer_group() is not self
        )
        packing = {} if among_others else self._take_unsaid()
        return BlobStoreHandshake(packing) if packing else None

    def bind_connector_metadata(self, connector_metadata: base.KVConnectorMetadata) -> None:
        """A step begins."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, BlobStoreMetadata)
        self._for_worker.begin(connector_metadata.plan)

    def clear_connector_metadata(self) -> None:
        """The step has ended, and what it did was asked for."""
        super().clear_connector_metadata()
        self._for_worker.end()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads began with the step."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """The engine runs a request only after all of it was loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """A layer is computed: with `layerwise`, who follows its blobs may have it now."""
        if self._options.layerwise:
            self._for_worker.layer(layer_name)

    def wait_for_save(self) -> None:
        """The step has run, or raised: copy what it made whole, before another one changes it."""
        self._for_worker.finish()

    def get_transfer_results(self, finished_req_ids: set[str]) -> base.KVConnectorTransferResults:
        """Which loads have ended."""
        ended, failed = self._for_worker.take_finished()
        return base.KVConnectorTransferResults(finished_recving=ended, failed_recving=failed)

    def build_connector_worker_meta(self) -> BlobStoreWorkerMetadata | None:
        """What the scheduler should know of."""
        outcomes, packing = self._for_worker.take_outcomes(), self._take_unsaid()
        if outcomes is None and not packing:
            return None
        return BlobStoreWorkerMetadata(outcomes or Outcomes(), packing)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Whether Python must run between layers."""
        return bool(extra_config.get("layerwise", False))

    # What both call.

    def get_kv_connector_stats(self) -> BlobStoreStats | None:
        """What was counted since the last call."""
        data = self._recorder.take()
        return BlobStoreStats(data) if data else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> BlobStoreStats:
        """From what came from another process."""
        return BlobStoreStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> BlobStorePromMetrics:
        """For vLLM's own endpoint."""
        return BlobStorePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Seal what was copied, and disconnect."""
        if self._closed:
            return
        self._closed = True
        if self._worker is not None:
            self._worker.close(CLOSE_S)
        if self._scheduler is not None:
            self._lookups.close(CLOSE_S)
        daemon.give_back(self._options.address)

    @property
    def _for_scheduler(self) -> SchedulerSide:
        assert self._scheduler is not None
        return self._scheduler

    @property
    def _for_worker(self) -> WorkerSide:
        assert self._worker is not None
        return self._worker

    def _take_unsaid(self) -> dict[int, str]:
        """How this rank packs blocks, if the scheduler's half has not been told yet."""
        unsaid, self._unsaid = self._unsaid, {}
        return unsaid

    @property
    def _policy(self) -> str:
        """What the engine does with a request whose load failed."""
        return str(getattr(self._kv_transfer_config, "kv_load_failure_policy", RECOMPUTE))

    def _warn_of_policy(self) -> None:
        if self._policy != RECOMPUTE:
            log.warning(
                "kv_load_failure_policy=%r ends a request with an error when its prefix leaves the "
                'store before it is read: set "kv_load_failure_policy": "recompute" beside '
                '"kv_connector", and it is computed instead',
                self._policy,
            )


def _check_micro_batches(vllm_config: Any, options: Options) -> None:
    """InvalidRequest where nobody would hear of one that failed, or of when a layer is whole."""
    if not getattr(vllm_config.parallel_config, "use_ubatching", False):
        return
    if options.layerwise:
        raise InvalidRequest(
            "layerwise does not go with micro-batches (enable_dbo, ubatch_size), which compute "
            "each layer in portions: leave one of them out"
        )
    if not getattr(vllm_config, "use_v2_model_runner", False):
        raise InvalidRequest(
            "vLLM's V1 model runner goes on after a micro-batch that failed, whose blocks would be "
            "stored: leave micro-batches out (enable_dbo, ubatch_size), or use the V2 runner "
            "(VLLM_USE_V2_MODEL_RUNNER=1)"
        )

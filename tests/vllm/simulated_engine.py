"""vLLM's own scheduler and our connector, around workers whose model is a formula."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from blobstore.bench.engine_vllm_process import our_transfer
from blobstore.clients.vllm import daemon, saves
from blobstore.clients.vllm.identity import Identity
from tests.support.polling import wait_s
from tests.vllm.of_vllm import (
    CPUAttentionBackend,
    EngineArgs,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVOutputAggregator,
    ModelRunnerOutput,
    Request,
    RequestStatus,
    SamplingParams,
    Scheduler,
    SchedulerOutput,
    SlidingWindowSpec,
    StructuredOutputManager,
    get_hash_fn_by_name,
    kv_cache_utils,
)
from tests.vllm.simulated_rank import HEAD_SIZE, HEADS, WINDOW, Bytes, Rank, Running, Turn, dictated

BLOCK = 16
LAYERS = 2
"""Of each group."""
VOCABULARY = 1000


def be_patient(monkeypatch: pytest.MonkeyPatch, for_s: float) -> None:
    """Have connectors wait so long for their daemon to take what is saved: machines are busy."""
    for module, names in ((saves, ("PATIENCE_S", "RESERVE_S")), (daemon, ("CONNECT_S", "PING_S"))):
        for name in names:
            monkeypatch.setattr(module, name, for_s)


@contextmanager
def simulated(
    home: Path,
    address: str,
    *,
    sliding: bool,
    ahead: bool,
    layerwise: bool,
    num_blocks: int,
    ranks: int = 1,
) -> Iterator[SimulatedEngine]:
    """An engine, until it is shut down; one that plans steps `ahead` of the last one's answer."""
    config = _config(home, address, ahead, layerwise)
    config.parallel_config.tensor_parallel_size = ranks
    engine = SimulatedEngine(config, _caches(sliding, num_blocks, HEADS // ranks), ahead, ranks)
    try:
        yield engine
    finally:
        engine.close()


class SimulatedEngine:
    """Takes requests, and runs them step by step."""

    def __init__(self, config: Any, caches: KVCacheConfig, ahead: bool, ranks: int) -> None:
        self._config = config
        self.caches = caches
        scheduler_block, hash_block = kv_cache_utils.resolve_kv_cache_block_sizes(
            self.caches, self._config
        )
        self.caches.hash_block_size = hash_block
        self._config.cache_config.num_gpu_blocks = caches.num_blocks
        self._ranks = [Rank(config, caches, rank, ranks) for rank in range(ranks)]
        self._worker = self._ranks[0].connector
        self._together = KVOutputAggregator(ranks)
        self.scheduler: Scheduler = self._config.scheduler_config.get_scheduler_cls()(
            self._config, self.caches, StructuredOutputManager(self._config),
            block_size=scheduler_block, hash_block_size=hash_block,
        )  # fmt: skip
        assert type(self.scheduler).__name__ == ("AsyncScheduler" if ahead else "Scheduler")
        self._shake_hands()
        hash_of = get_hash_fn_by_name(self._config.cache_config.prefix_caching_hash_algo)
        kv_cache_utils.init_none_hash(hash_of)
        self._hasher = kv_cache_utils.get_request_block_hasher(hash_block, hash_of)
        self._depth = 2 if ahead else 1
        self._answers: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self._running: dict[str, Running] = {}
        self.done: dict[str, Request] = {}
        self.loads = 0
        self.failed_loads = 0
        self.preemptions = 0
        self._dictated: dict[tuple[int, ...], Bytes] = {}

    @property
    def identity(self) -> Identity:
        """What its blobs are called."""
        identity: Identity = self.scheduler.connector._identity
        return identity

    def add(self, name: str, prompt: Sequence[int], answer: int, **params: Any) -> None:
        """A request that ends after `answer` tokens."""
        sampling = SamplingParams(max_tokens=answer, ignore_eos=True, temperature=0)
        if params:
            sampling.extra_args = {"kv_transfer_params": params}
        request = Request(name, list(prompt), sampling, None, block_hasher=self._hasher)
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        """The user went away."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    @property
    def unfinished(self) -> list[str]:
        """Names of requests that are not over."""
        return [name for name, r in self.scheduler.requests.items() if not r.is_finished()]

    def forget(self) -> None:
        """Empty the engine's own cache; who runs begins again, where vLLM can do that.

        It cannot while a request waits for the store, or a step for its answer.
        """
        waiting = RequestStatus.WAITING_FOR_REMOTE_KVS
        loading = any(request.status == waiting for request in self.scheduler.requests.values())
        restart = not loading and not self._answers
        self.scheduler.reset_prefix_cache(reset_running_requests=restart)

    def step(self, meanwhile: Callable[[], None] | None = None) -> bool:
        """One step; whether anything was computed. `meanwhile` is called once it is planned."""
        output = self.scheduler.schedule()
        if meanwhile is not None:
            meanwhile()
        self.preemptions += len(output.preempted_req_ids or ())
        for rank in self._ranks:
            rank.begin(output.kv_connector_metadata)
        self._take_in(output)
        batch = [self._turn(name, n) for name, n in output.num_scheduled_tokens.items()]
        for rank in self._ranks:
            rank.forward(batch)
        names = [turn.name for turn in batch]
        sampled = [turn.running.moved_on(turn.n) for turn in batch]
        result = self._told(output, names, sampled)
        self._answers.append((output, result))
        while self._answers and (len(self._answers) >= self._depth or not names):
            self.scheduler.update_from_output(*self._answers.popleft())
        return bool(names)

    def run(self, deadline_steps: int = 20_000) -> None:
        """Until all requests are over."""
        for _ in range(deadline_steps):
            if not self.scheduler.requests and not self.scheduler.finished_req_ids:
                return
            if not self.step():
                wait_s(0.001)
        raise AssertionError(f"still not over: {sorted(self.scheduler.requests)}")

    def check_all_free(self) -> None:
        """No block is lost when nothing runs."""
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == self.caches.num_blocks - 1

    def close(self) -> None:
        """As an engine shuts down."""
        for rank in self._ranks:
            rank.connector.shutdown()
        self.scheduler.shutdown()

    def _shake_hands(self) -> None:
        """As EngineCore does once the scheduler is made."""
        said = {
            (0, rank): each.connector.get_handshake_metadata()
            for rank, each in enumerate(self._ranks)
        }
        self.scheduler.connector.set_xfer_handshake_metadata_pp_aware(said)

    def _take_in(self, output: SchedulerOutput) -> None:
        for name in output.finished_req_ids:
            self._running.pop(name, None)
        for new in output.scheduled_new_reqs:
            self.done[new.req_id] = self.scheduler.requests[new.req_id]
            self._running[new.req_id] = Running(
                list(new.prompt_token_ids or ()),
                tuple(map(list, new.block_ids)),
                new.num_computed_tokens,
            )
        cached = output.scheduled_cached_reqs
        for at, name in enumerate(cached.req_ids):
            running, blocks = self._running[name], cached.new_block_ids[at]
            running.computed = cached.num_computed_tokens[at]
            if name in cached.resumed_req_ids:
                running.tokens = list(cached.all_token_ids[name])
                running.blocks = tuple(map(list, blocks or ()))
            elif blocks is not None:
                for held, more in zip(running.blocks, blocks, strict=True):
                    held.extend(more)

    def _turn(self, name: str, n: int) -> Turn:
        running = self._running[name]
        return Turn(name, running, n, self._facts(running.tokens))

    def _facts(self, tokens: list[int]) -> Bytes:
        key = tuple(tokens)
        if key not in self._dictated:
            self._dictated[key] = dictated(tokens, self._ranks[0].n_layers)
            if len(self._dictated) > 64:
                self._dictated.pop(next(iter(self._dictated)))
        return self._dictated[key]

    def _told(
        self, output: SchedulerOutput, names: list[str], sampled: list[list[int]]
    ) -> ModelRunnerOutput:
        """What all ranks tell the scheduler together, as vLLM adds it up."""
        index = {name: at for at, name in enumerate(names)}
        told = self._together.aggregate(
            [
                ModelRunnerOutput(names, index, sampled, kv_connector_output=rank.end(output))
                for rank in self._ranks
            ]
        )
        ended = told.kv_connector_output.finished_recving or set()
        failed = told.kv_connector_output.failed_recving
        self.failed_loads += len(ended & failed)
        self.loads += len(ended - failed)
        return told


def _config(home: Path, address: str, ahead: bool, layerwise: bool) -> Any:
    folder = home / "formula"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_MODEL))
    transfer = our_transfer(
        address, tokens_per_blob=64, weights_digest="a formula",
        lookup_timeout_s=0.5, timeout_s=1.0, layerwise=layerwise,
    )  # fmt: skip
    config = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16",
        max_model_len=1024, max_num_seqs=6, max_num_batched_tokens=160, block_size=BLOCK,
        enable_prefix_caching=True, enable_chunked_prefill=True, async_scheduling=False,
        kv_transfer_config=transfer, disable_hybrid_kv_cache_manager=False,
    ).create_engine_config()  # fmt: skip
    config.scheduler_config.async_scheduling = ahead  # which vLLM does not do on CPUs
    for at in range(2 * LAYERS):
        config.compilation_config.static_forward_context[layer_name(at)] = _ATTENTION
    return config


_ATTENTION = SimpleNamespace(get_attn_backend=lambda: CPUAttentionBackend)
"""What a model's layers would say of themselves."""

_MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
    "intermediate_size": 32, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
    "num_hidden_layers": 2 * LAYERS, "vocab_size": VOCABULARY, "max_position_embeddings": 1024,
    "torch_dtype": "bfloat16",
}  # fmt: skip


def layer_name(number: int) -> str:
    """As a model's."""
    return f"model.layers.{number}.self_attn.attn"


def _caches(sliding: bool, num_blocks: int, heads: int) -> KVCacheConfig:
    """Full attention; with `sliding` every other layer slides, in larger blocks."""
    sizes = {"num_kv_heads": heads, "head_size": HEAD_SIZE, "dtype": torch.bfloat16}
    specs: list[Any] = [FullAttentionSpec(block_size=BLOCK, **sizes)]
    if sliding:
        specs.append(SlidingWindowSpec(block_size=2 * BLOCK, sliding_window=WINDOW, **sizes))
    groups = []
    for at, spec in enumerate(specs):
        names = [layer_name(n * len(specs) + at) for n in range(LAYERS)]
        groups.append(KVCacheGroupSpec(names, spec))
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)

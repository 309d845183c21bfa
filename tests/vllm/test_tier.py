"""The tier inside vLLM's own tiering manager, made by its own factory, against a real store.

Only the copies between the accelerator and host memory are ours: vLLM makes them on
accelerators alone.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blobstore.clients import Client
from blobstore.clients.bound import BoundNamespace
from blobstore.errors import DeadlineExceeded, InvalidRequest
from tests.support.polling import poll_until
from tests.support.served_store import ServedStore, served_store
from tests.vllm.of_vllm import (
    BlobStoreTier,
    LookupResult,
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
    ReqContext,
    ScheduleEndContext,
    TieringOffloadingSpec,
    kv_cache_utils,
    make_offload_key,
    sha256_cbor,
    xxhash,
)

BLOCK_TOKENS = 16
BLOCKS_PER_CHUNK = 4
CHUNK_TOKENS = BLOCK_TOKENS * BLOCKS_PER_CHUNK
ROW_BYTES = 16384
ROWS = 32
DEADLINE_S = 30.0


@pytest.fixture(autouse=True)
def hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As EngineCore begins them, after the connectors were made."""
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", None, raising=False)
    monkeypatch.setattr(kv_cache_utils, "_NONE_HASH_SEED", None)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    kv_cache_utils.init_none_hash(sha256_cbor)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "a-model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"weights" * 1000)
    return directory


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedStore]:
    with served_store(tmp_path / "socket") as served:
        yield served


def config_of(
    model: Path, tier: dict[str, Any], dtype: str = "bfloat16", **changed: Any
) -> OffloadingConfig:
    fields: dict[str, Any] = {
        "groups": (OffloadingGroupConfig(BLOCK_TOKENS, ("layers.0", "layers.1"), 0),),
        "worker_kv_bytes_per_block": ROW_BYTES // BLOCKS_PER_CHUNK,
        "enable_kv_cache_events": False,
        "extra_config": {
            "cpu_bytes_to_use": ROW_BYTES * ROWS,
            "secondary_tiers": [
                {"type": "BlobStoreTier", "module_path": "blobstore.clients.vllm.tier", **tier}
            ],
        },
        "engine_id": uuid.uuid4().hex,
        "model": OffloadingModelConfig(str(model), dtype),
        "cache": OffloadingCacheConfig(BLOCK_TOKENS, BLOCKS_PER_CHUNK),
        "parallel": OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
        "kv_cache_layout": "LBHNC",
    }
    return OffloadingConfig(**{**fields, **changed})


class Engine:
    """vLLM's manager with its host memory and our tier, and a scheduler's steps by hand."""

    def __init__(self, model: Path, address: str, *, options: Any = None, **changed: Any) -> None:
        tier = {"address": address, **(options or {})}
        self.spec = TieringOffloadingSpec(config_of(model, tier, **changed))
        self.manager: Any = self.spec.get_manager()
        self.tier: BlobStoreTier = self.manager.secondary_tiers[0]
        self.rows = np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)

    def close(self) -> None:
        del self.rows
        self.manager.shutdown()

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def request(self, name: str, keys: Sequence[bytes], **params: Any) -> ReqContext:
        context = ReqContext(name, kv_transfer_params=params or None)
        for at, key in enumerate(keys):
            context.set_offload_key_position(key, (at + 1) * CHUNK_TOKENS)
        self.manager.on_new_request(context)
        return context

    def compute(self, context: ReqContext, keys: Sequence[bytes]) -> None:
        """The request's chunks are computed, and leave the accelerator."""
        out = self.manager.prepare_store(keys, context)
        assert out is not None
        for key, row in zip(out.keys_to_store, out.store_spec.chunk_ids, strict=True):
            self.rows[row] = content(key)
        self.manager.complete_store(set(out.keys_to_store), context)

    def settle(self) -> None:
        """Step until nothing is under way."""
        poll_until(self._is_idle, DEADLINE_S)

    def found(self, context: ReqContext, keys: Sequence[bytes]) -> int:
        """Chunks that the scheduler would load, as it looks for them."""
        hits = 0
        for key in keys:
            result = poll_until(partial(self._answer, key, context), DEADLINE_S)
            if result is not LookupResult.HIT:
                break
            hits += 1
        return hits

    def loaded(self, context: ReqContext, keys: Sequence[bytes]) -> list[bytes]:
        """What goes to the accelerator of chunks that were found."""
        spec = self.manager.prepare_load(keys, context)
        rows = [self.rows[row].tobytes() for row in spec.chunk_ids]
        self.manager.complete_load(keys, context)
        return rows

    def _is_idle(self) -> bool:
        self.step()
        return not self.manager.has_pending_work()

    def _answer(self, key: Any, context: ReqContext) -> LookupResult | None:
        result = self.manager.lookup(key, context)
        self.step()
        return result if result in (LookupResult.HIT, LookupResult.MISS) else None


Start = Callable[..., Engine]


@pytest.fixture
def start(model: Path, served: ServedStore) -> Iterator[Start]:
    engines: list[Engine] = []

    def start(address: str = served.address, **changed: Any) -> Engine:
        engines.append(Engine(changed.pop("model", model), address, **changed))
        return engines[-1]

    yield start
    while engines:
        engines.pop().close()


def keys_of(n: int, prompt: int = 0, group: int = 0) -> list[Any]:
    return [make_offload_key(bytes([prompt, at]) * 16, group) for at in range(n)]


def content(key: bytes) -> np.ndarray[Any, Any]:
    """What the tokens of a chunk dictate."""
    return np.random.default_rng(list(key)).integers(0, 256, ROW_BYTES, np.uint8)


def stored(engine: Engine, n: int, **params: Any) -> list[Any]:
    keys = keys_of(n)
    context = engine.request("writer", keys, **params)
    ready(engine)
    engine.compute(context, keys)
    engine.settle()
    engine.manager.on_request_finished(context)
    return keys


def ready(engine: Engine) -> BoundNamespace:
    """Its namespace, once its weights have been read."""
    ns = poll_until(lambda: engine.tier._identity.now(), DEADLINE_S)
    assert ns is not None
    return ns


def test_an_engine_started_later_loads_what_another_has_stored(start: Start) -> None:
    keys = stored(start(), 12)
    second = start()
    ready(second)
    context = second.request("reader", [*keys, *keys_of(1, prompt=9)])
    assert second.found(context, [*keys, *keys_of(1, prompt=9)]) == 12
    assert second.loaded(context, keys) == [content(key).tobytes() for key in keys]
    assert second.manager.get_load_source(keys[0], context).value == "disk"


def test_chunks_are_a_chain_in_the_store(start: Start, served: ServedStore) -> None:
    engine = start()
    keys = keys_of(6)
    context = engine.request("writer", keys)
    ready(engine)
    engine.compute(context, keys[:4])
    engine.compute(context, keys[4:])
    engine.settle()
    with Client(served.address) as client:
        facts = client.stat(ready(engine), list(map(bytes, keys)))
    assert [fact["parent"] for fact in facts] == ["", *(key.hex() for key in keys[:-1])]


def test_a_chunk_that_went_since_it_was_found_is_computed_and_not_found_again(
    start: Start, served: ServedStore
) -> None:
    keys = stored(start(), 4)
    engine = start()
    ready(engine)
    context = engine.request("reader", keys)
    assert engine.manager.lookup(keys[0], context) is LookupResult.RETRY
    engine.step()
    poll_until(lambda: engine.tier.lookup(keys[0], context) is LookupResult.HIT, DEADLINE_S)
    with Client(served.address) as client:
        client.drop(ready(engine), [bytes(keys[0])])
    assert engine.manager.lookup(keys[0], context) is LookupResult.HIT_PENDING
    engine.settle()
    for _ in range(3):
        assert engine.manager.lookup(keys[0], context) is LookupResult.MISS
        engine.step()


def test_a_daemon_that_comes_late_is_found(start: Start, tmp_path: Path) -> None:
    engine = start(f"unix:{tmp_path}/late/socket")
    ready(engine)
    keys = keys_of(3)
    context = engine.request("early", keys)
    assert engine.found(context, keys) == 0
    engine.compute(context, keys)
    engine.settle()
    engine.manager.on_request_finished(context)
    (tmp_path / "late").mkdir()
    with served_store(tmp_path / "late" / "socket"):
        poll_until(lambda: engine.tier._daemon.reach(), DEADLINE_S)
        others = keys_of(3, prompt=1)
        context = engine.request("late", others)
        engine.compute(context, others)
        engine.settle()
        second = start(f"unix:{tmp_path}/late/socket")
        ready(second)
        poll_until(lambda: second.tier._daemon.reach(), DEADLINE_S)
        assert second.found(second.request("r", others), others) == 3
    stats = engine.manager.get_stats()
    reasons = {labels[1] for labels in stats.data["data"]["vllm:blobstore_tier_unsaved"]}
    assert reasons == {"unavailable"}


def test_params_of_a_request_are_followed(start: Start) -> None:
    keys = stored(start(), 2, no_store=True)
    engine = start()
    ready(engine)
    assert engine.found(engine.request("r", keys), keys) == 0
    kept = stored(engine, 2)
    other = start()
    ready(other)
    assert other.found(other.request("no", kept, no_load=True), kept) == 0
    assert other.found(other.request("odd", kept, retention="forever"), kept) == 0
    assert other.found(other.request("yes", kept), kept) == 2


def test_a_reset_waits_for_what_is_under_way(start: Start) -> None:
    engine = start()
    ready(engine)
    keys = keys_of(8)
    context = engine.request("writer", keys)
    engine.compute(context, keys)
    engine.manager.reset_cache()
    assert not engine.manager.has_pending_work()
    assert engine.found(engine.request("r", keys), keys) in (0, 8)


def test_a_reset_that_cannot_be_safe_is_none(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start()
    ready(engine)
    monkeypatch.setattr(engine.tier._jobs, "drain", lambda timeout_s: 2)
    with pytest.raises(DeadlineExceeded, match="2 transfers with the store"):
        engine.manager.reset_cache()


OTHERS: list[dict[str, Any]] = [
    {"dtype": "float16"},
    {"cache": OffloadingCacheConfig(BLOCK_TOKENS // 2, BLOCKS_PER_CHUNK)},
    {"groups": (OffloadingGroupConfig(BLOCK_TOKENS, ("layers.0",), 0),)},
    {"kv_cache_layout": "BLHNC"},
    {"parallel": OffloadingParallelConfig(0, 1, 2, 1, 1, 1, 0, 1, None, False)},
    {"parallel": OffloadingParallelConfig(0, 1, 1, 1, 1, 2, 0, 1, None, True)},
    {"options": {"salt": "tenant"}},
    {"options": {"revision": "r2"}},
    {"options": {"weights_digest": "other"}},
]


def test_chunks_of_another_identity_are_never_found(
    start: Start, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, found = stored(start(), 2), {}

    def look(what: str, **changed: Any) -> None:
        engine = start(**changed)
        ready(engine)
        found[what] = engine.found(engine.request("r", keys), keys)

    for changed in OTHERS:
        look(str(changed), **changed)
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    kv_cache_utils.init_none_hash(sha256_cbor)
    look("hashes")
    monkeypatch.delenv("PYTHONHASHSEED")
    kv_cache_utils.init_none_hash(sha256_cbor)
    monkeypatch.setenv("VLLM_ROCM_USE_AITER", "1")
    look("what decides on a backend")
    monkeypatch.delenv("VLLM_ROCM_USE_AITER")
    look("nothing")
    (model / "model.safetensors").write_bytes(b"WEIGHTS" * 1000)
    look("weights")
    assert {what for what, blobs in found.items() if blobs} == {"nothing"}


def test_an_equal_model_elsewhere_is_the_same(start: Start, model: Path, tmp_path: Path) -> None:
    keys = stored(start(), 2)
    elsewhere = tmp_path / "elsewhere" / model.name
    elsewhere.parent.mkdir()
    model.rename(elsewhere)
    engine = start(model=elsewhere)
    ready(engine)
    assert engine.found(engine.request("r", keys), keys) == 2


def test_hashes_that_begin_at_random_store_nothing_and_say_so(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    kv_cache_utils.init_none_hash(xxhash)
    engine = start()
    poll_until(lambda: engine.tier._identity._weights, DEADLINE_S)
    keys = keys_of(2)
    context = engine.request("r", keys)
    engine.compute(context, keys)
    engine.settle()
    assert engine.tier._identity.now() is None
    assert "export PYTHONHASHSEED=0" in caplog.text


def test_nothing_is_known_before_the_engine_has_begun_its_hashes(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", None)
    engine = start()
    poll_until(lambda: engine.tier._identity._weights, DEADLINE_S)
    assert engine.tier._identity.now() is None
    kv_cache_utils.init_none_hash(sha256_cbor)
    ready(engine)


def test_mistakes_are_told_at_the_start(start: Start, tmp_path: Path) -> None:
    for options, told in (
        ({"address_": "unix:x"}, "did you mean address"),
        ({"retention": "forever"}, "retention is one of"),
        ({"tokens_per_blob": 256}, "option of the connector"),
    ):
        with pytest.raises(InvalidRequest, match=told):
            start(options=options)
    with pytest.raises(InvalidRequest, match='"weights_digest"'):
        start(model=Path("org/name"))
    start(model=Path("org/name"), options={"weights_digest": "of-mine"})


def test_vllm_knows_its_metrics() -> None:
    tier = {"type": "BlobStoreTier", "module_path": "blobstore.clients.vllm.tier"}
    known = TieringOffloadingSpec.build_metric_definitions({"secondary_tiers": [tier]})
    assert known["vllm:blobstore_tier_misses"].labelnames == ("tier", "reason")
    assert known["vllm:blobstore_tier_unsaved"].labelnames == ("tier", "reason")

"""The connector as vLLM's own factory makes it and its own classes call it; no model runs."""

from __future__ import annotations

import copy
import logging
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from blobstore.clients import Client
from blobstore.clients.vllm.metadata import Load, Outcomes, StepPlan
from blobstore.errors import InvalidRequest
from tests.support.polling import poll_until
from tests.support.served_store import ServedStore, served_store
from tests.vllm import simulated_engine
from tests.vllm.of_vllm import (
    BlobStoreConnector,
    BlobStoreMetadata,
    BlobStoreStats,
    BlobStoreWorkerMetadata,
    KVConnectorFactory,
    KVConnectorRole,
    Request,
    SamplingParams,
)
from tests.vllm.simulated_engine import SimulatedEngine, be_patient, simulated

PROMPT = [7 * n % 997 for n in range(300)]
OTHER_PROMPT = PROMPT[::-1]
WHOLE_BLOBS = 256
"""Tokens of the prompt that are stored: blobs have 64."""
DEADLINE_S = 30.0

Start = Callable[..., SimulatedEngine]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedStore]:
    with served_store(tmp_path / "socket") as served:
        yield served


@pytest.fixture
def start(tmp_path: Path, served: ServedStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Makes engines whose transfer configuration is changed in some fields."""
    be_patient(monkeypatch, DEADLINE_S)
    made = simulated_engine._config
    with ExitStack() as engines:

        def start(**changed: Any) -> SimulatedEngine:
            def config(*args: Any) -> Any:
                found = made(*args)
                options = found.kv_transfer_config.kv_connector_extra_config
                options |= {"lookup_timeout_s": DEADLINE_S, "timeout_s": DEADLINE_S}
                for name, value in changed.items():
                    setattr(found.kv_transfer_config, name, value)
                return found

            monkeypatch.setattr(simulated_engine, "_config", config)
            return engines.enter_context(
                simulated(
                    tmp_path,
                    served.address,
                    sliding=False,
                    ahead=False,
                    num_blocks=64,
                    layerwise=False,
                )
            )

        yield start


@pytest.fixture
def engine(start: Start) -> SimulatedEngine:
    return start()


def connector(engine: SimulatedEngine, role: Any, **changed: Any) -> BlobStoreConnector:
    """Another one with this engine's configuration, but for what is changed of its options."""
    config = copy.deepcopy(engine._config)
    options = config.kv_transfer_config.kv_connector_extra_config
    config.kv_transfer_config.kv_connector_extra_config = {**options, **changed}
    found = KVConnectorFactory.create_connector(config, role, engine.caches)
    assert isinstance(found, BlobStoreConnector)
    return found


def run(engine: SimulatedEngine, name: str) -> None:
    engine.add(name, PROMPT, 4)
    engine.run()


def stored(engine: SimulatedEngine) -> None:
    """A prompt is saved, and the engine has forgotten it."""
    run(engine, "first")
    poll_until(lambda: found(engine) == WHOLE_BLOBS, DEADLINE_S)
    engine.scheduler.reset_prefix_cache()


def found(engine: SimulatedEngine, local_tokens: int = 0, **params: Any) -> int:
    """How many tokens of the prompt are promised to a new request."""
    half, request = engine.scheduler.connector, request_of(engine, uuid.uuid4().hex, **params)
    half.on_new_request(request)
    tokens, later = asked(half, request, local_tokens)
    assert later == bool(tokens)
    sources = half.get_external_cache_hit_sources(request, tokens)
    assert sum(sources.values()) == tokens
    half.request_finished_all_groups(request, ([],))
    return tokens


def asked(half: BlobStoreConnector, request: Any, local_tokens: int = 0) -> tuple[int, bool]:
    """The scheduler's question, until it is answered."""

    def answer() -> tuple[int, bool] | None:
        tokens, later = half.get_num_new_matched_tokens(request, local_tokens)
        return None if tokens is None else (tokens, later)

    found = poll_until(answer, DEADLINE_S)
    assert found is not None
    return found


def request_of(engine: SimulatedEngine, name: str, **params: Any) -> Any:
    sampling = SamplingParams(max_tokens=4, temperature=0)
    if params:
        sampling.extra_args = {"kv_transfer_params": params}
    return Request(name, PROMPT, sampling, None, block_hasher=engine._hasher)


def test_the_factory_finds_it_by_its_path(engine: SimulatedEngine) -> None:
    assert type(engine.scheduler.connector) is BlobStoreConnector
    assert not engine.scheduler.connector.requires_kv_delivery


def test_a_prompt_that_another_engine_read_is_promised_and_loaded(start: Start) -> None:
    stored(start())
    second = start()
    assert found(second) == WHOLE_BLOBS
    assert found(second, 128) == WHOLE_BLOBS - 128
    run(second, "r")
    assert second.loads == 1


def test_wrong_options_are_refused_by_name(engine: SimulatedEngine) -> None:
    for role in KVConnectorRole:
        for wrong, told in (
            ({"token_per_blob": 64}, "did you mean tokens_per_blob"),
            ({"retention": "forever"}, "retention is one of"),
            ({"tokens_per_blob": 40}, "multiple"),
            ({"address": "tcp://there"}, "unix"),
        ):
            with pytest.raises(InvalidRequest, match=told):
                connector(engine, role, **wrong)


@pytest.mark.parametrize(("policy", "warnings"), [("fail", 1), ("recompute", 0)])
def test_a_policy_that_ends_requests_is_warned_of(
    start: Start, policy: str, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "blobstore"):
        start(kv_load_failure_policy=policy)
    told = [record for record in caplog.records if "kv_load_failure_policy" in record.message]
    assert len(told) == warnings


def test_a_load_that_fails_is_told_of_once(engine: SimulatedEngine) -> None:
    worker = engine._worker
    nothing = Load("r", b"", b"", 8, 0, (), {}, stream=False)
    worker.bind_connector_metadata(copy.deepcopy(BlobStoreMetadata(StepPlan([nothing]))))
    worker.start_load_kv(None)
    worker.wait_for_save()

    def results() -> Any:
        found = worker.get_transfer_results(set())
        return found if found.finished_recving else None

    found = poll_until(results, DEADLINE_S)
    assert found.finished_recving == found.failed_recving == {"r"}
    assert not worker.get_transfer_results(set()).finished_recving
    assert not worker.get_block_ids_with_load_errors()
    told = copy.deepcopy(worker.build_connector_worker_meta())
    assert told == BlobStoreWorkerMetadata(Outcomes({"r": 0}, {}))
    assert worker.build_connector_worker_meta() is None
    worker.clear_connector_metadata()


def test_what_ranks_could_not_do_adds_up() -> None:
    one = BlobStoreWorkerMetadata(Outcomes({"r": 3}, {"s": 2}))
    other = BlobStoreWorkerMetadata(Outcomes({"r": 1, "t": 0}, {"s": 5}))
    assert one.aggregate(other) == BlobStoreWorkerMetadata(Outcomes({"r": 1, "t": 0}, {"s": 2}))


def test_both_halves_count_and_vllm_adds_up(engine: SimulatedEngine) -> None:
    half = engine.scheduler.connector
    assert found(engine) == 0
    stats = half.get_kv_connector_stats()
    assert isinstance(stats, BlobStoreStats)
    assert stats.data["misses"] == {"absent": 1}
    assert half.get_kv_connector_stats() is None
    again = BlobStoreConnector.build_kv_connector_stats(copy.deepcopy(stats.to_dict()))
    assert again.aggregate(stats).data["misses"] == {"absent": 2}
    assert BlobStoreConnector.build_kv_connector_stats().is_empty()


def test_after_a_reset_nothing_of_before_is_found(
    engine: SimulatedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    stored(engine)
    assert found(engine) == WHOLE_BLOBS
    with caplog.at_level(logging.WARNING, "blobstore"):
        assert engine.scheduler.connector.reset_cache() is True
    assert found(engine) == 0
    assert caplog.text.count("this engine finds nothing that was stored before") == 1


@pytest.mark.parametrize(("role", "tokens"), [("kv_producer", 0), ("kv_consumer", WHOLE_BLOBS)])
def test_an_engine_may_only_write_or_only_read(
    start: Start, served: ServedStore, role: str, tokens: int
) -> None:
    stored(start())
    engine = start(kv_role=role)
    assert found(engine) == tokens
    engine.add("other", OTHER_PROMPT, 600)
    with Client(served.address) as client:

        def blobs() -> int:
            engine.step()
            return int(client.stats()["tiers"]["dram"]["blobs"])

        if role == "kv_producer":
            poll_until(lambda: blobs() > 4, DEADLINE_S)
        else:
            engine.run()
            engine._worker.shutdown()  # what it saves would be stored then
            assert client.stats()["tiers"]["dram"]["blobs"] == 4


def test_what_a_request_asks_for_is_followed(engine: SimulatedEngine) -> None:
    engine.add("unstored", PROMPT, 4, no_store=True)
    engine.run()
    assert found(engine) == 0
    engine.forget()  # who has all that is asked for may end before the store has answered
    stored(engine)
    assert found(engine, no_load=True) == 0
    assert found(engine, retention="forever") == 0
    assert found(engine) == WHOLE_BLOBS


def test_odd_params_never_reach_the_scheduler_as_exceptions(engine: SimulatedEngine) -> None:
    for odd in (
        {"session": 5}, {"turn": "x"}, {"ttl": "long"}, {"no_store": "yes"}, {"kind": None},
    ):  # fmt: skip
        assert found(engine, **odd) == 0
    half, request = engine.scheduler.connector, request_of(engine, "odder")
    request.kv_transfer_params = ["no", "mapping"]
    half.on_new_request(request)
    assert asked(half, request) == (0, False)


@pytest.mark.parametrize("role", list(KVConnectorRole), ids=lambda role: role.name.lower())
def test_it_may_be_shut_down_twice(engine: SimulatedEngine, role: Any) -> None:
    half = connector(engine, role)
    half.shutdown()
    half.shutdown()


def test_layers_one_by_one_need_python_between_them() -> None:
    assert BlobStoreConnector.requires_piecewise_for_cudagraph({"layerwise": True})
    assert not BlobStoreConnector.requires_piecewise_for_cudagraph({})

"""How a worker's word on packed blocks reaches the scheduler, through vLLM's own classes."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from blobstore.clients import Client
from blobstore.clients.vllm import agreement
from blobstore.errors import InvalidRequest
from tests.support.polling import poll_until
from tests.support.served_store import ServedStore, served_store
from tests.vllm.of_vllm import (
    BlobStoreConnector,
    BlobStoreHandshake,
    KVConnectorFactory,
    KVConnectorOutput,
    KVConnectorRole,
    KVTransferConfig,
    kv_transfer_state,
)
from tests.vllm.simulated_engine import SimulatedEngine, simulated

PROMPT = [7 * n % 997 for n in range(300)]
DEADLINE_S = 30.0


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedStore]:
    with served_store(tmp_path / "socket") as served:
        yield served


def engine_of(home: Path, address: str, **options: Any) -> Any:
    said = {"sliding": False, "ahead": False, "num_blocks": 64, "layerwise": False, **options}
    return simulated(home, address, **said)


@pytest.fixture
def engine(tmp_path: Path, served: ServedStore) -> Iterator[SimulatedEngine]:
    with engine_of(tmp_path, served.address) as engine:
        yield engine


@pytest.fixture
def made(engine: SimulatedEngine) -> Iterator[Any]:
    """Makes connectors with the engine's configuration, in either role."""
    with ExitStack() as ends:

        def made(role: KVConnectorRole, transfer: Any = None) -> Any:
            config = copy.deepcopy(engine._config)
            if transfer is not None:
                config.kv_transfer_config = transfer
            found: Any = KVConnectorFactory.create_connector(config, role, engine.caches)
            ends.callback(found.shutdown)
            return found

        yield made


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_handshake_names_what_the_workers_compute_with(
    tmp_path: Path, served: ServedStore, ranks: int
) -> None:
    with engine_of(tmp_path, served.address, ranks=ranks) as engine:
        order = engine.identity.bound().layout.order
        assert order.endswith(engine._worker._identity.packing(engine._ranks[0]._tensors)[0])
        assert ",CPU_ATTN/16" in order


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_first_step_says_it_where_no_handshake_does(
    tmp_path: Path, served: ServedStore, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SimulatedEngine, "_shake_hands", lambda engine: None)
    monkeypatch.setattr(agreement, "WAIT_S", DEADLINE_S)
    with (
        engine_of(tmp_path, served.address, ranks=ranks) as engine,
        Client(served.address) as client,
    ):
        engine.add("first", PROMPT, 4)
        engine.run()
        poll_until(lambda: client.stats()["blobs"] == 4, DEADLINE_S)
        assert ",CPU_ATTN/16" in engine.identity.bound().layout.order


def test_nothing_is_found_or_stored_before_that(
    tmp_path: Path,
    served: ServedStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(SimulatedEngine, "_shake_hands", lambda engine: None)
    monkeypatch.setattr(agreement, "WAIT_S", 0.0)
    monkeypatch.setattr(BlobStoreConnector, "_take_unsaid", lambda connector: {})
    with (
        engine_of(tmp_path, served.address) as engine,
        Client(served.address) as client,
    ):
        engine.add("first", PROMPT, 4)
        engine.run()
        assert "neither stored nor read: 0 of 1 ranks have said" in caplog.text
        assert client.stats()["blobs"] == 0


def test_ranks_that_differ_are_refused_with_a_line(
    made: Any, caplog: pytest.LogCaptureFixture
) -> None:
    half = made(KVConnectorRole.SCHEDULER)
    half.set_xfer_handshake_metadata({0: BlobStoreHandshake({0: "so", 1: "otherwise"})})
    with pytest.raises(InvalidRequest, match="different ways"):
        half._identity.bound()
    with caplog.at_level(logging.WARNING, "blobstore"):
        half._lookups._space(None)
    assert "neither stored nor read: the engine's ranks pack blocks in diff" in caplog.text


def test_connectors_side_by_side_hear_only_their_own_workers(
    made: Any, engine: SimulatedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A MultiConnector gives the first one's handshake to all, of which some fail on it."""
    ours = {
        "kv_connector": "BlobStoreConnector",
        "kv_connector_module_path": "blobstore.clients.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            **engine._config.kv_transfer_config.kv_connector_extra_config,
        },
    }
    transfer = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": [ours, ours]},
    )
    scheduler, worker = (made(role, transfer) for role in KVConnectorRole)
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", worker)
    worker.register_kv_caches(engine._ranks[0]._tensors)
    assert worker.get_handshake_metadata() is None
    scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): object()})
    told = KVConnectorOutput(kv_connector_worker_meta=worker.build_connector_worker_meta())
    scheduler.update_connector_output(told)
    for half in scheduler.sub_connectors:
        assert half._identity.bound() == engine.identity.bound()
    assert worker.build_connector_worker_meta() is None

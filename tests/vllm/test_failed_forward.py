"""A forward that raises, in vLLM's own runners: nothing that it left is ever stored."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from blobstore.clients import Client
from blobstore.clients.vllm.metadata import StepPlan
from blobstore.errors import InvalidRequest
from tests.support.served_store import ServedStore, served_store
from tests.vllm.of_vllm import (
    BlobStoreMetadata,
    KVConnectorFactory,
    KVConnectorRole,
    SchedulerOutput,
)
from tests.vllm.simulated_engine import SimulatedEngine, be_patient, simulated

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.distributed.kv_transfer import kv_transfer_state
    from vllm.forward_context import set_forward_context
    from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
    from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

PROMPT = [7 * n % 997 for n in range(150)]
WHOLE_BLOBS = 2
DEADLINE_S = 30.0


class OutOfMemoryError(RuntimeError):
    """What a forward may raise."""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedStore]:
    with served_store(tmp_path / "socket") as served:
        yield served


@pytest.fixture(params=[False, True], ids=["whole", "layerwise"])
def engine(
    request: pytest.FixtureRequest, tmp_path: Path, served: ServedStore,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[SimulatedEngine]:  # fmt: skip
    """Whose connector is the one of this process."""
    be_patient(monkeypatch, DEADLINE_S)
    with simulated(
        tmp_path, served.address, sliding=False, ahead=False, layerwise=request.param, num_blocks=64
    ) as engine:
        monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", engine._worker)
        yield engine


def planned(engine: SimulatedEngine) -> SchedulerOutput:
    """A step in which all blobs of a prompt become whole."""
    engine.add("r", PROMPT, 4)
    while not (output := engine.scheduler.schedule()).num_scheduled_tokens:
        engine.scheduler.update_from_output(output, engine._told(output, [], []))
    return output


def forward(engine: SimulatedEngine, output: SchedulerOutput, error: Any) -> None:
    """Half of the layers, or all if there is no error, once there is memory for what is saved."""
    assert engine._worker._worker is not None
    for saving in engine._worker._worker._saves._step:
        assert saving.wait(DEADLINE_S)
    engine._take_in(output)
    batch = [engine._turn(name, n) for name, n in output.num_scheduled_tokens.items()]
    rank = engine._ranks[0]
    if error is not None:
        rank._layers = rank._layers[: len(rank._layers) // 2]
    rank.forward(batch)
    if error is not None:
        raise error


def first_runner(engine: SimulatedEngine, output: SchedulerOutput, error: Any) -> None:
    """As GPUModelRunner of vllm.v1.worker.gpu_model_runner, which CPUs use, too."""
    with (
        set_forward_context(None, engine._config),
        KVConnectorModelRunnerMixin._get_kv_connector_output(output),
    ):
        forward(engine, output, error)


def second_runner(engine: SimulatedEngine, output: SchedulerOutput, error: Any) -> None:
    """As that of vllm.v1.worker.gpu.model_runner; a step that computes nothing follows."""
    runner = ActiveKVConnector(engine._config, engine._ranks[0]._tensors)
    runner.pre_forward(output)
    try:
        forward(engine, output, error)
        runner.finish_forward()
        runner.post_forward(output.finished_req_ids)
    finally:
        nothing = SchedulerOutput.make_empty()
        nothing.kv_connector_metadata = BlobStoreMetadata(StepPlan(idle=True))
        runner.no_forward(nothing)


Run = Callable[[SimulatedEngine, SchedulerOutput, Any], None]
RUNNERS = [first_runner, second_runner]


def stored(engine: SimulatedEngine, served: ServedStore) -> int:
    """Blobs in the store once the engine is shut down, which waits for what is under way."""
    engine._worker.shutdown()
    with Client(served.address) as client:
        return int(client.stats()["tiers"]["dram"]["blobs"])


@pytest.mark.parametrize("run", RUNNERS)
def test_what_a_forward_computed_to_its_end_is_stored(
    engine: SimulatedEngine, served: ServedStore, run: Run
) -> None:
    run(engine, planned(engine), None)
    assert stored(engine, served) == WHOLE_BLOBS


@pytest.mark.parametrize("error", [OutOfMemoryError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("run", RUNNERS)
def test_what_a_failed_forward_left_is_never_stored(
    engine: SimulatedEngine, served: ServedStore, run: Run, error: type[BaseException]
) -> None:
    output = planned(engine)
    with pytest.raises(error):
        run(engine, output, error())
    assert stored(engine, served) == 0


def test_micro_batches_are_refused_where_nobody_hears_that_one_failed(
    tmp_path: Path, served: ServedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first runner's run in threads, and what one of them raises is lost."""
    with simulated(
        tmp_path, served.address, sliding=False, ahead=False, layerwise=False, num_blocks=64
    ) as engine:
        config = copy.deepcopy(engine._config)
        config.parallel_config.enable_dbo = True
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
        for role in KVConnectorRole:
            with pytest.raises(InvalidRequest, match="micro-batches"):
                KVConnectorFactory.create_connector(config, role, engine.caches)
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
        for role in KVConnectorRole:
            KVConnectorFactory.create_connector(config, role, engine.caches).shutdown()

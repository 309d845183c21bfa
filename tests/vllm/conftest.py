"""vLLM itself, in processes of its own, against real daemons.

Needs the environment that `make test-vllm` builds.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from blobstore.bench.engine_vllm_model import model_directory
from tests.vllm.answers import Answers
from tests.vllm.engines import Nursery
from tests.vllm.prompts import few, fifty, outgrowing

LAYERS = 2
"""Of the model's thirty, so that the tests are quick."""


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Makes engines, which compute in fp32: then no token depends on how a prompt was cut."""
    model = str(model_directory(LAYERS))
    with Nursery(tmp_path_factory.mktemp("engines"), model=model, dtype="float32") as nursery:
        nursery.wait_ready()
        yield nursery


@pytest.fixture(scope="session")
def expected(nursery: Nursery) -> Answers:
    """What an engine without a connector answers to every request that there is."""
    with nursery.engine() as engine:
        return engine.run([*few(), *fifty(), *outgrowing()], at_once=4)

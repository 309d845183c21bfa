"""Tokens are those of a run without a connector, whatever was restarted in between."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from blobstore.bench.engine_vllm_model import model_directory
from blobstore.clients import Client
from tests.support.daemon import daemon
from tests.vllm.answers import Answers, assert_right, cached, wait_restored, wait_saved
from tests.vllm.engines import Engine, Nursery, connector
from tests.vllm.prompts import BLOB, SHARED, Request, fifty, outgrowing

SIZES = ("--dram", "256MiB", "--ssd", "1GiB")
SIZES_WHOLE = ("--dram", "3GiB", "--ssd", "4GiB")
"""For all layers of the model."""

SMALL: dict[str, Any] = {
    "block_size": 32,
    "num_gpu_blocks_override": 4 * 61 + 2,
    "max_num_batched_tokens": 192,
}
"""Room for the four that outgrow it, but not for all of their answers."""


def test_fifty_requests_and_restarts_of_both(
    tmp_path: Path, nursery: Nursery, expected: Answers
) -> None:
    answer_fifty(tmp_path, nursery, expected, SIZES)


@pytest.mark.soak  # minutes of computing
def test_fifty_requests_and_restarts_with_all_layers(tmp_path: Path) -> None:
    model = str(model_directory(0))
    sizes: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 30, "dtype": "float32"}
    with Nursery(tmp_path, model=model, **sizes) as nursery:
        nursery.wait_ready()
        with nursery.engine() as engine:
            expected = engine.run([*fifty(), *outgrowing()], at_once=4)
        answer_fifty(tmp_path, nursery, expected, SIZES_WHOLE)


def answer_fifty(tmp_path: Path, nursery: Nursery, expected: Answers, sizes: Sequence[str]) -> None:
    """Branches, four at once, prompts in pieces, preemption; then restarts of either and both."""
    requests = fifty()
    with daemon(tmp_path, *sizes) as run:
        transfer = connector(run.address)
        with nursery.engine(transfer, **SMALL) as engine:
            assert_right(engine.run(requests, at_once=4), expected)
            preempt(engine, expected)
            assert_counted(engine, "saved_tokens", "saved_bytes", "misses")
            assert engine.warnings == []
        with nursery.engine(transfer, **SMALL) as engine:
            assert_restored(engine, requests[:15], expected)
            assert_counted(engine, "hit_tokens", "loaded_tokens", "loaded_bytes")
            with Client(run.address) as kv:
                wait_saved(kv)
            run.kill()
            with daemon(tmp_path, *sizes) as run:
                wait_restored(engine, requests[0], expected)
                engine.forget()
                assert_restored(engine, requests[:15], expected)
    with daemon(tmp_path, *sizes) as run, nursery.engine(transfer, **SMALL) as engine:
        assert_restored(engine, requests, expected)
        with Client(run.address) as kv:
            assert kv.stats()["counters"]["loaded_blobs"] > 5 * (SHARED // BLOB)  # from SSD


def assert_restored(engine: Engine, requests: Sequence[Request], expected: Answers) -> None:
    """All are right, and nearly all that the store can know of comes from there."""
    answers = engine.run(requests, at_once=4)
    assert_right(answers, expected)
    assert cached(answers) > 0.9 * sum(len(one.tokens) // BLOB * BLOB for one in requests)


def assert_counted(engine: Engine, *names: str) -> None:
    """vLLM has taken up what the connector counted."""
    found = engine.ask("metrics")
    assert all(found[f"vllm:blobstore_{name}"] > 0 for name in names), found


def preempt(engine: Engine, expected: Answers) -> None:
    """Answers outgrow the KV space: some requests are preempted, and come back."""
    before = engine.ask("metrics")["vllm:num_preemptions"]
    for _ in range(2):  # what it had computed is not in the store, and then is
        assert_right(engine.run(outgrowing(), at_once=4), expected)
    assert engine.ask("metrics")["vllm:num_preemptions"] > before

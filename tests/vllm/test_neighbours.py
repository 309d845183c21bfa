"""What one engine stored is another's, if and only if the bytes mean the same to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from blobstore.bench.engine_vllm_model import model_directory
from blobstore.cli.ask import reached
from blobstore.cli.naming import all_namespaces
from blobstore.clients import Client
from blobstore.namespace import Namespace
from blobstore.protocol import List, Report
from tests.support.daemon import Daemon, daemon
from tests.support.polling import poll_until
from tests.vllm.answers import WORKS_S, Answers, assert_right, cached
from tests.vllm.engines import Engine, Nursery, connector
from tests.vllm.prompts import BLOB, Request, few

SOME = few()[::2]
"""They share nothing, and so take nothing from each other."""

WHOLE = sum(len(one.tokens) // BLOB * BLOB for one in SOME)
"""Tokens that the store can give back."""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Daemon]:
    with daemon(tmp_path, "--dram", "256MiB", "--ssd", "1GiB") as run:
        yield run


def test_engines_whose_kv_differs_share_a_daemon(
    run: Daemon, nursery: Nursery, expected: Answers
) -> None:
    """Another dtype, another block size, another model: none takes another's for its own."""
    transfer = connector(run.address)
    others = ({"dtype": "bfloat16"}, {"block_size": 32}, {"model": str(model_directory(1))})
    with nursery.engine(transfer) as engine:
        assert_right(engine.run(SOME), expected)
        for options in others:
            with nursery.engine(transfer, **options) as other:
                own = other.run(SOME)
                assert cached(own) == 0
                assert_right(all_restored(other), own)
                if "block_size" in options:
                    assert_right(own, expected)
            assert_right(all_restored(engine), expected)


def all_restored(engine: Engine) -> Answers:
    """The answers once all comes from the store: what was computed is saved a moment later."""
    found: list[Answers] = []

    def restored() -> bool:
        engine.forget()
        found[:] = [engine.run(SOME)]
        assert cached(found[0]) <= WHOLE
        return cached(found[0]) == WHOLE

    poll_until(restored, WORKS_S, "all is restored from the store")
    return found[0]


@pytest.mark.soak  # two starts of vLLM in processes of its own, which the page's test has, too
def test_an_engine_as_vllm_runs_it_finds_what_another_stored(
    run: Daemon, nursery: Nursery, expected: Answers
) -> None:
    """Interpreters of their own; scheduler and worker are processes."""
    transfer = connector(run.address)
    with nursery.engine(transfer, alone=True) as engine:
        assert_right(engine.run(SOME, at_once=4), expected)
        wait_idle_tail(run, SOME)
    (order,) = orders(run)
    assert order.split(",")[-1].startswith("CPU_ATTN."), "the backend that computed"
    with nursery.engine(transfer) as engine:
        answers = engine.run(SOME, at_once=4)
        assert_right(answers, expected)
        assert cached(answers) == WHOLE
    assert orders(run) == {order}


def orders(run: Daemon) -> set[str]:
    """How blocks are laid out in blobs, as the store's namespaces say."""
    with reached(run.socket, 10.0) as asked:
        found = set()
        for facts in all_namespaces(asked):
            page = asked.ask(List(bytes.fromhex(facts["id"]), b"", 1), Report).body
            found.add(Namespace.decode(page["namespace"]["encoding"]).layout.order)
    return found


def wait_idle_tail(run: Daemon, requests: list[Request]) -> None:
    """Until all full blobs are stored, although the engine has nothing more to do."""
    blobs = sum((len(one.tokens) + one.max_tokens - 1) // BLOB for one in requests)
    with Client(run.address) as kv:
        poll_until(lambda: kv.stats()["blobs"] == blobs, 10.0, f"{blobs} blobs are stored")

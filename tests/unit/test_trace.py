"""Traces: what a file may say, and what comes with us."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from blobstore.bench.trace import BUNDLED, bundled_traces, load_trace, made_trace
from blobstore.errors import InvalidRequest

HEADER = {"header": 1, "name": "small", "block_size": 4, "source": "here", "licence": "none"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "small.jsonl.gz"


def write(file: Path, *lines: dict[str, Any] | str) -> str:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    file.write_bytes(gzip.compress(text.encode()))
    return str(file)


def test_requests_are_read_as_they_were_made(file: Path) -> None:
    hints = {"s": "x", "turn": 2, "type": "main", "stop": "tool_use"}
    name = write(
        file,
        HEADER,
        {"t": 1.5, "in": 7, "out": 3, "ids": [70, 8]},
        {"t": 2.5, "in": 9, "out": 0, "ids": [70, 8, 1], **hints},
    )
    trace = load_trace(name)
    first, second = trace.requests
    assert (trace.name, trace.block_tokens, trace.n_blocks) == ("small", 4, 3)
    assert trace.prompt_tokens == 16
    assert (first.time_s, first.blocks, first.prompt_tokens) == (1.5, [0, 1], 7)
    assert (first.answer_tokens, first.session, first.turn) == (3, "", -1)
    assert second.blocks == [0, 1, 2]
    assert (second.session, second.turn, second.kind, second.finish) == tuple(hints.values())


def test_no_two_requests_are_at_one_time_and_none_goes_back(file: Path) -> None:
    times = [5.0, 5.0, 4.0, 6.0]
    lines = [{"t": t, "in": 4, "ids": [1]} for t in times]
    read = [request.time_s for request in load_trace(write(file, HEADER, *lines)).requests]
    assert read == sorted(set(read))
    assert read[0] == 5.0
    assert read[-1] == 6.0


def test_equal_blocks_are_one_object(file: Path) -> None:
    ids = [*range(1000, 1300)]
    lines = [{"t": t, "in": 1200, "ids": ids} for t in range(2)]
    one, other = load_trace(write(file, HEADER, *lines)).requests
    assert all(a is b for a, b in zip(one.blocks, other.blocks, strict=True))


def test_the_head_has_the_blocks_of_its_requests() -> None:
    trace = made_trace()
    head = trace.head(10)
    assert head.requests == trace.requests[:10]
    assert {block for request in head.requests for block in request.blocks} == set(
        range(head.n_blocks)
    )
    assert trace.head(0).n_blocks == 0


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([HEADER, {"t": 1, "in": 9, "ids": [1]}], "line 2: 9 tokens are not 1 blocks"),
        ([HEADER, {"t": 1, "in": 8, "ids": [1, 2]}, {"t": 2, "in": 4, "ids": [2]}], "line 3"),
        ([HEADER, {"t": 1, "in": 8, "ids": [1, 1]}], "line 2: a block does not come after"),
        ([HEADER, {"t": 1, "in": 4, "ids": ["one"]}], "line 2: Expected `int`"),
        ([HEADER, "{"], "line 2"),
        ([{"name": "x"}], "line 1: Object missing required field `block_size`"),
        ([{"name": "x", "block_size": 0}], "line 1: a block of 0 tokens"),
        ([""], "line 1"),
    ],
)
def test_a_file_that_is_no_trace_is_told_with_its_line(
    file: Path, lines: list[dict[str, Any] | str], told: str
) -> None:
    with pytest.raises(InvalidRequest, match=told):
        load_trace(write(file, *lines))


def test_a_file_that_is_no_gzip_is_told(file: Path) -> None:
    file.write_bytes(b"plain")
    with pytest.raises(InvalidRequest, match="cannot be read as gzip"):
        load_trace(str(file))
    file.write_bytes(gzip.compress(b"x" * 100_000)[:60])
    with pytest.raises(InvalidRequest, match="cannot be read as gzip"):
        load_trace(str(file))


def test_an_unknown_name_is_answered_with_those_there_are() -> None:
    with pytest.raises(InvalidRequest, match="lmcache_agents, mooncake_conversation"):
        load_trace("nothing")


@pytest.mark.parametrize("name", bundled_traces())
def test_bundled_traces_are_read_by_name_and_described(name: str) -> None:
    trace = load_trace(name)
    assert trace.name == name
    assert len(trace.requests) > 1000
    assert f"`{name}.jsonl.gz`" in (BUNDLED / "README.md").read_text(encoding="utf-8")


def test_the_made_trace_is_the_same_every_time_and_has_much_to_reuse() -> None:
    trace = made_trace()
    assert trace == made_trace()
    assert trace != made_trace(seed=8)
    touched = sum(len(request.blocks) for request in trace.requests)
    assert trace.n_blocks < touched / 2

"""What runners may ask over their connections."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from blobstore import protocol as p
from blobstore.errors import InvalidRequest, UnknownNamespace
from blobstore.rebuild_calls import RebuildCalls
from tests.unit.test_rebuilds import N, World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with World(tmp_path) as made:
        yield made


def calls_of(world: World, name: str = "n") -> RebuildCalls:
    return RebuildCalls(world.rebuilds, name)


def registered(world: World, calls: RebuildCalls, concurrency: int = 1) -> int:
    reply = world.call(calls.serve, p.ServeRebuilds([world.ns.id], concurrency))
    assert isinstance(reply, p.Done)
    return reply.count


def told(world: World, calls: RebuildCalls, runner_id: int) -> p.Rebuild:
    reply = world.run(calls.next(runner_id, 0.0))
    assert isinstance(reply, p.Rebuild)
    return reply


def test_a_job_as_it_travels(world: World) -> None:
    world.drop(4)
    calls = calls_of(world)
    runner_id = registered(world, calls)
    world.begin(4)
    job = told(world, calls, runner_id)
    assert job.keys == b"".join(world.keys[4:])
    assert job.context_keys == b"".join(world.keys[:4])
    assert (job.key_bytes, job.tail_tokens, job.wanted) == (32, 0, N - 4)
    assert p.decode_reply(p.encode(job)) == job
    assert world.run(calls.next(runner_id, 0.0)) == p.Done()


def test_a_runner_belongs_to_its_connection(world: World) -> None:
    world.drop(4)
    own, other = calls_of(world), calls_of(world)
    runner_id = registered(world, own)
    world.begin(4)
    job = told(world, own, runner_id)
    with pytest.raises(InvalidRequest, match="not registered"):
        world.run(other.next(runner_id, 0.0))
    assert other.progress(p.RebuildProgress(job.job_id, 1)) == p.Done()
    assert other.ended(p.RebuildEnded(job.job_id, "", 2, 1.0)) == p.Done()
    assert other.stop(p.StopRebuilds(runner_id)) == p.Done()
    assert world.call(own.progress, p.RebuildProgress(job.job_id, 0)) == p.Done(2)
    assert world.call(own.ended, p.RebuildEnded(job.job_id, "failed", 0, 1.0)) == p.Done(1)


@pytest.mark.parametrize("way", ["close", "stop", "untold"])
def test_what_is_not_ended_goes_to_another(way: str, world: World) -> None:
    world.drop(4)
    own, other = calls_of(world), calls_of(world)
    runner_id, other_id = registered(world, own), registered(world, other)
    wait = world.begin(4)
    job = told(world, own, runner_id)
    if way == "close":
        world.call(own.close)
        world.call(own.close)
    elif way == "stop":
        assert world.call(own.stop, p.StopRebuilds(runner_id)) == p.Done(1)
    else:
        world.call(own.untold, job)
    assert told(world, other, other_id).keys == job.keys
    assert not wait.ended.done()


@pytest.mark.parametrize("reason", ["failed", "x" * 10_000, "no_room"])
def test_reasons_are_few(reason: str, world: World) -> None:
    world.drop(4)
    calls = calls_of(world)
    runner_id = registered(world, calls)
    wait = world.begin(4)
    job = told(world, calls, runner_id)
    world.call(calls.ended, p.RebuildEnded(job.job_id, reason, 0, 0.0))
    assert wait.ended.result() == ("no_room" if reason == "no_room" else "failed")


def test_unknown_namespaces_are_refused(world: World) -> None:
    with pytest.raises(UnknownNamespace):
        calls_of(world).serve(p.ServeRebuilds([bytes(32)], 1))

"""An engine goes on, with the right tokens, whatever becomes of the daemon."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from blobstore.clients import Client
from blobstore.units import MIB
from tests.support.daemon import Daemon, daemon
from tests.support.polling import poll_until
from tests.support.tmpfs import tmpfs
from tests.vllm.answers import Answers, assert_right, cached, wait_restored, wait_saved
from tests.vllm.engines import Engine, Nursery, connector
from tests.vllm.prompts import few

SOME = few()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the daemons of this module have their socket, one after the other."""
    return tmp_path_factory.mktemp("daemons")


@pytest.fixture(scope="module")
def engine(home: Path, nursery: Nursery, expected: Answers) -> Iterator[Engine]:
    """One for all that happens here; when it starts there is no daemon."""
    with nursery.engine(connector(f"unix:{home / 'b.sock'}")) as engine:
        yield engine
        assert "Traceback" not in engine.said


@contextmanager
def serving(home: Path, data: Path, *options: str, **environ: str) -> Iterator[Daemon]:
    """A daemon that the engine finds, with data of its own."""
    sizes = ("--dram", "256MiB", "--ssd", "1GiB", "--data", os.fspath(data))
    with daemon(home, *sizes, *options, environ=environ) as run:
        yield run


def begin(engine: Engine, kv: Client, counter: str) -> None:
    """Let the engine begin, and wait until the daemon has counted something more."""

    def counted() -> int:
        count = kv.stats()["counters"][counter]
        return sum(count.values()) if isinstance(count, dict) else int(count)

    before = counted()
    engine.begin(SOME, at_once=4)
    poll_until(lambda: counted() > before, 60.0, f"the daemon counts {counter}")


def test_no_daemon(engine: Engine, expected: Answers) -> None:
    for _ in range(2):
        engine.forget()
        assert_right(engine.run(SOME, at_once=4), expected)
    assert len(engine.warnings) == 1


@pytest.mark.parametrize("fault", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.parametrize("during", ["saves", "loads"])
def test_a_daemon_that_is_frozen_or_killed(
    tmp_path: Path, home: Path, engine: Engine, expected: Answers,
    during: str, fault: signal.Signals,
) -> None:  # fmt: skip
    with serving(home, tmp_path) as run, Client(run.address) as kv:
        wait_restored(engine, SOME[0], expected)
        if during == "loads":
            assert_right(engine.run(SOME, at_once=4), expected)
            wait_saved(kv)
        engine.forget()
        begin(engine, kv, "gets" if during == "loads" else "put_blobs")
        run.process.send_signal(fault)
        assert_right(engine.answers(), expected)
        if fault == signal.SIGSTOP:
            run.process.send_signal(signal.SIGCONT)
            wait_restored(engine, SOME[0], expected)
    engine.forget()
    engine.begin(SOME, at_once=4)
    with serving(home, tmp_path):  # in the middle of this, it comes back
        assert_right(engine.answers(), expected)
        wait_restored(engine, SOME[0], expected)


def test_blobs_that_rot(tmp_path: Path, home: Path, engine: Engine, expected: Answers) -> None:
    with serving(home, tmp_path) as run, Client(run.address) as kv:
        wait_restored(engine, SOME[0], expected)
        assert_right(engine.run(SOME, at_once=4), expected)
        wait_saved(kv)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 0
    for segment in tmp_path.glob("segments/*.seg"):
        rot(segment)
    with serving(home, tmp_path) as run, Client(run.address) as kv:
        engine.forget()
        assert_right(engine.run(SOME, at_once=4), expected)
        assert kv.stats()["counters"]["corrupt"] > 0
        wait_restored(engine, SOME[0], expected)
        assert_right(engine.run(SOME, at_once=4), expected)


def rot(segment: Path) -> None:
    """Change a byte in every four megabytes."""
    with segment.open("r+b") as file:
        for offset in range(MIB // 2, segment.stat().st_size, 4 * MIB):
            file.seek(offset)
            (byte,) = file.read(1)
            file.seek(offset)
            file.write(bytes([byte ^ 0x10]))


def test_an_arena_smaller_than_one_request(
    tmp_path: Path, home: Path, engine: Engine, expected: Answers
) -> None:
    """So blobs go between a match and the load that it promised."""
    small = ("--dram", "4MiB", "--ssd", "off")
    with serving(home, tmp_path, *small, BLOBSTORE__TIERING__POLICY="lru") as run:
        for _ in range(2):
            engine.forget()
            assert_right(engine.run(SOME, at_once=4), expected)
        with Client(run.address) as kv:
            assert kv.stats()["counters"]["dropped"] > 0


@pytest.mark.root
def test_a_full_disk(tmp_path: Path, home: Path, engine: Engine, expected: Answers) -> None:
    durable = [replace(one, params={"retention": "durable"}) for one in SOME]
    with (
        tmpfs(tmp_path / "disk", 64 * MIB) as disk,
        serving(home, disk / "data") as run,
        Client(run.address) as kv,
    ):
        free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
        (disk / "others").write_bytes(bytes(free - 4 * MIB))
        for _ in range(2):
            engine.forget()
            assert_right(engine.run(durable, at_once=4), expected)
        assert kv.stats()["counters"]["ssd_errors"] > 0


def test_requests_that_are_given_up_while_they_load(
    tmp_path: Path, home: Path, engine: Engine, expected: Answers
) -> None:
    with serving(home, tmp_path) as run, Client(run.address) as kv:
        wait_restored(engine, SOME[0], expected)
        assert_right(engine.run(SOME, at_once=4), expected)
        for steps in range(6):
            engine.forget()
            engine.submit(SOME[:4])
            engine.ask("step", steps)
            engine.ask("abort", [one.name for one in SOME[:4]])
            engine.forget()
            assert engine.ask("in_use") == 0.0
        engine.ask("answers")
        assert_right(engine.run(SOME, at_once=4), expected)
        poll_until(lambda: kv.stats()["leases"] == kv.stats()["reservations"] == 0)


def test_an_engine_that_is_killed_while_it_saves(
    tmp_path: Path, home: Path, nursery: Nursery, engine: Engine, expected: Answers,
) -> None:  # fmt: skip
    with serving(home, tmp_path) as run, Client(run.address) as kv:
        with nursery.engine(connector(run.address)) as victim:
            begin(victim, kv, "put_blobs")
            victim.kill()
        poll_until(lambda: kv.stats()["lent_bytes"] == kv.stats()["reservations"] == 0, 20.0)
        assert kv.verify()["corrupt"] == []
        engine.forget()
        answers = engine.run(SOME, at_once=4)
        assert_right(answers, expected)
        assert cached(answers) > 0

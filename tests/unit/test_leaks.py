"""The leak check itself: it must see each kind, and must not see ghosts."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from mmap import ACCESS_READ, mmap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import leaks


@contextmanager
def _thread() -> Iterator[None]:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="straggler")
    thread.start()
    yield
    end.set()
    thread.join()


@contextmanager
def _descriptor() -> Iterator[None]:
    fd = os.open(os.devnull, os.O_RDONLY)
    yield
    os.close(fd)


@contextmanager
def _shm_name() -> Iterator[None]:
    path = Path(f"/dev/shm/leak-check-{os.getpid()}")
    path.touch()
    yield
    path.unlink()


@contextmanager
def _child() -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE):
        yield


@pytest.mark.parametrize(
    ("leak", "named"),
    [
        (_thread, "thread straggler"),
        (_descriptor, "descriptor"),
        (_shm_name, "/dev/shm/leak-check-"),
        (_child, "child process"),
    ],
)
def test_each_kind_of_leak_is_named(
    leak: Callable[[], AbstractContextManager[None]], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaks, "GRACE_S", 0.05)
    leaked = leak()
    try:
        with pytest.raises(pytest.fail.Exception, match=named), leaks.no_leaks():
            leaked.__enter__()
    finally:
        leaked.__exit__(None, None, None)


def test_memory_is_in_foreign_use_whatever_name_it_was_made_under(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leaks, "_descends_from_us", lambda pid: False)  # as if we were another
    made = Path(f"/dev/shm/made-{os.getpid()}")
    name = Path(f"/dev/shm/leak-check-{os.getpid()}")
    made.write_bytes(b"semaphore")
    with made.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ):
        name.hardlink_to(made)
        made.unlink()
        in_use = leaks._in_foreign_use(name)
    in_use_later = leaks._in_foreign_use(name)
    name.unlink()
    assert (in_use, in_use_later) == (True, False)


async def test_a_task_left_running_is_named_and_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "GRACE_S", 0.05)
    with pytest.raises(pytest.fail.Exception, match="straggler"):
        async with leaks.no_leaked_tasks():
            task = asyncio.create_task(asyncio.Event().wait(), name="straggler")
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_tasks_that_end_in_time_are_no_leak() -> None:
    async with leaks.no_leaked_tasks():
        task = asyncio.create_task(asyncio.sleep(0.01))
    assert task.done()


def test_what_ends_in_time_or_was_there_before_is_no_leak() -> None:
    before = os.open(os.devnull, os.O_RDONLY)
    gate = threading.Event()
    thread = threading.Thread(target=gate.wait, args=(0.05,))
    with leaks.no_leaks():
        thread.start()
    assert not thread.is_alive()
    os.close(before)


class _Knot:
    """Holds a file open until the collector finds it."""

    def __init__(self) -> None:
        self.me = self
        self.fd = os.open(os.devnull, os.O_RDONLY)

    def __del__(self) -> None:
        os.close(self.fd)


def test_descriptors_held_by_garbage_are_collected_first() -> None:
    with leaks.no_leaks():
        _Knot()


# What pytest's plugins do around a test must not look like a leak of the test.
@given(st.binary())
def test_property_tests_run_under_the_check(data: bytes) -> None:
    assert Path("/proc/self/fd").is_dir(), data


@given(st.binary())
async def test_async_property_tests_run_under_the_check(data: bytes) -> None:
    assert await asyncio.to_thread(bytes, data) == data


@pytest.mark.usefixtures("capfd", "tmp_path")
async def test_executors_of_the_loop_are_no_leak() -> None:
    assert await asyncio.to_thread(threading.current_thread) is not threading.main_thread()

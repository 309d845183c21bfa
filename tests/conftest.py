"""Rules that hold for every test."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
import uvloop
from hypothesis import settings

from tests.support import leaks

# Equal runs find equal faults; a slow machine is no fault.
settings.register_profile("reproducible", deadline=None, derandomize=True)
settings.load_profile("reproducible")


def pytest_sessionstart() -> None:
    # A shell starts what it puts in the background deaf to SIGINT, and so would be our children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # libuv opens its signal pipe with the first loop and keeps it for the life of the process.
    uvloop.run(asyncio.sleep(0))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    as_root = os.geteuid() == 0
    soaking = "soak" in config.getoption("markexpr")
    for item in items:
        if item.get_closest_marker("root") and not as_root:
            item.add_marker(pytest.mark.skip(reason="needs root (tmpfs mounts)"))
        if item.get_closest_marker("soak") and not soaking:
            item.add_marker(pytest.mark.skip(reason="long: run by `make soak`"))


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Nothing of this process outlives a test."""
    with leaks.no_leaks():
        yield


@pytest.fixture(autouse=True)
def no_leaked_tasks(no_leaks: None, request: pytest.FixtureRequest) -> None:
    """Async tests leave no tasks either; `no_leaks` comes first, so that it ends after the loop."""
    if pytest_asyncio.is_async_test(request.node):
        request.getfixturevalue("task_watch")


@pytest.fixture
async def task_watch() -> AsyncIterator[None]:
    async with leaks.no_leaked_tasks():
        yield

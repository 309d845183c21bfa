"""One daemon for all tests of the clients' contract; a client of each kind for every test.

Over HTTP as well, but for tests that are marked `in_place`: they are of what only a
client on the daemon's machine has, memory that it shares.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from blobstore.clients import Client
from blobstore.units import format_size
from tests.support.both_clients import HTTP_KINDS, KINDS, reach
from tests.support.contract import DRAM_BYTES, holds_nothing
from tests.support.daemon import Daemon, daemon
from tests.support.polling import poll_until

_OVER_HTTP = ("kv", "lonely")
"""Fixtures that are clients of any kind."""


def pytest_configure(config: pytest.Config) -> None:
    """Make the mark known."""
    config.addinivalue_line("markers", "in_place: of memory that is shared with the daemon")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test with all kinds of clients that it is about."""
    if "kind" not in metafunc.fixturenames:
        return
    kinds: tuple[str, ...] = KINDS
    in_place = metafunc.definition.get_closest_marker("in_place") is not None
    if not in_place and any(name in metafunc.fixturenames for name in _OVER_HTTP):
        kinds += HTTP_KINDS
    metafunc.parametrize("kind", kinds, indirect=True)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with both tiers. What tests put stays: each uses namespaces of its own.

    Tests flood it and know what leaves first, so its order is one that learns nothing.
    """
    home = tmp_path_factory.mktemp("contract")
    options = ("--dram", format_size(DRAM_BYTES), "--ssd", "512MiB", "--http", "127.0.0.1:0")
    with daemon(home, *options, environ={"BLOBSTORE__TIERING__POLICY": "lru"}) as run:
        yield run


@pytest.fixture
def other(shared: Daemon) -> Iterator[Client]:
    """A client beside the one that is tested. In the end nobody holds anything."""
    with Client(shared.address, timeout_s=20.0) as other:
        yield other
        poll_until(lambda: holds_nothing(other), 10.0, "all that the test held is back")


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    """Of client."""
    chosen: str = request.param
    return chosen


@pytest.fixture
def kv(kind: str, shared: Daemon, other: Client) -> Iterator[Any]:
    """The client that is tested."""
    with reach(kind, shared, timeout_s=20.0) as kv:
        yield kv


@pytest.fixture
def model(request: pytest.FixtureRequest) -> str:
    """A name that no other test puts into its namespaces."""
    return str(request.node.nodeid)

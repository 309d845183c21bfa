"""One daemon for all tests of the clients' contract; a client of each kind for every test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from blobstore.clients import Client
from blobstore.units import format_size
from tests.support.both_clients import KINDS, connect
from tests.support.contract import DRAM_BYTES, holds_nothing
from tests.support.daemon import Daemon, daemon
from tests.support.polling import poll_until


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with both tiers. What tests put stays: each uses namespaces of its own."""
    home = tmp_path_factory.mktemp("contract")
    with daemon(home, "--dram", format_size(DRAM_BYTES), "--ssd", "512MiB") as run:
        yield run


@pytest.fixture
def other(shared: Daemon) -> Iterator[Client]:
    """A client beside the one that is tested. In the end nobody holds anything."""
    with Client(shared.address, timeout_s=20.0) as other:
        yield other
        poll_until(lambda: holds_nothing(other), 10.0, "all that the test held is back")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Of client."""
    chosen: str = request.param
    return chosen


@pytest.fixture
def kv(kind: str, shared: Daemon, other: Client) -> Iterator[Any]:
    """The client that is tested."""
    with connect(kind, shared.address, timeout_s=20.0) as kv:
        yield kv


@pytest.fixture
def model(request: pytest.FixtureRequest) -> str:
    """A name that no other test puts into its namespaces."""
    return str(request.node.nodeid)

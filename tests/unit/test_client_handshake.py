"""The greeting: what is accepted, and that nothing stays open when it is not."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from blobstore.clients import Client
from blobstore.clients.handshake import Await, greet, socket_path
from blobstore.errors import BlobStoreError, Busy, ProtocolError, Unavailable
from blobstore.protocol import VERSION, Done, Failed, Hello, Reply, Welcome
from blobstore.transports.framing import pack
from tests.support.both_clients import KINDS, connect
from tests.support.scripted_daemon import ScriptedDaemon


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[ScriptedDaemon]:
    with ScriptedDaemon(tmp_path / "s") as daemon:
        yield daemon


def n_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_the_client_says_its_version_and_name(daemon: ScriptedDaemon) -> None:
    with Client(daemon.address):
        (hello,) = daemon.seen(Hello)
    assert isinstance(hello, Hello)
    assert hello.version == VERSION
    assert hello.client == Path("/proc/self/comm").read_text().strip()


@pytest.mark.parametrize("address", ["unix:/run/b.sock", "unix:///run/b.sock"])
def test_addresses_are_paths_behind_a_scheme(address: str) -> None:
    assert socket_path(address) == "/run/b.sock"


REFUSALS: dict[str, tuple[Callable[[], Reply | bytes], type[BlobStoreError], str]] = {
    "a busy daemon": (lambda: Failed("busy", "too many clients", 2.5), Busy, "too many clients"),
    "another version": (lambda: Welcome(99, 1, 8 << 20, 1, 1), ProtocolError, "found protocol 99"),
    "another message": (lambda: Done(1), ProtocolError, "sent Done"),
    "no message": (lambda: pack(1, 1, b"\xff"), ProtocolError, "greeting is no message"),
    "another protocol": (lambda: b"SSH-2.0-OpenSSH_9.6\r\n" + b" " * 30, ProtocolError, "SSH-"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", REFUSALS)
def test_another_greeting_is_refused(name: str, kind: str, daemon: ScriptedDaemon) -> None:
    answer, error, message = REFUSALS[name]
    daemon.greet = answer
    before = n_open()
    with pytest.raises(error, match=message) as raised:
        connect(kind, daemon.address)
    if isinstance(raised.value, Busy):
        assert raised.value.retry_after_s == 2.5
    daemon.stop()
    assert n_open() < before, "the daemon's own descriptors are gone, and no others came"
    daemon.start()


@pytest.mark.parametrize("n", [0, 1])
def test_a_greeting_without_the_arena_is_refused(n: int, daemon: ScriptedDaemon) -> None:
    daemon.n_descriptors = n
    with pytest.raises(ProtocolError, match=f"passes 2 descriptors, found protocol 1 and {n}"):
        Client(daemon.address)


def test_a_daemon_that_hangs_up_instead_is_unavailable(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)

        def hang_up() -> None:
            listener.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        with pytest.raises(Unavailable, match="hung up"):
            Client(f"unix:{path}")
        thread.join()


def test_a_greeting_in_pieces_is_put_together(daemon: ScriptedDaemon) -> None:
    whole = daemon.frame(1, daemon._welcome())
    daemon.greet = lambda: whole[:10]
    steps = greet(str(daemon.path))
    reads = 0
    try:
        while True:
            wait = next(steps)
            if wait.events == select.POLLIN:
                reads += 1
                if reads == 2:
                    daemon.peers[0].send(whole[10:])
            poll = select.poll()
            poll.register(wait.sock, wait.events)
            assert poll.poll(5000)
    except StopIteration as end:
        greeted = end.value
    assert reads == 2
    assert greeted.welcome.boot_id == daemon.boot_id
    greeted.close_descriptors()
    greeted.sock.close()


def test_a_greeting_that_is_given_up_leaves_nothing_open(daemon: ScriptedDaemon) -> None:
    daemon.greet = lambda: None
    steps = greet(str(daemon.path))
    before = n_open()
    assert isinstance(next(steps), Await)
    steps.close()
    assert n_open() <= before + 1, "at most the daemon's end of it, for a moment"

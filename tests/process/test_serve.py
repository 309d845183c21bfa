"""The daemon as a process: how it starts, is refused, stops and is killed."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from blobstore.clients import BoundNamespace, Client, Keys, KVLayout, Namespace
from blobstore.units import MIB
from tests.support.daemon import Daemon, daemon, refused
from tests.support.polling import poll_until
from tests.support.tmpfs import tmpfs


def is_there(path: Path) -> bool:
    """A socket without a connection, or a file."""
    return path.exists() or path.with_name(path.name + ".pid").exists()


def test_sigterm_ends_it_with_0_and_leaves_neither_socket_nor_pid_file(tmp_path: Path) -> None:
    with daemon(tmp_path) as run:
        pid = run.socket.with_name("b.sock.pid").read_text()
        assert int(pid) == run.process.pid
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 0
        assert not is_there(run.socket)
        assert "Traceback" not in run.said


def test_sigterm_does_not_wait_for_idle_connections(tmp_path: Path) -> None:
    with daemon(tmp_path) as run, ExitStack() as idle:
        for _ in range(10):
            connection = idle.enter_context(socket.socket(socket.AF_UNIX))
            connection.connect(os.fspath(run.socket))
        run.process.send_signal(signal.SIGTERM)
        assert run.wait(3.0) == 0


def keys_of(kv: Client, n: int) -> tuple[BoundNamespace, Keys]:
    layout = KVLayout.opaque(MIB)
    ns = kv.namespace(Namespace(model="m", layout=layout, tokens_per_blob=16))
    return ns, ns.keys(range(16 * n))


def test_sealed_blobs_are_on_disk_after_sigterm(tmp_path: Path) -> None:
    with daemon(tmp_path) as run, Client(run.address) as kv:
        ns, keys = keys_of(kv, 8)
        assert kv.put_from(ns, keys, [bytes([i]) * MIB for i in range(8)]) == ["stored"] * 8
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 0
    with daemon(tmp_path) as run, Client(run.address) as kv:
        ns, keys = keys_of(kv, 8)
        with kv.get(ns, keys) as lease:
            assert [lease[i] == bytes([i]) * MIB for i in range(len(lease))] == [True] * 8


def test_a_put_in_flight_at_sigterm_is_finished_and_new_ones_are_refused(tmp_path: Path) -> None:
    with daemon(tmp_path) as run, Client(run.address) as kv:
        ns, keys = keys_of(kv, 2)
        with kv.put(ns, keys[:1]) as writer:
            run.process.send_signal(signal.SIGTERM)
            poll_until(lambda: "draining" in run.said)
            assert kv.put_from(ns, keys[1:], [bytes(MIB)], parent=keys[0]) == ["refused"]
            writer[0][:] = b"x" * MIB
        assert writer.results == ["stored"]
        assert run.wait() == 0
    with daemon(tmp_path) as run, Client(run.address) as kv:
        ns, keys = keys_of(kv, 2)
        assert kv.match(ns, keys).blobs == 1


def test_a_put_that_never_ends_does_not_outlast_the_drain_limit(tmp_path: Path) -> None:
    environ = {"BLOBSTORE__TIMES__DRAIN_S": "0.5"}
    with daemon(tmp_path, environ=environ) as run, Client(run.address) as kv:
        ns, keys = keys_of(kv, 1)
        with kv.put(ns, keys) as writer:
            writer[0][:] = b"x" * MIB
            run.process.send_signal(signal.SIGTERM)
            assert run.wait(2.5) == 0
        assert writer.results == ["refused"]


def test_a_second_signal_stops_it_at_once(tmp_path: Path) -> None:
    environ = {"BLOBSTORE__TIMES__DRAIN_S": "60"}
    with daemon(tmp_path, environ=environ) as run, Client(run.address) as kv:
        ns, keys = keys_of(kv, 1)
        with kv.put(ns, keys):
            run.process.send_signal(signal.SIGTERM)
            poll_until(lambda: "draining" in run.said)
            run.process.send_signal(signal.SIGTERM)
            assert run.wait(3.0) == 0
        assert not is_there(run.socket)


def test_what_it_creates_is_private(tmp_path: Path) -> None:
    with daemon(tmp_path) as run:
        for path in (run.socket, run.data, *run.data.rglob("*")):
            assert path.stat().st_mode & 0o077 == 0, path


def test_a_killed_daemon_is_followed_by_another_without_clean_up(tmp_path: Path) -> None:
    with daemon(tmp_path) as run:
        run.kill()
        assert is_there(run.socket)
    with daemon(tmp_path) as run:
        assert int(run.socket.with_name("b.sock.pid").read_text()) == run.process.pid


def test_a_second_daemon_on_the_socket_is_refused_with_the_pid_of_the_first(
    tmp_path: Path,
) -> None:
    with daemon(tmp_path) as first:
        (tmp_path / "second").mkdir()
        code, said = refused(tmp_path / "second", "--socket", os.fspath(first.socket))
        assert code == 1
        assert f"pid {first.process.pid}" in said
        assert first.process.poll() is None
        assert first.socket.exists()


def test_a_second_daemon_on_the_directory_is_refused_with_the_pid_of_the_first(
    tmp_path: Path,
) -> None:
    with daemon(tmp_path) as first:
        (tmp_path / "second").mkdir()
        options = ("--data", os.fspath(first.data), "--dram", "512MiB")
        code, said = refused(tmp_path / "second", *options)
        assert code == 1
        assert str(first.process.pid) in said
        assert first.process.poll() is None
    assert not is_there(tmp_path / "second" / "b.sock")


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--dram", "2 parsecs"), 2, "unknown unit"),
        (("--dram", "900TiB"), 1, "900 TiB"),
        (("--data", "/dev/null/data"), 1, "/dev/null/data"),
        (("--data", "/dev/null"), 1, "/dev/null"),
        (("--socket", "/nowhere/at/all.sock"), 1, "/nowhere/at/all.sock"),
        (("--socket", "/" + "x" * 200), 2, "107 bytes"),
        (("--config", "/nowhere.toml"), 2, "/nowhere.toml"),
    ],
)
def test_a_bad_request_is_one_line_and_its_exit_code(
    tmp_path: Path, options: tuple[str, ...], code: int, words: str
) -> None:
    found, said = refused(tmp_path, *options)
    assert found == code
    assert words in said


def test_a_file_at_the_sockets_path_is_kept(tmp_path: Path) -> None:
    (tmp_path / "b.sock").write_text("precious")
    code, said = refused(tmp_path)
    assert code == 1
    assert "b.sock" in said
    assert (tmp_path / "b.sock").read_text() == "precious"


def test_auto_memory_comes_from_the_cgroup_and_too_much_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for path, text in {
        "proc/meminfo": "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n",
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": f"{512 * MIB}\n",
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    environ = {"BLOBSTORE__HOST__ROOT": os.fspath(root)}
    with daemon(tmp_path, "--dram", "auto", environ=environ) as run:
        assert "dram 307 MiB" in run.said
    code, said = refused(tmp_path, "--dram", "600MiB", environ=environ)
    assert code == 1
    assert "600 MiB" in said
    assert "512 MiB" in said


@pytest.mark.root
def test_an_arena_larger_than_its_tmpfs_is_refused_at_once(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "shm", 8 * MIB) as shm:
        environ = {"BLOBSTORE__DRAM__DIRECTORY": os.fspath(shm)}
        code, said = refused(tmp_path, environ=environ)
        assert code == 1
        assert "64 MiB" in said
        assert os.fspath(shm) in said
        assert list(shm.iterdir()) == []


def test_sigterm_while_it_opens_ends_it_at_once(tmp_path: Path) -> None:
    run = Daemon(tmp_path, "--dram", "4GiB")
    try:
        poll_until(lambda: (tmp_path / "b.sock.pid").exists(), what="it has begun to open")
        run.process.send_signal(signal.SIGTERM)
        assert run.wait(5.0) in (0, -signal.SIGTERM)
        assert "Traceback" not in run.said
    finally:
        run.kill()

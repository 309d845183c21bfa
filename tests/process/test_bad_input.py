"""Bad input from outside: each a typed error with what was wanted and found, and what to do."""

from __future__ import annotations

import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import lmdb
import pytest

from blobstore.clients import Client, Keys
from blobstore.errors import FrameTooLarge, InvalidRequest, SizeMismatch, Unavailable
from blobstore.protocol import (
    VERSION,
    Failed,
    Get,
    Hello,
    Match,
    Ping,
    Pong,
    Release,
    Reserve,
    Stats,
)
from blobstore.transports.framing import HEADER_BYTES, MAGIC, MAX_BODY_BYTES, pack
from blobstore.units import KIB, MIB
from tests.support.blobs import chain, count_right, opaque, payloads_of, put
from tests.support.daemon import Daemon, daemon, refused
from tests.support.polling import poll_until
from tests.support.raw_client import HungUp, RawClient
from tests.support.tmpfs import tmpfs

SMALL = opaque(MIB)
KEYS = chain(SMALL, 1, 4)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon for all who send it something bad: it must not mind."""
    with daemon(tmp_path_factory.mktemp("shared")) as run:
        yield run
        assert "Traceback" not in run.said


def failed(raw: RawClient, data: bytes) -> Failed:
    """The error that answers these bytes."""
    raw.send(data)
    reply = raw.hear()[2]
    assert isinstance(reply, Failed), reply
    return reply


def test_buffers_of_a_wrong_size_are_refused_with_both_numbers(run: Daemon) -> None:
    with Client(run.address) as kv:
        ns = kv.namespace(SMALL)
        for nbytes in (MIB - 1, MIB + 1, 0):
            with pytest.raises(SizeMismatch) as put_error:
                kv.put_from(ns, KEYS[:1], [bytes(nbytes)])
            with pytest.raises(SizeMismatch) as get_error:
                kv.get_into(ns, KEYS[:1], [bytearray(nbytes)])
            for error in (put_error, get_error):
                assert f"{MIB}" in str(error.value).replace(",", "")
                assert f"{nbytes}" in str(error.value).replace(",", "")
        with pytest.raises(ValueError, match="different structures"), kv.put(ns, KEYS) as writer:
            writer[0][:] = bytes(MIB - 1)
        assert kv.exists(ns, KEYS) == [False] * 4


def test_a_namespace_that_was_not_declared_is_refused(run: Daemon) -> None:
    with RawClient(run.socket) as raw:
        unknown = bytes(32)
        for request in (
            Match(unknown, KEYS.packed, 32),
            Get(unknown, KEYS.packed, 32, 1.0),
            Reserve(unknown, KEYS.packed, 32, b"", 0, "standard", 1.0),
        ):
            reply = raw.ask(request)
            assert isinstance(reply, Failed)
            assert reply.code == "unknown_namespace"
            assert "declare it first" in reply.message
        assert isinstance(raw.ask(Ping()), Pong)


def test_a_frame_of_another_boot_is_refused(run: Daemon) -> None:
    with RawClient(run.socket) as raw:
        own, raw.boot_id = raw.boot_id, raw.boot_id ^ 1
        reply = failed(raw, raw.frame(Release([1])))
        assert reply.code == "stale_boot"
        assert "restarted" in reply.message
        raw.boot_id = own
        assert isinstance(raw.ask(Ping()), Pong)


@pytest.mark.parametrize("nbytes", [MAX_BODY_BYTES + 1, 1 << 31, (1 << 32) + 5, (1 << 64) - 1])
def test_an_oversize_frame_is_refused_before_it_comes(run: Daemon, nbytes: int) -> None:
    header = struct.pack("<4sIQQ", MAGIC, 1, 0, nbytes)
    assert len(header) == HEADER_BYTES
    with RawClient(run.socket) as raw:
        reply = failed(raw, header)
        assert reply.code == "frame_too_large"
        assert str(nbytes) in reply.message
        assert str(MAX_BODY_BYTES) in reply.message
        with pytest.raises(HungUp):
            raw.hear()
    with Client(run.address) as kv:
        assert kv.ping()


def test_a_call_with_too_many_keys_is_refused_and_harms_nothing(run: Daemon) -> None:
    with Client(run.address) as kv:
        ns = kv.namespace(SMALL)
        number = MAX_BODY_BYTES // 32 + 1
        keys = Keys.of([i.to_bytes(32, "little") for i in range(number)])
        with pytest.raises(FrameTooLarge, match=str(MAX_BODY_BYTES)):
            kv.match(ns, keys)
        assert kv.ping()


@pytest.mark.parametrize(
    ("greeting", "code", "words"),
    [
        (pack(1, 0, b"\xc1"), "protocol", "not a message"),
        (pack(1, 0, b""), "protocol", "not a message"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "protocol", "not a blobstore frame"),
        (struct.pack("<4sIQQ", MAGIC, 1, 0, 1 << 40), "frame_too_large", str(1 << 40)),
    ],
)
def test_a_bad_greeting_is_refused(run: Daemon, greeting: bytes, code: str, words: str) -> None:
    with RawClient(run.socket, greet=False) as raw:
        reply = failed(raw, greeting)
        assert (reply.code, words in reply.message) == (code, True), reply
        with pytest.raises(HungUp):
            raw.hear()


def test_another_version_of_the_protocol_is_refused_with_both_numbers(run: Daemon) -> None:
    with RawClient(run.socket, greet=False) as raw:
        reply = failed(raw, raw.frame(Hello(VERSION + 1, "future")))
        assert reply.code == "protocol"
        assert f"version {VERSION} " in reply.message
        assert f"client {VERSION + 1}" in reply.message


def test_a_request_before_the_greeting_is_refused(run: Daemon) -> None:
    with RawClient(run.socket, greet=False) as raw:
        assert failed(raw, raw.frame(Stats())).code == "protocol"


def test_a_client_without_a_daemon_raises_unavailable(tmp_path: Path) -> None:
    nobody, no_socket = tmp_path / "nobody.sock", tmp_path / "file"
    no_socket.write_text("")
    with daemon(tmp_path) as run:
        run.kill()
    for path in (nobody, no_socket, run.socket):
        with pytest.raises(Unavailable, match=str(path)):
            Client(f"unix:{path}", timeout_s=0.5)
    with pytest.raises(InvalidRequest, match="107"):
        Client("unix:/" + "x" * 200)
    with pytest.raises(InvalidRequest, match="unix:"):
        Client("ftp://localhost:80")
    with pytest.raises(Unavailable, match="http://localhost:1"):
        Client("http://localhost:1", timeout_s=0.5)


def test_calls_on_a_dead_daemon_miss_and_the_next_daemon_is_found(tmp_path: Path) -> None:
    with daemon(tmp_path) as run:
        kv = Client(run.address)
        ns = kv.namespace(SMALL)
        assert kv.put_from(ns, KEYS, payloads_of(KEYS, MIB), retention="durable") == ["stored"] * 4
        lease = kv.get(ns, KEYS)
        writer = kv.put(ns, chain(SMALL, 2, 1))
        boot_id = kv.boot_id
        run.kill()
    with closing(kv):
        assert (kv.match(ns, KEYS).blobs, kv.match(ns, KEYS).reason) == (0, "unavailable")
        with kv.get(ns, KEYS) as missed:
            assert (len(missed), missed.reason) == (0, "unavailable")
        with kv.put(ns, chain(SMALL, 3, 1)) as scratch:
            scratch[0][:] = bytes(MIB)
        assert (scratch.results, scratch.reasons) == (["refused"], ["unavailable"])
        assert kv.put_from(ns, KEYS, payloads_of(KEYS, MIB)) == ["refused"] * 4
        with pytest.raises(Unavailable):
            kv.put_from(ns, KEYS, payloads_of(KEYS, MIB), retention="durable")
        assert kv.get_into(ns, KEYS, [bytearray(MIB) for _ in KEYS]) == 0
        assert kv.exists(ns, KEYS) == [False] * 4
        assert kv.stats() == {"reason": "unavailable"}
        assert (kv.drop(ns, KEYS), kv.ping()) == (0, False)
        with daemon(tmp_path):
            assert count_right(kv, SMALL, KEYS) == 4
            assert kv.boot_id != boot_id
            writer[0][:] = bytes(MIB)
            writer.seal()
            assert writer.results == ["refused"]
            assert [bytes(view) for view in lease] == payloads_of(KEYS, MIB)
            lease.release()  # of the daemon that is gone: the new one is owed nothing
            assert put(kv, SMALL, chain(SMALL, 4, 2)) == ["stored"] * 2
            poll_until(lambda: kv.stats()["leases"] == 0)


def test_a_daemon_that_hangs_is_a_miss_within_the_deadline(tmp_path: Path) -> None:
    with (
        daemon(tmp_path) as run,
        Client(run.address, timeout_s=20.0) as patient,
        Client(run.address, timeout_s=0.2) as kv,
    ):
        ns = kv.namespace(SMALL)
        assert put(patient, SMALL, KEYS) == ["stored"] * 4
        run.process.send_signal(signal.SIGSTOP)
        started_s = time.monotonic()
        assert kv.match(ns, KEYS).reason == "deadline"
        with kv.get(ns, KEYS) as lease:
            assert (len(lease), lease.reason) == (0, "deadline")
        with kv.put(ns, chain(SMALL, 2, 1)) as writer:
            writer[0][:] = bytes(MIB)
        assert (writer.results, writer.reasons) == (["refused"], ["deadline"])
        assert time.monotonic() - started_s < 5.0
        run.process.send_signal(signal.SIGCONT)
        assert count_right(kv, SMALL, KEYS) == 4
        assert patient.exists(ns, chain(SMALL, 2, 1)) == [False]
        poll_until(lambda: patient.stats()["leases"] == patient.stats()["reservations"] == 0)


@pytest.mark.root
def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "ro", MIB, "ro") as place:
        for data in (place, place / "data"):
            code, said = refused(tmp_path, "--data", os.fspath(data))
            assert code == 1
            assert os.fspath(data) in said
            assert "--data" in said


@pytest.mark.root
def test_too_little_disk_is_refused_with_both_numbers(tmp_path: Path) -> None:
    code, said = refused(tmp_path, "--ssd", "1MiB")
    assert (code, "4 MiB" in said, "1 MiB" in said) == (1, True, True), said
    with tmpfs(tmp_path / "small", MIB) as place:
        code, said = refused(tmp_path, "--data", os.fspath(place))
        assert code == 1
        assert os.fspath(place) in said
        assert "KiB" in said


@pytest.mark.root
def test_an_arena_is_allocated_in_full_so_that_nobody_can_eat_it_later(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "shm", 8 * MIB) as shm:
        environ = {"BLOBSTORE__DRAM__DIRECTORY": os.fspath(shm)}
        code, said = refused(tmp_path, environ=environ)
        assert code == 1
        for words in ("64 MiB", "8 MiB", os.fspath(shm)):
            assert words in said
        with daemon(tmp_path, "--dram", "6MiB", "--ssd", "off", environ=environ) as run:
            fill_up(shm)
            with Client(run.address) as kv:
                for seed in range(12):
                    assert put(kv, SMALL, chain(SMALL, seed, 1)) == ["stored"]
                    assert count_right(kv, SMALL, chain(SMALL, seed, 1)) == 1


def fill_up(place: Path) -> None:
    """Leave no byte free where `place` is."""
    with (place / "eater").open("wb", buffering=0) as eater:
        while shutil.disk_usage(place).free:
            eater.write(bytes(4 * KIB))


def test_a_directory_of_a_newer_format_is_refused_and_left_alone(tmp_path: Path) -> None:
    with daemon(tmp_path) as run, Client(run.address) as kv:
        put(kv, SMALL, KEYS, "durable")
        run.kill()
    with (
        lmdb.open(os.fspath(run.data / "catalogue"), max_dbs=8) as env,
        env.begin(write=True) as txn,
    ):
        meta = env.open_db(b"meta", txn, create=False)
        now = bytes(txn.get(b"format", db=meta) or b"")
        txn.put(b"format", struct.pack("<Q", 7), db=meta)
    before = traces(run.data)
    code, said = refused(tmp_path)
    assert code == 1
    for words in ("format 7", "up to 1", os.fspath(run.data), "newer"):
        assert words in said, said
    assert traces(run.data) == before
    with (
        lmdb.open(os.fspath(run.data / "catalogue"), max_dbs=8) as env,
        env.begin(write=True) as txn,
    ):
        txn.put(b"format", now, db=env.open_db(b"meta", txn, create=False))
    with daemon(tmp_path) as run, Client(run.address) as kv:
        assert count_right(kv, SMALL, KEYS) == 4


def traces(data: Path) -> dict[str, object]:
    """What a change to any file of the store would change."""
    found: dict[str, object] = {}
    for path in data.rglob("*"):
        if path.suffix == ".seg":  # sparse, and large
            found[path.name] = (path.stat().st_mtime_ns, path.stat().st_blocks)
        elif path.is_file() and path.name not in ("LOCK", "lock.mdb"):
            found[path.name] = path.read_bytes()
    return found


@pytest.mark.parametrize("damage", ["garbage", "a file in place of a directory"])
def test_a_damaged_catalogue_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    catalogue = tmp_path / "data" / "catalogue"
    if damage == "garbage":
        catalogue.mkdir(parents=True)
        (catalogue / "data.mdb").write_bytes(b"\x5a" * MIB)
    else:
        catalogue.parent.mkdir()
        catalogue.write_bytes(b"")
    code, said = refused(tmp_path)
    assert code == 1
    assert os.fspath(catalogue) in said


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["stat"], 3, "blobstore serve"),
        (["stats", "--json"], 3, "blobstore serve"),
        (["verify"], 3, "blobstore serve"),
        (["stat", "ab", "cd"], 2, "64 hex digits"),
        (["nonsense"], 2, "nonsense"),
        (["serve", "--dram", "12 apples"], 2, "apples"),
    ],
)
def test_a_command_that_cannot_be_done_is_one_line_and_its_exit_code(
    tmp_path: Path, arguments: list[str], code: int, words: str
) -> None:
    environ = os.environ | {"BLOBSTORE__LOCAL__SOCKET": os.fspath(tmp_path / "none.sock")}
    command = [sys.executable, "-m", "blobstore", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=30)
    assert done.returncode == code
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert words in done.stderr


def test_an_unknown_blob_is_told_from_a_known_one_by_the_exit_code(run: Daemon) -> None:
    with Client(run.address) as kv:
        put(kv, SMALL, KEYS)
    for key, code in ((KEYS[0], 0), (bytes(32), 1)):
        command = [sys.executable, "-m", "blobstore", "stat", SMALL.id.hex(), key.hex()]
        command += ["--socket", os.fspath(run.socket), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        assert done.returncode == code, done
        assert "Traceback" not in done.stderr

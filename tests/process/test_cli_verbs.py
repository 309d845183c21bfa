"""The command line as people and scripts use it: processes, pipes and a real daemon."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blobstore.units import MIB
from tests.support.daemon import Daemon, daemon
from tests.support.polling import poll_until

COMMAND_S = 60.0
BLOBSTORE = f"{shlex.quote(sys.executable)} -m blobstore"


class Terminal:
    """Somebody's shell in `home`, with the daemon's socket in its environment."""

    def __init__(self, home: Path, run: Daemon) -> None:
        self.home = home
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("BLOBSTORE_")}
        self.environ = inherited | {"BLOBSTORE__LOCAL__SOCKET": str(run.socket)}

    def type(self, line: str) -> subprocess.CompletedProcess[bytes]:
        """Run a line of bash in which `blobstore` is the command."""
        return subprocess.run(
            ["bash", "-o", "pipefail", "-c", f'blobstore() {{ {BLOBSTORE} "$@"; }}\n{line}'],
            cwd=self.home,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=COMMAND_S,
        )

    def out(self, line: str) -> bytes:
        """Standard output of a line that must succeed and have nothing to complain about."""
        done = self.type(line)
        assert (done.returncode, done.stderr.decode()) == (0, "")
        return done.stdout

    def json(self, line: str) -> Any:
        """The same, read as JSON."""
        return json.loads(self.out(line))

    def start(self, *arguments: str, **streams: Any) -> subprocess.Popen[bytes]:
        """A command that goes on."""
        return subprocess.Popen(
            [sys.executable, "-m", "blobstore", *arguments],
            cwd=self.home,
            env=self.environ,
            **streams,
        )


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Daemon]:
    with daemon(tmp_path) as started:
        yield started


@pytest.fixture
def terminal(tmp_path: Path, run: Daemon) -> Terminal:
    return Terminal(tmp_path, run)


@pytest.fixture
def payload(tmp_path: Path) -> bytes:
    """The bytes of the file `payload`."""
    data = os.urandom(9 * MIB + 1)
    (tmp_path / "payload").write_bytes(data)
    return data


def test_a_stranger_puts_finds_gets_and_drops_a_blob(terminal: Terminal, payload: bytes) -> None:
    key = hashlib.sha256(payload).hexdigest()
    assert key in terminal.out("blobstore put payload --model demo").decode()
    (named,) = terminal.json("blobstore ls --json")["namespaces"]
    assert (named["model"], named["blobs"], named["dram_bytes"]) == ("demo", 1, len(payload))
    short = named["id"][:10]
    (blob,) = terminal.json(f"blobstore ls {short} --json")["blobs"]
    assert (blob["key"], blob["nbytes"]) == (key, len(payload))
    assert terminal.json(f"blobstore match {short} {key} --json")["blobs"] == 1
    assert terminal.json(f"blobstore pin {short} {key} --ttl 10m --json")["count"] == 1
    assert terminal.out(f"blobstore get {short} {key}") == payload
    assert terminal.json(f"blobstore rm {short} {key} --json")["count"] == 1
    missed = terminal.type(f"blobstore get {short} {key}")
    assert (missed.returncode, missed.stdout) == (1, b"")
    assert missed.stderr.count(b"\n") == 1
    assert b"absent" in missed.stderr


def test_bytes_come_through_pipes_and_leave_through_pipes(
    terminal: Terminal, payload: bytes
) -> None:
    by_pipe = terminal.json("cat payload | blobstore put - --model demo --json")
    assert by_pipe["key"] == hashlib.sha256(payload).hexdigest()
    by_file = terminal.json("blobstore put - --model demo --json < payload")
    assert (by_file["result"], by_file["key"]) == ("exists", by_pipe["key"])
    digest = terminal.out(f"blobstore get --model demo {by_pipe['key']} | sha256sum")
    assert digest.split()[0].decode() == by_pipe["key"]
    rest = terminal.json("{ head -c 1 > first; blobstore put - --model demo --json; } < payload")
    assert rest["key"] != by_pipe["key"]


def test_all_keys_of_a_listing_can_be_dropped(terminal: Terminal, payload: bytes) -> None:
    for key in ("11" * 8, "22" * 8, "33" * 8):
        terminal.out(f"blobstore put payload --model demo --key {key}")
    read = "import json, sys; [print(b['key']) for b in json.load(sys.stdin)['blobs']]"
    python = shlex.quote(sys.executable)
    line = f'blobstore ls --model demo --json | {python} -c "{read}" | '
    dropped = terminal.json(line + "blobstore rm --model demo - --json")
    assert (dropped["keys"], dropped["count"]) == (3, 3)


def test_a_durable_blob_outlives_a_kill(tmp_path: Path, payload: bytes) -> None:
    with daemon(tmp_path) as run:
        terminal = Terminal(tmp_path, run)
        put = terminal.json("blobstore put payload --model demo --retention durable --json")
        run.kill()
        for command in ("get --model demo " + put["key"], "put payload --model demo", "ls"):
            gone = terminal.type(f"blobstore {command}")
            assert (gone.returncode, gone.stdout, gone.stderr.count(b"\n")) == (3, b"", 1)
    with daemon(tmp_path) as run:
        (facts,) = terminal.json("blobstore ls --json")["namespaces"]
        assert (facts["blobs"], facts["dram_bytes"], facts["ssd_bytes"]) == (1, 0, len(payload))
        got = terminal.json(f"blobstore get --model demo {put['key']} -o copy --json")
        assert got["tier"] == "ssd"
        assert (tmp_path / "copy").read_bytes() == payload


def test_a_reader_that_has_enough_is_no_reason_for_a_traceback(
    terminal: Terminal, payload: bytes
) -> None:
    key = terminal.json("blobstore put payload --model demo --json")["key"]
    done = terminal.type(f"set +o pipefail; blobstore get --model demo {key} | head -c 10")
    assert done.stdout == payload[:10]
    assert done.stderr == b""
    assert terminal.json("blobstore stat --json")["leases"] == 0


def test_a_put_that_is_interrupted_stores_nothing(terminal: Terminal) -> None:
    put = terminal.start(
        "put", "-", "--model", "demo", stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert put.stdin is not None
    put.stdin.write(bytes(MIB))
    put.stdin.flush()  # more than a pipe holds: it reads
    put.send_signal(signal.SIGINT)
    _, said = put.communicate(timeout=COMMAND_S)
    assert (put.returncode, said) == (130, b"")
    assert terminal.json("blobstore ls --json")["namespaces"] == []


def test_top_shows_what_flows(terminal: Terminal, payload: bytes, tmp_path: Path) -> None:
    samples = tmp_path / "samples"
    with samples.open("wb") as out:
        top = terminal.start("top", "--json", "--interval", "0.1", stdout=out)
    try:
        poll_until(samples.read_bytes, COMMAND_S, "the first sample")
        terminal.out("blobstore put payload --model demo")

        def flowed() -> bool:
            lines = samples.read_text().splitlines()
            return any(json.loads(line)["rates"]["put_bytes"] > 0 for line in lines[:-1])

        poll_until(flowed, COMMAND_S, "a sample that shows the put")
    finally:
        top.send_signal(signal.SIGINT)
        assert top.wait(COMMAND_S) == 0

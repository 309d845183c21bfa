from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from blobstore.cli import main
from blobstore.cli.ask import ask
from blobstore.errors import DeadlineExceeded, ProtocolError, UnknownNamespace
from blobstore.protocol import (
    VERSION,
    Done,
    Failed,
    Pong,
    Reply,
    Report,
    Stats,
    Welcome,
    encode,
)
from blobstore.store import Store
from blobstore.transports.framing import pack
from blobstore.units import GIB, MIB
from tests.support.served_store import served_store

Output = pytest.CaptureFixture[str]


@dataclass
class Desk:
    """A real store behind a real door, of which tests bend the answers."""

    path: Path
    answers: dict[str, Any] = field(default_factory=dict)
    asked: list[tuple[object, ...]] = field(default_factory=list)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    found = Desk(tmp_path / "b.sock")
    monkeypatch.setenv("BLOBSTORE__LOCAL__SOCKET", os.fspath(found.path))

    def stat(_: Store, namespace: bytes, keys: bytes, key_bytes: int) -> Any:
        found.asked.append((namespace, keys, key_bytes))
        return found.answers["stat"]

    async def verify(_: Store, timeout_s: float) -> Any:
        found.asked.append(("verify", timeout_s))
        return found.answers["verify"]

    with served_store(found.path) as served:
        found.answers |= {
            "stats": served.call(Store.stats),
            "verify": {
                "complete": True, "blobs": 0, "copies": 0, "bytes": 0, "corrupt": [],
                "unreadable": [],
            },
            "stat": [{}],
        }  # fmt: skip
        monkeypatch.setattr(Store, "stats", lambda _: found.answers["stats"])
        monkeypatch.setattr(Store, "stat", stat)
        monkeypatch.setattr(Store, "verify", verify)
        yield found


def one_line(capsys: Output) -> str:
    """The error on standard error, which must be one line and all there is."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


def test_stat_shows_tiers_and_holders_at_one_glance(capsys: Output, desk: Desk) -> None:
    desk.answers["stats"]["tiers"]["dram"]["used_bytes"] = 12 * MIB
    desk.answers["stats"]["leases"] = 1234
    assert main(["stat"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    dram, ssd = (next(line for line in lines if tier in line) for tier in ("dram", "ssd"))
    assert "12 MiB" in dram
    assert "16 MiB" in dram
    assert "75%" in dram
    assert "64 MiB" in ssd
    assert "1,234 leases" in out
    assert "faults" not in out
    assert max(map(len, lines[1:])) <= 80  # the first holds the socket's path


def test_stat_says_how_much_of_the_disk_in_use_is_free_for_reuse(
    capsys: Output, desk: Desk
) -> None:
    desk.answers["stats"]["tiers"]["ssd"] |= {"spare_bytes": 5 * MIB, "dirty_bytes": 3 * MIB}
    assert main(["stat"]) == 0
    out = capsys.readouterr().out
    assert "3 MiB waiting to be written, 5 MiB of it free for reuse" in out


def test_stat_shows_faults_only_if_there_are_any(capsys: Output, desk: Desk) -> None:
    desk.answers["stats"]["counters"]["corrupt"] = 3
    assert main(["stat"]) == 0
    assert "3 corrupt copies" in capsys.readouterr().out


def test_stat_of_a_daemon_without_a_disk_shows_one_tier(capsys: Output, desk: Desk) -> None:
    del desk.answers["stats"]["tiers"]["ssd"]
    assert main(["stat"]) == 0
    assert "ssd" not in capsys.readouterr().out


FACTS = {"key": "ab", "tiers": ["dram", "ssd"], "nbytes": 4 * MIB, "idle_s": 61.5, "pins": 0}


def test_stat_of_one_blob_takes_ids_in_either_case(capsys: Output, desk: Desk) -> None:
    desk.answers["stat"] = [FACTS]
    assert main(["stat", "AB" * 32, "cd" * 32]) == 0
    assert desk.asked == [(b"\xab" * 32, b"\xcd" * 32, 32)]
    out = capsys.readouterr().out
    assert "4,194,304 (4 MiB)" in out
    assert "dram, ssd" in out
    assert "1 min 1 s" in out
    assert main(["stat", "ab" * 32, "cd" * 32, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == FACTS


def test_stat_of_an_unknown_blob_exits_1(capsys: Output, desk: Desk) -> None:
    desk.answers["stat"] = [{}]
    assert main(["stat", "ab" * 32, "cd" * 8]) == 1
    assert "unknown" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("namespace", "key"),
    [
        ("ab" * 3, "cd" * 32),
        ("ab" * 33, "cd" * 32),
        ("ab" * 32, "cd" * 7),
        ("ab" * 32, "cd" * 65),
        ("ab" * 32, "c" * 65),
        ("ab" * 32, "sha256:" + "cd" * 32),
        ("ab" * 32, ".." + "/" * 30),
        ("ab" * 32, "cd " * 16),
        ("", "cd" * 32),
        ("\u0661" * 64, "cd" * 32),
        ("ab" * 32, ""),
        ("ab" * 32, "\u0661" * 64),
        ("ab" * 32, "cd" * 5000),
    ],
)
def test_odd_ids_are_refused_before_anybody_is_asked(
    capsys: Output, namespace: str, key: str
) -> None:
    assert main(["stat", namespace, key, "--socket", "/nobody/there"]) == 2
    assert "hex digits" in one_line(capsys)


@pytest.mark.parametrize("start", ["cd" * 4, "cd" * 15 + "c"])
def test_who_gives_the_start_of_a_key_is_told_what_takes_it(capsys: Output, start: str) -> None:
    assert main(["stat", "ab" * 32, start, "--socket", "/nobody/there"]) == 2
    said = one_line(capsys)
    assert "KEY must be whole here" in said
    assert "`blobstore explain` takes its first 8" in said


def test_a_namespace_alone_is_a_usage_error(capsys: Output) -> None:
    assert main(["stat", "ab" * 32]) == 2
    assert "KEY" in one_line(capsys)


def leaf_names(tree: dict[str, Any]) -> set[str]:
    return {
        name
        for key, value in tree.items()
        for name in (leaf_names(value) if isinstance(value, dict) else {key})
    }


def test_stats_shows_every_counter_and_gauge(capsys: Output, desk: Desk) -> None:
    assert main(["stats"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = {line.split()[0].rpartition(".")[2] for line in lines if line.strip()}
    assert names >= leaf_names(desk.answers["stats"])


@pytest.mark.parametrize("command", ["stat", "stats", "verify"])
def test_json_is_the_whole_answer(capsys: Output, desk: Desk, command: str) -> None:
    assert main([command, "--json"]) == 0
    answer = desk.answers["verify" if command == "verify" else "stats"]
    assert json.loads(capsys.readouterr().out) == answer


def test_verify_says_what_it_read(capsys: Output, desk: Desk) -> None:
    desk.answers["verify"] |= {"blobs": 7, "copies": 14, "bytes": 3 * GIB}
    assert main(["verify", "--timeout", "60"]) == 0
    assert ("verify", 60.0) in desk.asked
    out = capsys.readouterr().out
    assert "7 blobs in 14 copies, 3 GiB" in out
    assert "all good" in out


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (
            {"corrupt": [{"namespace": "ab", "key": "cd", "tier": "ssd"}]},
            "corrupt, put aside: ab cd (ssd)",
        ),
        ({"unreadable": [{"key": "cd", "error": "EIO"}]}, "unreadable: cd (EIO)"),
        ({"complete": False}, "stopped early"),
    ],
)
def test_verify_exits_1_unless_everything_was_read_and_sound(
    capsys: Output, desk: Desk, change: dict[str, Any], word: str
) -> None:
    desk.answers["verify"] |= change
    assert main(["verify"]) == 1
    out = capsys.readouterr().out
    assert word in out
    assert "all good" not in out
    assert main(["verify", "--json"]) == 1


def test_the_daemon_itself_refuses_a_namespace_that_it_does_not_know(
    capsys: Output, tmp_path: Path
) -> None:
    with served_store(tmp_path / "b.sock"):
        code = main(["stat", "ab" * 32, "cd" * 32, "--socket", str(tmp_path / "b.sock")])
    assert code == UnknownNamespace.exit_code
    assert "abab" in one_line(capsys)


@pytest.mark.parametrize("command", ["stat", "stats", "verify"])
def test_an_unreachable_daemon_exits_3_and_says_what_to_do(
    capsys: Output, tmp_path: Path, command: str
) -> None:
    path = tmp_path / "b.sock"
    assert main([command, "--socket", str(path)]) == 3
    assert "No such file" in (said := one_line(capsys))
    assert "blobstore serve" in said
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(os.fspath(path))
    assert main([command, "--socket", f"unix:{path}"]) == 3
    assert "refused" in one_line(capsys)


def frame(reply: Reply) -> bytes:
    return pack(1, 7, encode(reply))


WELCOME = frame(Welcome(VERSION, 7, 1, 1, 1))


@contextmanager
def script(path: Path, *answers: bytes, hang: bool = False) -> Iterator[None]:
    """A program at `path` that answers each message with the next of `answers`, then hangs up."""

    def play() -> None:
        with listener, listener.accept()[0] as peer:
            for answer in answers:
                peer.recv(1 << 16)
                peer.sendall(answer)
            if hang:
                while peer.recv(1 << 16):
                    pass

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.fspath(path))
    listener.listen()
    thread = threading.Thread(target=play)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def test_an_answer_may_come_in_pieces(tmp_path: Path) -> None:
    path, whole = tmp_path / "b.sock", frame(Report({"x": "y" * 100_000}))
    with script(path, WELCOME, whole):
        assert ask(path, Stats(), Report, 5.0).body == {"x": "y" * 100_000}


def test_a_daemon_that_hangs_up_is_unavailable(capsys: Output, tmp_path: Path) -> None:
    for answers in ([], [WELCOME], [WELCOME, frame(Report({}))[:-1]]):
        path = tmp_path / f"{len(answers)}.sock"
        with script(path, *answers):
            assert main(["stats", "--socket", str(path)]) == 3
        assert "no daemon answers" in one_line(capsys)


def test_a_daemon_that_is_silent_is_given_up_at_the_deadline(
    capsys: Output, tmp_path: Path
) -> None:
    path = tmp_path / "b.sock"
    with script(path, WELCOME, hang=True):
        assert main(["stats", "--socket", str(path), "--timeout", "0.05"]) == 3
    assert DeadlineExceeded.exit_code == 3
    assert "within 0.05 s" in one_line(capsys)


@pytest.mark.parametrize(
    ("answer", "code", "words"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", 1, "HTTP"),
        (pack(1, 7, b"\xc1"), 1, "something else"),
        (frame(Pong()), 1, "same release"),
        (frame(Done()), 1, "same release"),
        (frame(Failed("busy", "come back")), 3, "come back"),
        (frame(Failed("no_such_code", "of a newer one")), 1, "of a newer one"),
    ],
)
def test_another_answer_is_a_typed_error(
    capsys: Output, tmp_path: Path, answer: bytes, code: int, words: str
) -> None:
    assert ProtocolError.exit_code == 1
    path = tmp_path / "b.sock"
    with script(path, WELCOME, answer):
        assert main(["stats", "--socket", str(path)]) == code
    assert words in one_line(capsys)

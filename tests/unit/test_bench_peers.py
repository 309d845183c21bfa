"""`bench peers` without any peer: turns, verification, skips, the rows and the verdict."""

from __future__ import annotations

import json
import os
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from blobstore.bench import commands, peers
from blobstore.bench.blobs import BenchInvalid
from blobstore.bench.peer import Bytes, Payload, Room
from blobstore.bench.peers import ASKED, Scale, Work, compare, running
from blobstore.bench.peers_plot import to_svg
from blobstore.bench.peers_report import PeerRow, PeersReport
from blobstore.bench.rounds import take_turns
from blobstore.bench.server_process import ServerProcess, free_port, listens
from blobstore.errors import InvalidRequest, SetupError
from tests.support.polling import poll_until

QUICK = Scale(32 << 20, n_rounds=1, single_gets=1, exists_rounds=1, exists_calls=1)
CLAIMS = 5


class FakePeer:
    """Keeps blobs in a dict and notes what happens to it."""

    def __init__(self, name: str, log: list[str] | None = None, missing: str = "") -> None:
        self.name = name
        self.how = f"{name} in a dict"
        self.log: list[str] = [] if log is None else log
        self._missing = missing
        self._blobs: dict[bytes, Bytes] = {}

    def missing(self) -> str:
        return self._missing

    def start(self, room: Room) -> None:
        self.log.append(f"start {self.name}")

    def put(self, keys: Sequence[bytes], sources: Sequence[Bytes]) -> None:
        self.log.append(f"put {self.name}")
        self._blobs.update(zip(keys, sources, strict=True))

    def get(self, keys: Sequence[bytes], targets: Sequence[Bytes]) -> Sequence[Payload]:
        for key, target in zip(keys, targets, strict=True):
            np.copyto(target, self._blobs[key])
        return targets

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self._blobs for key in keys]

    def remove(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            del self._blobs[key]

    def stop(self) -> None:
        self.log.append(f"stop {self.name}")

    @property
    def held(self) -> int:
        return len(self._blobs)


class FakeOurs(FakePeer):
    """Lends as well."""

    @contextmanager
    def lease(self, keys: Sequence[bytes]) -> Iterator[Sequence[Payload]]:
        yield [self._blobs[key].data for key in keys]


class GivesNothing(FakePeer):
    """Says that it got the blobs, and leaves the buffers as they were."""

    def get(self, keys: Sequence[bytes], targets: Sequence[Bytes]) -> Sequence[Payload]:
        return targets


class HoldsEverything(FakePeer):
    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return [True] * len(keys)


class CannotTell(FakePeer):
    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return []


class DoesNotStart(FakePeer):
    def start(self, room: Room) -> None:
        super().start(room)
        raise SetupError("no licence")


@pytest.fixture(scope="module")
def work() -> Work:
    return Work.of(QUICK.set_bytes)


def quiet(line: str) -> None:
    pass


def room(directory: Path) -> Room:
    return Room(directory, 1, ())


def row(
    name: str, ratio: float, least: float, claim: str = "claim", absent: tuple[str, ...] = ()
) -> PeerRow:
    return PeerRow(
        name=name, value=4e9, unit="B/s", limit=4e9 / ratio, limit_name="redis", ratio=ratio,
        working_set_bytes=1 << 30, cold=False, sync="none", n=3, median_s=0.5, p99_s=0.6,
        spread=0.1, least=least, peers={"redis": 4e9 / ratio, "memcpy": 8e9}, claim=claim,
        absent=absent,
    )  # fmt: skip


def test_each_contestant_goes_first_as_often_as_every_other() -> None:
    log: list[str] = []

    def turn(name: str) -> Callable[[], Mapping[str, float]]:
        def take() -> Mapping[str, float]:
            log.append(name)
            return {"put": float(len(log))}

        return take

    names = ["a", "b", "c"]
    rounds = take_turns({name: turn(name) for name in names}, 6, warm_up=0)
    in_rounds = [log[start : start + 3] for start in range(0, len(log), 3)]
    assert all(sorted(taken) == names for taken in in_rounds)
    assert Counter(taken[0] for taken in in_rounds) == {"a": 2, "b": 2, "c": 2}
    assert all(len(rounds.seconds[name]["put"]) == 6 for name in names)


def test_a_ratio_is_the_median_over_rounds_and_warm_ups_do_not_count() -> None:
    ours, theirs = iter([99.0, 1.0, 2.0, 4.0]), iter([1.0, 3.0, 4.0, 20.0])
    rounds = take_turns({"a": lambda: {"get": next(ours)}, "b": lambda: {"get": next(theirs)}}, 3)
    pairs = rounds.pairs(("a", "get"), ("b", "get"))
    assert pairs.measured_s == (1.0, 2.0, 4.0)
    assert pairs.ratio == 3.0
    assert rounds.median_s("a", "get") == 2.0
    assert rounds.median_s("a", "lease") is None


def test_all_rows_come_with_every_contestant_that_has_the_operation(work: Work) -> None:
    contestants = [FakeOurs("blobstore"), FakePeer("redis"), FakePeer("mooncake"), FakeOurs("ray")]
    rows = {found.name: found for found in compare(contestants, work, QUICK, quiet)}
    assert list(rows) == [
        "peers.put_1MiB", "peers.get_1MiB", "peers.lease_1MiB",
        "peers.put_16MiB", "peers.get_16MiB", "peers.lease_16MiB",
        "peers.lease_one_16MiB", "peers.exists_500",
    ]  # fmt: skip
    others = {"redis", "mooncake", "ray"}
    assert set(rows["peers.put_1MiB"].peers) == others | {"memcpy"}
    assert set(rows["peers.lease_16MiB"].peers) == others
    assert rows["peers.lease_one_16MiB"].limit_name == "ray"
    assert rows["peers.exists_500"].limit_name == "mooncake"
    assert len({found.claim for found in rows.values()}) == CLAIMS
    for name, least in (("put", 3.0), ("get", 5.0), ("lease", 5.0)):
        judged = rows[f"peers.{name}_1MiB"]
        assert judged.least == least
        # Ray and memcpy may be better: they are not what a row is measured against.
        best = max(judged.peers["redis"], judged.peers["mooncake"])
        assert judged.limit == pytest.approx(best)
    assert [peer.held for peer in contestants] == [0, 0, 0, 0]


def test_rows_are_not_judged_without_those_that_they_are_about(work: Work) -> None:
    contestants = [FakeOurs("blobstore"), CannotTell("ray"), FakePeer("lmcache")]
    rows = compare(contestants, work, QUICK, quiet)
    assert all(found.least == 0 and found.met for found in rows if found.limit_name != "ray")
    by_name = {found.name: found for found in rows}
    assert set(by_name["peers.exists_500"].peers) == {"lmcache"}
    assert by_name["peers.put_1MiB"].absent == ("redis", "mooncake")


def test_there_is_no_row_of_what_no_other_can_tell(work: Work) -> None:
    rows = compare([FakeOurs("blobstore"), CannotTell("ray")], work, QUICK, quiet)
    assert "peers.exists_500" not in {found.name for found in rows}


def test_bytes_that_did_not_come_back_are_an_error_and_the_blobs_are_removed(work: Work) -> None:
    liar = GivesNothing("redis")
    with pytest.raises(BenchInvalid, match="redis gave blob 0 back"):
        compare([FakeOurs("blobstore"), liar], work, QUICK, quiet)
    assert liar.held == 0


def test_a_peer_that_says_it_holds_what_was_never_put_is_an_error(work: Work) -> None:
    with pytest.raises(BenchInvalid, match="redis does not hold"):
        compare([FakeOurs("blobstore"), HoldsEverything("redis")], work, QUICK, quiet)


def test_a_missing_peer_is_skipped_with_a_line_and_never_started(tmp_path: Path) -> None:
    log: list[str] = []
    said: list[str] = []
    here, gone = FakePeer("ray", log), FakePeer("redis", log, missing="pip install redis")
    with running([here, gone], room(tmp_path), said.append) as (peers_here, skipped):
        assert peers_here == [here]
        assert skipped == {"redis": "not installed: pip install redis"}
    assert log == ["start ray", "stop ray"]
    assert [line for line in said if "pip install redis" in line]


def test_a_peer_that_does_not_start_is_stopped_and_hides_no_other(tmp_path: Path) -> None:
    log: list[str] = []
    broken, fine = DoesNotStart("redis", log), FakePeer("ray", log)
    with running([broken, fine], room(tmp_path), quiet) as (here, skipped):
        assert here == [fine]
        assert skipped == {"redis": "does not start: no licence"}
        assert log == ["start redis", "stop redis", "start ray"]


@pytest.mark.parametrize("error", [BenchInvalid("x"), KeyboardInterrupt(), SystemExit(143)])
def test_all_are_stopped_on_every_way_out(error: BaseException, tmp_path: Path) -> None:
    log: list[str] = []
    both = [FakePeer("redis", log), FakePeer("ray", log)]
    with pytest.raises(type(error)), running(both, room(tmp_path), quiet):
        raise error
    assert log[-2:] == ["stop ray", "stop redis"]


def test_an_unknown_peer_is_named_before_anything_starts(tmp_path: Path) -> None:
    arguments = ["peers", "--peers", "redis,memcached", "--tiny", "--data", str(tmp_path)]
    result = CliRunner().invoke(commands.bench, arguments)
    assert isinstance(result.exception, InvalidRequest)
    assert "memcached" in str(result.exception)
    assert "mooncake" in str(result.exception)


def test_the_report_goes_to_json_picture_and_check(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Sequence[str]] = []

    def report(setup: object, chosen: Sequence[str]) -> PeersReport:
        asked.append(chosen)
        return PeersReport({"cpus": 2}, [row("good", 6.0, 5.0), row("bad", 4.0, 5.0)])

    monkeypatch.setattr(peers, "report", report)
    monkeypatch.setattr(commands, "_end_in_order", lambda: None)
    picture = tmp_path / "peers.svg"
    arguments = ["peers", "--json", "--check", "--peers", "redis,ray", "--data", str(tmp_path)]
    result = CliRunner().invoke(commands.bench, [*arguments, "--plot", str(picture)])
    assert asked == [["redis", "ray"]]
    assert [found["met"] for found in json.loads(result.stdout)["rows"]] == [True, False]
    assert isinstance(result.exception, commands.BelowBound)
    assert ET.parse(picture).getroot().tag.endswith("svg")


def test_the_json_has_a_figure_per_peer_what_was_done_and_the_verdict() -> None:
    found = PeersReport(
        {"cpus": 2},
        [row("peers.put", 3.5, 3.0, "puts"), row("peers.get", 4.0, 5.0, "gets")],
        how={"redis": "SET"},
        skipped={"ray": "pip install ray"},
        asides=("memcpy",),
    )
    body = json.loads(found.to_json())
    assert set(body) == {"machine", "rows", "how", "skipped", "verdict"}
    put = body["rows"][0]
    assert put["peers"]["memcpy"] == 8e9
    assert (put["ratio"], put["wanted"], put["met"]) == (3.5, 3.0, True)
    assert body["verdict"] == [
        "puts: yes (peers.put 3.50 x redis)",
        "gets: NO (peers.get 4.00 x redis)",
        "beside memcpy, for comparison only: peers.put 0.50 x, peers.get 0.50 x",
    ]


def test_the_verdict_says_who_was_not_there() -> None:
    half = PeersReport({}, [row("put", 3.5, 3.0, absent=("mooncake",))])
    none = PeersReport({}, [row("put", 3.5, 0.0, absent=("redis", "mooncake"))])
    assert half.verdict() == ["claim: yes without mooncake (put 3.50 x redis)"]
    assert none.verdict() == ["claim: not judged without redis, mooncake (put 3.50 x redis)"]


def test_the_table_shows_everyone_the_skipped_and_the_verdict() -> None:
    found = PeersReport(
        {"cpus": 2},
        [row("peers.put", 3.5, 3.0, "puts")],
        how={"blobstore": "put_from", "redis": "SET"},
        skipped={"ray": "not installed: pip install ray"},
    )
    console = Console(width=200)
    with console.capture() as capture:
        found.print(console)
    shown = capture.get()
    for text in ("memcpy", "8.00", "redis: SET", "pip install ray", "puts: yes"):
        assert text in shown


def test_the_picture_has_a_bar_per_contestant_and_ours_tells_whether_the_row_is_met() -> None:
    drawn = ET.fromstring(to_svg([row("good", 6.0, 5.0), row("bad", 4.0, 5.0)]))
    svg = "{http://www.w3.org/2000/svg}"
    bars = [bar for bar in drawn.iter(f"{svg}rect") if bar.find(f"{svg}title") is not None]
    assert len(bars) == 6
    assert bars[0].attrib["fill"] != bars[3].attrib["fill"]
    ours, redis, memcpy = (int(bar.attrib["width"]) for bar in bars[:3])
    assert redis < ours < memcpy


def test_the_set_of_keys_fits_the_smallest_run() -> None:
    assert QUICK.set_bytes >= ASKED * 4096


def test_a_server_takes_with_it_what_it_started(tmp_path: Path) -> None:
    mark = tmp_path / "grandchild"
    # A grandchild in a session of its own, which ignores SIGTERM: a daemon of a daemon.
    script = f"""
import os, signal
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open({str(mark)!r}, "w").write(str(os.getpid()))
signal.pause()
"""
    server = ServerProcess("a server")
    try:
        server.start(
            [sys.executable, "-c", script], lambda: mark.exists() and bool(mark.read_text())
        )
        pid = int(mark.read_text())
        os.kill(pid, 0)
    finally:
        server.stop()
    poll_until(lambda: not Path(f"/proc/{pid}").exists())
    assert not server.home.exists()


def test_a_server_that_ends_at_once_tells_its_last_words() -> None:
    server = ServerProcess("a server")
    try:
        with pytest.raises(SetupError, match="a server does not come up: no such option"):
            server.start([sys.executable, "-c", "print('no such option')"], lambda: False)
    finally:
        server.stop()
    assert not server.home.exists()


def test_nobody_listens_on_a_free_port() -> None:
    assert not listens(free_port())

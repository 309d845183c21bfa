"""The page "vLLM", done as a reader does it: its server, its program, its questions.

vLLM's own HTTP server answers, of which a start is dear: the tests share two.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from blobstore.bench.engine_vllm_model import model_directory
from blobstore.cli import main
from blobstore.clients import Client
from blobstore.clients.vllm import reasons
from blobstore.clients.vllm.options import Options
from blobstore.clients.vllm.recorder import METRICS
from tests.support.daemon import Daemon
from tests.support.polling import poll_until
from tests.vllm.conftest import LAYERS
from tests.vllm.engines import END_S, ENVIRON, START_S
from tests.vllm.prompts import BLOB

PAGE = Path(__file__).parents[2] / "docs" / "integrations" / "vllm.md"
SOCKET = "/tmp/blobstore.sock"
SERVER = "http://127.0.0.1:8000"
Shown = Callable[..., Any]

ASK_S = 120.0
WORKS_S = 60.0


def program() -> str:
    """The page's `ask.py`."""
    (text,) = re.findall(r"Write `ask\.py`.*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return str(text)


def command(number: int) -> list[str]:
    """One of the page's five commands."""
    found = re.findall(rf"\*\*{number}\. .*?```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return shlex.split(found[0])


def start_without_gpu(model: Path) -> list[str]:
    """How command 3 begins on a machine without a GPU, and how it goes on."""
    (begin,) = re.findall(r"^(python -m vllm\..*) …$", PAGE.read_text(), re.MULTILINE)
    python, *rest = shlex.split(begin.replace("$model", str(model)))
    assert python == "python"
    vllm, serve, _, *options = command(3)
    assert (vllm, serve) == ("vllm", "serve")
    return [sys.executable, *rest, *options]


class Server:
    """vLLM's HTTP server, in a group of its own as in a terminal."""

    def __init__(self, folder: Path, store: str, number: int) -> None:
        with socket.socket() as door:
            door.bind(("127.0.0.1", 0))
            port = door.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = folder / f"vllm {number}.log"
        line = [each.replace(SOCKET, store) for each in start_without_gpu(model_directory(LAYERS))]
        inherited = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
        own = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_SERVER_DEV_MODE": "1",
        }
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*line, "--host", "127.0.0.1", "--port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=inherited | ENVIRON | own,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """Until it answers; AssertionError, with what it said, if it ends first."""

        def ready() -> bool:
            assert self._process.poll() is None, self._log.read_text(errors="replace")[-4000:]
            with suppress(OSError), urlopen(f"{self.url}/health", timeout=10) as answer:
                return bool(answer.status == 200)
            return False

        poll_until(ready, START_S, "the server is up")

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """What it answers."""
        header = {"Content-Type": "application/json"}
        request = Request(self.url + path, json.dumps(body).encode(), header)
        with urlopen(request, timeout=ASK_S) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def forget(self, *, external: bool = False) -> None:
        """Empty its own prefix cache; with `external` as after its weights have changed."""
        path = f"/reset_prefix_cache?reset_external={str(external).lower()}"
        # Blocks of the last answer may still be held for a moment.
        poll_until(lambda: self.post(path, {})["success"], WORKS_S, "its cache is empty")

    def metrics(self) -> dict[str, float]:
        """The connector's, by name, with the label that is not vLLM's own in brackets."""
        found: dict[str, float] = {}
        with urlopen(f"{self.url}/metrics", timeout=ASK_S) as answer:
            for family in text_string_to_metric_families(answer.read().decode()):
                for each in family.samples:
                    own = [v for k, v in each.labels.items() if k in ("tier", "reason")]
                    if each.name.startswith("vllm:blobstore_") and "le" not in each.labels:
                        name = each.name.removeprefix("vllm:blobstore_")
                        found["".join([name, *(f"[{v}]" for v in own)])] = each.value
        return found

    def interrupt(self) -> None:
        """Ctrl-C, and wait until all of it has ended."""
        os.killpg(self._process.pid, signal.SIGINT)
        self._process.wait(END_S)
        poll_until(self._gone, END_S, "all processes of the server have ended")

    def kill(self) -> None:
        """SIGKILL, wherever it is."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _gone(self) -> bool:
        try:
            os.killpg(self._process.pid, 0)
        except ProcessLookupError:
            return True
        return False


class Reader:
    """Does what the page says, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server: Server
        self.daemon = Daemon(folder, "--dram", "256MiB")
        self.said: list[tuple[int, int]] = []
        """By commands 4 and 5."""
        self._starts = 0

    @contextmanager
    def vllm(self) -> Iterator[None]:
        """Command 3, and its end by Ctrl-C."""
        self._starts += 1
        self.server = Server(self.folder, str(self.daemon.socket), self._starts)
        try:
            self.server.wait_ready()
            yield
            self.server.interrupt()
        finally:
            self.server.kill()

    def ask(self, question: str) -> tuple[int, int]:
        """How many tokens of the prompt were not computed, and how many it has."""
        (self.folder / "ask.py").write_text(program().replace(SERVER, self.server.url))
        done = subprocess.run(
            [sys.executable, "ask.py", question],
            cwd=self.folder, capture_output=True, text=True, timeout=ASK_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        figures = r"(\d+) of (\d+) tokens were not computed; \d+\.\d\d s"
        found = re.fullmatch(figures, done.stdout.splitlines()[-1])
        assert found is not None, done.stdout
        return int(found[1]), int(found[2])

    def chat(self, subject: str, **params: object) -> tuple[int, int]:
        """As `ask`, of another long prompt, and with `kv_transfer_params`."""
        text = " ".join(f"The {subject} of the year {n} is kept here." for n in range(60))
        body: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
        if params:
            body["kv_transfer_params"] = params
        usage = self.server.post("/v1/chat/completions", body)["usage"]
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        return cached, usage["prompt_tokens"]

    def restart_daemon(self) -> None:
        """Ctrl-C, and command 2 again."""
        self.daemon.process.send_signal(signal.SIGINT)
        self.daemon.wait()
        self.daemon = Daemon(self.folder, "--dram", "256MiB")
        self.daemon.wait_ready()


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """Has asked for the first time; vLLM has ended since then."""
    found = Reader(tmp_path_factory.mktemp("page"))
    try:
        found.daemon.wait_ready()
        with found.vllm():
            found.said.append(found.ask(command(4)[-1]))
        yield found
    finally:
        found.daemon.kill()


@pytest.fixture(scope="module")
def reader(begun: Reader) -> Iterator[Reader]:
    """Has come to the end of the five commands; vLLM is up."""
    with begun.vllm():
        begun.said.append(begun.ask(command(5)[-1]))
        yield begun


@pytest.fixture
def shown(reader: Reader, capsys: pytest.CaptureFixture[str]) -> Shown:
    """What a command of `blobstore` says of the daemon, as JSON."""

    def show(*words: str) -> Any:
        assert main([*words, "--socket", str(reader.daemon.socket), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return show


def blobs(shown: Shown) -> dict[str, dict[str, Any]]:
    """Those of the only namespace, by their keys."""
    (space,) = shown("ls")["namespaces"]
    return {blob["key"]: blob for blob in shown("ls", space["id"])["blobs"]}


def test_all_of_it_is_there() -> None:
    assert SERVER in program()
    assert command(1)[-3:] == ["install", "vllm", "."]
    assert command(2)[:2] == ["blobstore", "serve"]
    assert SOCKET in command(2)
    assert any(SOCKET in each for each in command(3))
    assert [command(number)[:2] for number in (4, 5)] == [["python", "ask.py"]] * 2


def test_every_option_metric_and_reason_is_told_of() -> None:
    page = PAGE.read_text()
    words = [value for name, value in vars(reasons).items() if name.isupper()]
    for name in [*(field.name for field in fields(Options)), *words]:
        assert f"`{name}`" in page, name
    for name in METRICS:
        assert re.search(rf"`{name}(_total)?(\{{\w+\}})?`", page), name


@pytest.mark.timeout(900)
def test_the_first_run_is_computed(begun: Reader) -> None:
    assert begun.said[0][0] == 0


@pytest.mark.timeout(900)
def test_the_second_run_comes_from_the_store(reader: Reader) -> None:
    (_, n_first), (found, n_second) = reader.said
    assert found % BLOB == 0
    assert found >= min(n_first, n_second) - 2 * BLOB > BLOB


@pytest.mark.timeout(900)
def test_requests_say_what_is_stored_and_how_it_is_kept(reader: Reader, shown: Shown) -> None:
    before = blobs(shown)
    assert {blob["retention"] for blob in before.values()} == {"standard"}
    reader.chat("oil", no_store=True)
    _, total = reader.chat("glass", retention="volatile", ttl=600, session="evening", turn=3)
    n = total // BLOB
    assert n >= 2
    with Client(reader.daemon.address) as kv:
        pinned = kv.stats
        poll_until(lambda: pinned()["pinned_by_clients"]["blobs"] == n, WORKS_S, "all is kept")
    new = [blob for key, blob in blobs(shown).items() if key not in before]
    assert [blob["retention"] for blob in new] == ["volatile"] * n
    last = max(new, key=lambda blob: int(blob["depth"]))["key"]
    said = poll_until(lambda: shown("explain", last)["session"], WORKS_S, "its session is known")
    assert (said["session"], said["turn"]) == ("evening", 3)


@pytest.mark.timeout(900)
def test_requests_say_whether_they_read(reader: Reader) -> None:
    reader.server.forget()
    assert reader.chat("oil")[0] == 0, "it was not stored before"
    reader.server.forget()
    assert reader.chat("glass", no_load=True)[0] == 0
    reader.server.forget()
    found, total = reader.chat("glass")
    assert found == (total - 1) // BLOB * BLOB


@pytest.mark.timeout(900)
def test_what_the_page_says_to_watch_is_there(reader: Reader) -> None:
    found = reader.server.metrics()
    assert found["hit_tokens_total[dram]"] >= reader.said[1][0]
    assert found["loaded_tokens_total"] >= reader.said[1][0]
    assert found["loaded_bytes_total"] > found["loaded_tokens_total"]
    assert found["misses_total[absent]"] >= 2
    assert found["saved_tokens_total"] >= BLOB
    assert found["saved_bytes_total"] > found["saved_tokens_total"]
    for name in ("load", "save", "wait"):
        assert found[f"{name}_seconds_count"] > 0


@pytest.fixture(scope="module")
def again(reader: Reader) -> int:
    """What was found of the document after the daemon was restarted, and came from SSD."""

    def found() -> int:
        reader.server.forget()
        return reader.ask("Who lit it?")[0]

    def from_ssd() -> int:
        reader.restart_daemon()
        tokens = poll_until(found, WORKS_S, "the daemon is found again")
        return tokens if "hit_tokens_total[ssd]" in reader.server.metrics() else 0

    # On a busy machine an answer may come too late: the next one finds what is in DRAM by then.
    return poll_until(from_ssd, 3 * WORKS_S, "it comes from SSD")


@pytest.mark.soak  # as tests with an engine alone show
@pytest.mark.timeout(900)
def test_after_the_daemon_was_restarted_it_comes_from_ssd(reader: Reader, again: int) -> None:
    assert again >= reader.said[1][0]


@pytest.mark.soak  # as tests with an engine alone show
@pytest.mark.timeout(900)
def test_a_reset_of_both_caches_starts_anew(reader: Reader) -> None:
    question = "Was it lit at dawn?"
    reader.server.forget(external=True)
    assert reader.ask(question)[0] == 0
    with Client(reader.daemon.address) as kv:
        poll_until(lambda: kv.stats()["namespaces"] == 2, WORKS_S, "it stores elsewhere")

    def found() -> int:
        reader.server.forget()
        return reader.ask(question)[0]

    assert poll_until(found, WORKS_S, "what is stored since then is found") > BLOB

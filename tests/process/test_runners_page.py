"""The programs of the page "Connect your model runner", as a reader runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from blobstore.clients import Client, KVLayout, Namespace
from tests.support.daemon import Daemon, daemon

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

PAGE = Path(__file__).parents[2] / "docs" / "integrations" / "runners.md"
SOCKET = "unix:/tmp/blobstore.sock"
TIMEOUT_S = 150.0


def programs() -> dict[str, str]:
    """The page's programs by the names that it tells to write them under."""
    found = re.findall(
        r"\*\*Write `(\w+\.py)`.*?```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL
    )
    return dict(found)


class Reader:
    """Does what the page says, in a folder of its own."""

    def __init__(self, folder: Path, run: Daemon) -> None:
        self.daemon = run
        self._folder = folder
        self._environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        for name, text in programs().items():
            (folder / name).write_text(text.replace(SOCKET, run.address))

    @contextmanager
    def started(self, *command: str) -> Iterator[subprocess.Popen[str]]:
        """A program that says "serving" when it is ready; ended with the block."""
        program = self._start(*command)
        try:
            assert program.stdout is not None
            first = program.stdout.readline()
            assert first.startswith("serving"), program.communicate()
            yield program
        finally:
            program.kill()
            program.communicate()

    def run(self, *command: str) -> str:
        """All that a program says."""
        program = self._start(*command)
        try:
            said, complaint = program.communicate(timeout=TIMEOUT_S)
        finally:
            program.kill()
            program.communicate()
        assert program.returncode == 0, complaint
        return said

    def _start(self, *command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", *command],
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    (folder := tmp_path / "programs").mkdir()
    with daemon(tmp_path, "--dram", "256MiB", "--http", "127.0.0.1:0") as run:
        yield Reader(folder, run)


def test_every_program_is_there() -> None:
    names = ["model.py", "runner.py", "ask.py", "own_runner.py", "far_runner.py"]
    assert list(programs()) == names
    assert [SOCKET in programs()[name] for name in names] == [True, False, False, True, False]


def test_an_own_runner(reader: Reader) -> None:
    dropped, back, _ = reader.run("own_runner.py").splitlines()
    assert dropped == "10 blobs dropped; 0 held"
    assert back == "10 blobs are back: {'rebuild': 10}; equal: True"


def test_a_runner_elsewhere(reader: Reader) -> None:
    run = reader.daemon
    url = re.findall(r"^ready: (http\S+)$", run.said, re.MULTILINE)[0]
    token = (run.data / "http.token").read_text().strip()
    reader.run("own_runner.py")  # puts the blobs
    with reader.started("far_runner.py", url, token), Client(run.address, timeout_s=20.0) as kv:
        layout = KVLayout.opaque(4096)
        ns = kv.namespace(Namespace("my-model", layout, revision="1", tokens_per_blob=16))
        keys = ns.keys(range(160))
        with kv.get(ns, keys) as lease:
            before = [bytes(blob) for blob in lease]
        assert len(before) == 10
        kv.drop(ns, keys[4:])
        with kv.get(ns, keys) as lease:
            assert lease.served == {"dram": 4, "rebuild": 6}
            assert [bytes(blob) for blob in lease] == before


@pytest.mark.soak  # two minutes of two idle cores: the model is loaded three times
@pytest.mark.timeout(900)
def test_a_dropped_prompt_comes_back_from_its_tokens(reader: Reader) -> None:
    question = "What did the keeper light?"
    answer, figures = reader.run("ask.py", question).splitlines()
    assert "lamp" in answer
    total = int(re.fullmatch(r"0 of (\d+) tokens were restored; .*", figures)[1])  # type: ignore[index]
    with reader.started("runner.py") as runner:
        dropped, again, figures = reader.run("ask.py", question, "--drop").splitlines()
        assert again == answer
        assert figures.startswith(f"{(total - 1) // 64 * 64} of {total} tokens were restored")
        assert int(dropped.split()[0]) >= (total - 1) // 64
        said, _ = runner.communicate("\n", timeout=TIMEOUT_S)
        assert "'failed': 0" in said

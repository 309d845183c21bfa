"""A vLLM engine in a process of its own, run by whatever Python has vLLM.

vLLM needs exact versions of many packages, so that it usually lives in an environment
beside ours: it is found here, and its engine is started and ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import blobstore
from blobstore.bench.engine_process import EngineDied
from blobstore.bench.engine_vllm import Answer, Answers, Question
from blobstore.errors import SetupError

BESIDE = Path(".venv-vllm/bin/python")
"""Where the Makefile puts it, in a checkout."""

_REPLY_S = 300.0
"""An engine that starts, or answers four prompts of 4,096 tokens, takes a minute."""

_STOP_S = 30.0
_PROBE_S = 60.0
_LINES = 3
"""Of what a process said, in the message about its end."""

_PROBE = """
import importlib.metadata, importlib.util
for name in ("vllm", "blobstore"):
    print(importlib.util.find_spec(name) is not None)
print(importlib.metadata.version("kv-blobstore"))
"""
_INSTALL = "pip install vllm kv-blobstore"


def find_python(given: Path | None) -> Path:
    """The Python that has vLLM: `given`, our own, or the one beside the project.

    Raises SetupError, with the line that mends it, unless it has this version of blobstore.
    """
    python = given or next((one for one in _usual() if _probe(one)[:1] == ["True"]), None)
    if python is None:
        raise SetupError(
            f"no Python with vLLM: python3 -m venv .venv-vllm && .venv-vllm/bin/{_INSTALL} makes "
            "one (in a checkout: make .venv-vllm/.vllm), --vllm-python names one that is elsewhere"
        )
    ours = version("kv-blobstore")
    if _probe(python) != ["True", "True", ours]:
        raise SetupError(f"{python} lacks vLLM or blobstore {ours}: {python} -m {_INSTALL}=={ours}")
    return python


def our_transfer(address: str, **options: Any) -> dict[str, Any]:
    """vLLM's `--kv-transfer-config` for the daemon at `address`."""
    return {
        "kv_connector": "BlobStoreConnector",
        "kv_connector_module_path": "blobstore.clients.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"address": address, **options},
    }


def example_transfer(directory: Path) -> dict[str, Any]:
    """The same for vLLM's own ExampleConnector, which keeps files in `directory`."""
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(directory)},
    }


class VllmProcess:
    """An engine that answers, from the `with` block's begin to its end.

    Raises EngineDied, with the end of what it said, if it ends by itself.
    """

    def __init__(self, python: Path, model: Path, transfer: Mapping[str, Any] | None) -> None:
        command = [str(python), "-m", "blobstore.bench.engine_vllm", str(model)]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (close does)
        self._process = subprocess.Popen(  # noqa: S603 (our own module)
            [*command, json.dumps(transfer)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | _environment(),
            start_new_session=True,  # its own processes go with it
        )
        try:
            self._reply()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def ask(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, *, forget: bool = True
    ) -> Answers:
        """Ask all prompts at once; see Question."""
        question = Question([list(prompt) for prompt in prompts], max_tokens, forget)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(asdict(question)) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the reply says why it died
        reply = self._reply()
        return Answers([Answer(**answer) for answer in reply["answers"]], reply["total_s"])

    def close(self) -> None:
        """End the engine, in order if it can: what it is saving is saved. Twice is once."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
        self._kill()
        process.wait()
        process.stdout.close()
        self._log.close()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        late = threading.Timer(_REPLY_S, self._kill)
        late.start()
        line = self._process.stdout.readline()
        late.cancel()
        late.join()
        if line:
            reply: dict[str, Any] = json.loads(line)
            return reply
        self._kill()
        self._process.wait()
        self._log.seek(0)
        said = self._log.read().decode(errors="replace").splitlines()[-_LINES:]
        raise EngineDied(f"the vLLM process ended: {' / '.join(said)}")


def _environment() -> dict[str, str]:
    """vLLM's own settings: quiet, offline, and on all cores but one, which is the daemon's.

    Named, because vLLM would take another number of cores with a connector than without.
    """
    cores = sorted(os.sched_getaffinity(0))
    return {
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONHASHSEED": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores[:-1] or cores)),
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }


def _usual() -> Iterator[Path]:
    yield Path(sys.executable)
    checkout = Path(blobstore.__file__).resolve().parents[1]
    for directory in (Path.cwd(), checkout):
        if (directory / BESIDE).exists():
            yield directory / BESIDE


def _probe(python: Path) -> list[str]:
    """Whether it has vLLM, whether it has blobstore, and which version: as far as it comes."""
    try:
        found = subprocess.run(  # noqa: S603 (a Python that the caller names)
            [python, "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SetupError(f"{python} does not run: {error}") from error
    return found.stdout.split()

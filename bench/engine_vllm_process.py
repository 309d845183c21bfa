"""A vLLM engine in a process of its own, run by whatever Python has vLLM.

vLLM needs exact versions of many packages, so that it usually lives in an environment
beside ours: it is found here, and its engine is started and ended.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import blobstore
from blobstore.bench.engine_process import ModelProcess
from blobstore.bench.engine_vllm import Answer, Answers, Question
from blobstore.errors import SetupError

BESIDE = Path(".venv-vllm/bin/python")
"""Where the Makefile puts it, in a checkout."""

_REPLY_S = 300.0
"""An engine that starts, or answers four prompts of 4,096 tokens, takes a minute."""

_STOP_S = 30.0
_PROBE_S = 60.0

_PROBE = """
import importlib.metadata, importlib.util
for name in ("vllm", "blobstore"):
    print(importlib.util.find_spec(name) is not None)
print(importlib.metadata.version("kv-blobstore"))
"""
_INSTALL = "pip install vllm ."
"""In a checkout of this project, which no package index has yet."""


def find_python(given: Path | None) -> Path:
    """The Python that has vLLM: `given`, our own, or the one beside the project.

    Raises SetupError, with the line that mends it, unless it has this version of blobstore.
    """
    python = given or next((one for one in _usual() if _probe(one)[:1] == ["True"]), None)
    if python is None:
        raise SetupError(
            "no Python with vLLM. In a checkout of blobstore, make .venv-vllm/.vllm makes one with "
            f"vLLM's CPU build, and python3 -m venv .venv-vllm && .venv-vllm/bin/{_INSTALL} one "
            "for this machine's accelerator; --vllm-python names one that is elsewhere"
        )
    ours = version("kv-blobstore")
    if _probe(python) != ["True", "True", ours]:
        raise SetupError(
            f"{python} lacks vLLM or blobstore {ours}: {python} -m {_INSTALL} in a checkout of it"
        )
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


class VllmProcess(ModelProcess):
    """An engine that answers, from the `with` block's begin to its end.

    What it is saving when it ends is saved.
    """

    def __init__(self, python: Path, model: Path, transfer: Mapping[str, Any] | None) -> None:
        command = [str(python), "-m", "blobstore.bench.engine_vllm", str(model)]
        command.append(json.dumps(transfer))
        super().__init__(command, _environment(), reply_s=_REPLY_S, stop_s=_STOP_S)

    def ask(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        *,
        forget: bool = True,
        left_alone: bool = False,
    ) -> Answers:
        """Ask all prompts at once; see Question."""
        ids = [list(prompt) for prompt in prompts]
        self.send(asdict(Question(ids, max_tokens, forget, left_alone)))
        reply = self.reply()
        return Answers([Answer(**answer) for answer in reply["answers"]], reply["total_s"])


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

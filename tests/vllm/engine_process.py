"""A vLLM engine in a process of its own that does what a test tells it, a verb at a time.

`python -m tests.vllm.engine_process` is the nursery: it imports vLLM once and forks an engine
for each line of its input, since the import takes longer than an engine's start. With a socket
and a log as arguments it is one engine, with an interpreter of its own.

An engine connects to the test's socket, hears verbs of `_Actor` there as lines of JSON, and
answers each. What it logs goes to its log.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import traceback
from collections import deque
from pathlib import Path
from typing import Any

from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.config import KVTransferConfig
from vllm.sampling_params import RequestOutputKind

from tests.support.program import say

MODULE = "tests.vllm.engine_process"

Wanted = dict[str, Any]
"""A request: name, tokens, max_tokens, params."""

Answer = dict[str, Any]

LIMITS: dict[str, Any] = {
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "max_model_len": 4096,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 512,
    "disable_log_stats": False,
    "seed": 0,
}


class _Actor:
    """The verbs."""

    def __init__(self) -> None:
        self._answers: dict[str, Answer] = {}
        self._steps = 0
        self._engine: LLMEngine

    def start(self, options: dict[str, Any], connector: dict[str, Any] | None) -> None:
        """Bring the engine up; `connector` are the fields of its KVTransferConfig."""
        transfer = KVTransferConfig(**connector) if connector else None
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(**{**LIMITS, **options}, kv_transfer_config=transfer)
        )

    def run(self, wanted: list[Wanted], at_once: int) -> dict[str, Answer]:
        """Answer them all, in their order, so many at once."""
        waiting = deque(wanted)
        while waiting or self._unfinished():
            while waiting and self._unfinished() < at_once:
                self.submit([waiting.popleft()])
            self.step(1)
        return self.answers()

    def submit(self, wanted: list[Wanted]) -> None:
        """Begin with these requests."""
        for one in wanted:
            self._engine.add_request(
                one["name"], {"prompt_token_ids": one["tokens"]}, _sampling(one)
            )

    def step(self, n: int) -> int:
        """So many steps of the engine; how many requests are unfinished then."""
        for _ in range(n):
            self._steps += 1
            for output in self._engine.step():
                if output.finished:
                    self._answers[output.request_id] = _answer(output)
        return self._unfinished()

    def answers(self) -> dict[str, Answer]:
        """What was answered since this was last asked."""
        answers, self._answers = self._answers, {}
        return answers

    def abort(self, names: list[str]) -> None:
        """Give these requests up."""
        self._engine.abort_request(names)

    def forget(self) -> bool:
        """Empty the engine's own prefix cache; whether nothing was in use."""
        return bool(self._engine.reset_prefix_cache())

    def in_use(self) -> float:
        """The share of the KV space that requests hold; in-process engines only."""
        return float(self._core().scheduler.kv_cache_manager.usage)

    def known(self) -> int:
        """Requests that the scheduler has not let go of; in-process engines only."""
        return len(self._core().scheduler.requests)

    def metrics(self) -> dict[str, float]:
        """vLLM's own counters and gauges, summed over their labels."""
        found: dict[str, float] = {}
        for metric in self._engine.get_metrics():
            value = getattr(metric, "value", None)
            if isinstance(value, int | float):
                found[metric.name] = found.get(metric.name, 0.0) + value
        return found

    def stop(self) -> None:
        """Shut the engine down as vLLM does."""
        self._engine.engine_core.shutdown()

    def _unfinished(self) -> int:
        return int(self._engine.get_num_unfinished_requests())

    def _core(self) -> Any:
        return self._engine.engine_core.engine_core


def _sampling(wanted: Wanted) -> SamplingParams:
    params = wanted.get("params")
    return SamplingParams(
        temperature=0.0,
        max_tokens=wanted["max_tokens"],
        ignore_eos=True,
        logprobs=1,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={"kv_transfer_params": params} if params else None,
    )


def _answer(output: Any) -> Answer:
    (completion,) = output.outputs
    tokens = list(completion.token_ids)
    return {
        "tokens": tokens,
        "logprobs": [
            at[token].logprob for at, token in zip(completion.logprobs, tokens, strict=True)
        ],
        "cached": output.num_cached_tokens,
        "finish": completion.finish_reason,
    }


def engine(path: str, log: str) -> None:
    """Be an engine until the test closes the socket."""
    with Path(log).open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    logging.basicConfig(level="INFO", format="%(levelname)s %(name)s: %(message)s")
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(path)
        with line.makefile("rwb", buffering=0) as wire:
            _obey(wire)
    os._exit(0)  # what vLLM leaves running may not decide how long the end takes


def _obey(wire: Any) -> None:
    actor = _Actor()
    for line in wire:
        verb, *arguments = json.loads(line)
        try:
            said = {"answer": getattr(actor, verb)(*arguments)}
        except Exception:
            said = {"error": traceback.format_exc()}
        wire.write(json.dumps(said).encode() + b"\n")


def nursery() -> None:
    """Make an engine for each line of input: its socket, its log, whether it is to be alone."""
    say("ready")
    for line in sys.stdin:
        path, log, alone = json.loads(line)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            if alone:
                os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
                os.execv(sys.executable, [sys.executable, "-m", MODULE, path, log])
            engine(path, log)
        say(pid)


if __name__ == "__main__":
    engine(*sys.argv[1:]) if sys.argv[1:] else nursery()

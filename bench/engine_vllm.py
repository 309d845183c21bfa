"""A real vLLM engine in a process: questions on standard input, answers on standard output.

Run by the Python that has vLLM. One JSON document a line; whatever else vLLM prints goes
to standard error. The end of standard input ends the engine.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TextIO

CONTEXT_TOKENS = 4096
REQUESTS_MAX = 4
"""At the same time."""

BLOCK_TOKENS = 128
"""Of vLLM's own cache, as it chooses by itself on a CPU."""

FORGET_S = 20.0
WARM = list(range(1000, 1300))
"""What is answered before the first question: longer than a blob, so that all is connected."""

DTYPE = "float32"
"""So that tokens are equal whatever is computed together: in bf16, near ties may fall otherwise."""


@dataclass(frozen=True, slots=True)
class Question:
    """Prompts that are asked at the same time."""

    prompts: list[list[int]]
    max_tokens: int
    forget: bool
    """vLLM's own prefix cache is emptied first."""
    left_alone: bool = False
    """Our connector neither stores nor reads them."""


@dataclass(slots=True)
class Answer:
    """What came back for one prompt."""

    tokens: list[int]
    cached_tokens: int = 0
    """Of the prompt, not computed: out of vLLM's own cache or its connector."""
    first_token_s: float = 0.0
    """Since the question."""


@dataclass(frozen=True, slots=True)
class Answers:
    """One for each prompt of a question, in order."""

    answers: list[Answer]
    total_s: float
    """Until the last token of the last answer."""


class VllmEngine:
    """An engine of the model in `directory`, with a connector if `transfer` describes one."""

    def __init__(self, directory: str, transfer: dict[str, Any] | None) -> None:
        from vllm import EngineArgs, LLMEngine
        from vllm.config import KVTransferConfig

        arguments = EngineArgs(
            model=directory,
            skip_tokenizer_init=True,
            dtype=DTYPE,
            enforce_eager=True,
            block_size=BLOCK_TOKENS,
            max_model_len=CONTEXT_TOKENS,
            max_num_seqs=REQUESTS_MAX,
            enable_prefix_caching=True,
            disable_log_stats=True,
            kv_transfer_config=KVTransferConfig(**transfer) if transfer else None,
        )
        self._engine = LLMEngine.from_engine_args(arguments)
        self._asked = 0

    def ask(self, question: Question) -> Answers:
        """Answer all prompts of a question together, greedily, `max_tokens` each."""
        if question.forget:
            self._forget()
        started_s = time.perf_counter()
        names = [self._add(prompt, question) for prompt in question.prompts]
        found = {name: Answer([]) for name in names}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                answer = found[output.request_id]
                if not answer.tokens:
                    answer.first_token_s = time.perf_counter() - started_s
                answer.tokens = list(output.outputs[0].token_ids)
                answer.cached_tokens = output.num_cached_tokens or 0
        return Answers([found[name] for name in names], time.perf_counter() - started_s)

    def close(self) -> None:
        """End its processes; a connector finishes what it is saving."""
        self._engine.engine_core.shutdown()

    def _forget(self) -> None:
        """Empty its own prefix cache: blocks may still be held for a moment after an answer."""
        deadline_s = time.monotonic() + FORGET_S
        while not self._engine.reset_prefix_cache():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"vLLM holds blocks {FORGET_S:g} s after its last answer")
            time.sleep(0.005)

    def _add(self, prompt: Sequence[int], question: Question) -> str:
        from vllm import SamplingParams

        self._asked += 1
        name = str(self._asked)
        params = {"no_store": True, "no_load": True} if question.left_alone else {}
        greedy = SamplingParams(
            temperature=0.0,
            max_tokens=question.max_tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": params} if params else None,
        )
        self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, greedy)
        return name


def main(directory: str, transfer: str) -> None:
    """Answer the questions on standard input; `transfer` is JSON, null for no connector."""
    out = _own_output()
    engine = VllmEngine(directory, json.loads(transfer))
    try:
        engine.ask(Question([WARM], 2, forget=False))
        _say(out, {"ready": True})
        for line in sys.stdin:
            _say(out, asdict(engine.ask(Question(**json.loads(line)))))
    finally:
        engine.close()


def _own_output() -> TextIO:
    """Standard output, from now on for the caller of this alone."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return out


def _say(out: TextIO, body: object) -> None:
    out.write(json.dumps(body) + "\n")
    out.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])

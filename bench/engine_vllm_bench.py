"""`blobstore bench engine --runner vllm`: prompts through a real vLLM, in every way they come back.

Each prompt is computed by an engine without a connector, answered again out of vLLM's own
prefix cache, out of our DRAM, out of vLLM's ExampleConnector, and, after the engine and the
daemon have restarted, out of our SSD. Then the connector's cost where it brings nothing:
prompts that nothing begins like, and a daemon that is not there any more: it is stopped while
the engine runs.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from blobstore.bench.blobs import counters, require
from blobstore.bench.chat import Chat
from blobstore.bench.engine_conversation import Conversation, Request
from blobstore.bench.engine_vllm import BLOCK_TOKENS, REQUESTS_MAX, Answer
from blobstore.bench.engine_vllm_model import model_directory
from blobstore.bench.engine_vllm_process import (
    VllmProcess,
    example_transfer,
    find_python,
    our_transfer,
)
from blobstore.bench.engine_vllm_report import (
    Sample,
    VllmReport,
    VllmRow,
    beside_row,
    first_token_row,
    throughput_row,
)
from blobstore.bench.engine_ways import COLD, DRAM, MAX_TOKENS, SETTLED_S, SSD
from blobstore.bench.machine import machine_facts
from blobstore.bench.model_file import ModelFile
from blobstore.bench.own_daemon import OwnDaemon
from blobstore.bench.page_cache import evict
from blobstore.bench.pairs import alternate
from blobstore.bench.setup import Setup
from blobstore.clients import Client
from blobstore.units import GIB, MIB

OWN, EXAMPLE = "own_cache", "example_connector"

LEAST = {COLD: 0.0, OWN: 0.0, DRAM: 5.0, SSD: 4.0, EXAMPLE: 0.0}
"""How many times sooner than cold the first token has to come."""

BESIDE_EXAMPLE_LEAST = 1.0
NO_REUSE_LEAST = 0.95
ABSENT_LEAST = 0.97

BLOB_TOKENS = BLOCK_TOKENS
"""As ExampleConnector, which keeps blocks: both leave the same tokens of a prompt to the model."""

LOOKUP_TIMEOUT_S = 1.0
"""Longer than by default: a prompt that is computed, on a machine that is busy, is no figure."""

_POLL_S = 0.005
_ENGINE_BYTES = 3 * GIB


@dataclass(frozen=True, slots=True)
class Scale:
    """How large one run is."""

    script: Sequence[Request]
    """Of a context whose last request is a prompt."""
    prompts: int
    restores: int
    """Of each prompt, by ours and by vLLM's own connector in turns."""
    layers: int
    """Of the model; 0 are all."""
    pairs: int
    """Of batches that nothing begins like."""
    fresh_tokens: int
    dram_bytes: int


FULL = Scale(
    (
        Request("task", "user", 650),
        Request("tool output", "tool", 900, after=0),
        Request("follow-up", "user", 283, after=1),
    ),
    prompts=5,
    restores=3,
    layers=0,
    pairs=8,
    fresh_tokens=384,
    dram_bytes=3 * GIB,
)
SMALL = Scale((Request("task", "user", 450),), 1, 1, 2, 1, 300, 256 * MIB)


def report(setup: Setup, python: Path | None = None) -> VllmReport:
    """The rows `vllm.cold|own_cache|dram|ssd|example_connector|no_reuse|daemon_absent`.

    `vllm.dram_beside_example` is `vllm.dram` once more, against ExampleConnector, and
    `vllm.no_reuse_same_engine` `vllm.no_reuse` without a second engine. Raises SetupError, which
    says what to install, without a Python that has vLLM.
    """
    scale, vllm = setup.scale(FULL, SMALL), find_python(python)
    setup.need_memory(3 * _ENGINE_BYTES + scale.dram_bytes)
    found = VllmReport(machine_facts(setup.directory))
    with ExitStack() as stack:
        own = OwnDaemon(setup.directory, dram_bytes=scale.dram_bytes, ssd_bytes=4 * GIB)
        daemon = stack.enter_context(own)
        files = stack.enter_context(tempfile.TemporaryDirectory(dir=setup.directory))
        start = partial(VllmProcess, vllm, model_directory(scale.layers))
        transfer = our_transfer(
            daemon.address, tokens_per_blob=BLOB_TOKENS, lookup_timeout_s=LOOKUP_TIMEOUT_S
        )
        setup.say("vLLM starts: without a connector, with ours, and with its own")
        run = _Run(setup, scale, daemon, stack.enter_context(start(None)))
        with start(transfer) as ours:
            with start(example_transfer(Path(files))) as theirs:
                found.samples += run.while_all_run(ours, theirs)
            found.rows.append(run.without_reuse(ours, "vllm.no_reuse", NO_REUSE_LEAST))
            found.rows.append(run.within_one_engine(ours))
        setup.say("the engine and the daemon restart")
        daemon.restart()
        with start(transfer) as ours:
            found.samples += run.after_restarts(ours)
            daemon.stop()
            found.rows.append(run.without_reuse(ours, "vllm.daemon_absent", ABSENT_LEAST))
    found.rows = [*_first_token_rows(setup, found.samples), *found.rows]
    return found


@dataclass(slots=True)
class _Run:
    """One daemon and an engine without a connector, beside which all others are measured."""

    setup: Setup
    scale: Scale
    daemon: OwnDaemon
    plain: VllmProcess
    prompts: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        chat, script = Chat(ModelFile()), self.scale.script
        self.prompts = []
        for seed in range(self.scale.prompts):
            conversation = Conversation(chat, script, seed)
            self.prompts.append([conversation.prompt(n) for n in range(len(script))][-1])

    def while_all_run(self, ours: VllmProcess, theirs: VllmProcess) -> Iterator[Sample]:
        """Every prompt cold, and again in each way that needs no restart."""
        with self.daemon.client() as kv:
            for number, ids in enumerate(self.prompts):
                cold = self._ask(self.plain, ids)
                yield self._sample(number, COLD, cold, cold)
                again = self._ask(self.plain, ids, forget=False)
                yield self._sample(number, OWN, again, cold)
                self._store(kv, ours, ids)
                self._ask(theirs, ids)
                for _ in range(self.scale.restores):
                    yield self._restored(number, DRAM, ours, cold)
                    yield self._restored(number, EXAMPLE, theirs, cold)
            require(counters(kv)["loaded_blobs"] == 0, "nothing came from SSD")

    def after_restarts(self, ours: VllmProcess) -> Iterator[Sample]:
        """Every prompt cold, and from the SSD of a daemon that has just started."""
        evict(self.daemon.segment_files())
        with self.daemon.client() as kv:
            for number, ids in enumerate(self.prompts):
                cold, before = self._ask(self.plain, ids), counters(kv)["loaded_blobs"]
                found = self._ask(ours, ids)
                loaded = counters(kv)["loaded_blobs"] - before
                require(loaded >= _blobs(ids), f"{_blobs(ids)} blobs came from SSD, not {loaded}")
                yield self._sample(number, SSD, found, cold)

    def without_reuse(self, ours: VllmProcess, name: str, least: float) -> VllmRow:
        """Prompts that nothing begins like, with our connector beside none."""
        self.setup.say(name)
        ours_asked, plain_asked = (
            _Fresh(ours, name, self.scale),
            _Fresh(self.plain, name, self.scale),
        )
        pairs = alternate(ours_asked.batch, plain_asked.batch, self.scale.pairs)
        equal = ours_asked.tokens == plain_asked.tokens
        least = self.setup.scale(least, 0.0)
        return throughput_row(name, pairs, "another engine, without", least, tokens_equal=equal)

    def within_one_engine(self, ours: VllmProcess) -> VllmRow:
        """The same, with the connector at work beside the same engine's while it is left alone.

        Two processes of one engine differ by a tenth in how fast they compute.
        """
        name = "vllm.no_reuse_same_engine"
        self.setup.say(name)
        stored = _Fresh(ours, name, self.scale)
        alone = _Fresh(ours, name, self.scale, left_alone=True)
        pairs = alternate(stored.batch, alone.batch, self.scale.pairs)
        least, equal = self.setup.scale(NO_REUSE_LEAST, 0.0), stored.tokens == alone.tokens
        return throughput_row(name, pairs, "connector left alone", least, tokens_equal=equal)

    def _restored(self, prompt: int, way: str, engine: VllmProcess, cold: Answer) -> Sample:
        """A prompt restored by an engine's connector, and answered out of its own cache then."""
        ids = self.prompts[prompt]
        answer = self._ask(engine, ids)
        own = self._ask(engine, ids, forget=False)
        return replace(self._sample(prompt, way, answer, cold), own_s=own.first_token_s)

    def _ask(self, engine: VllmProcess, ids: Sequence[int], *, forget: bool = True) -> Answer:
        return engine.ask([ids], MAX_TOKENS, forget=forget).answers[0]

    def _store(self, kv: Client, ours: VllmProcess, ids: Sequence[int]) -> None:
        """Let our engine compute a prompt, and wait until it is stored: that is done beside it."""
        wanted = _held(kv) + _blobs(ids)
        self._ask(ours, ids)
        deadline_s = time.monotonic() + SETTLED_S
        while _held(kv) < wanted:
            require(time.monotonic() < deadline_s, f"{_blobs(ids)} blobs are stored in a minute")
            time.sleep(_POLL_S)

    def _sample(self, prompt: int, way: str, answer: Answer, cold: Answer) -> Sample:
        """Raises BenchInvalid if what a way says to bring was computed, or the other way round."""
        length, cached = len(self.prompts[prompt]), answer.cached_tokens
        self.setup.say(
            f"{length} tokens, {cached} by way of {way}: first token after "
            f"{answer.first_token_s:.3f} s"
        )
        least = 0 if way == COLD else _blobs(self.prompts[prompt]) * BLOB_TOKENS
        require(
            least <= cached and bool(least) == bool(cached),
            f"{least} of {length} tokens came by way of {way}, not {cached}",
        )
        return Sample(prompt, way, answer, cold)


class _Fresh:
    """Batches of random prompts for one engine: another one with the same name gets the same."""

    def __init__(
        self, engine: VllmProcess, name: str, scale: Scale, *, left_alone: bool = False
    ) -> None:
        self._engine = engine
        self._left_alone = left_alone
        self._rng = random.Random(name)  # noqa: S311 (prompts that nothing else begins with)
        self._tokens = scale.fresh_tokens
        self.tokens: list[list[int]] = []
        """Of all answers so far."""

    def batch(self) -> list[float]:
        """The seconds that the next batch takes."""
        prompts = [
            [self._rng.randrange(1000, 40_000) for _ in range(self._tokens)]
            for _ in range(REQUESTS_MAX)
        ]
        found = self._engine.ask(prompts, MAX_TOKENS, left_alone=self._left_alone)
        self.tokens += [answer.tokens for answer in found.answers]
        return [found.total_s]


def _blobs(ids: Sequence[int]) -> int:
    """How many blobs of a prompt the store gives back: the last token is always computed."""
    return (len(ids) - 1) // BLOB_TOKENS


def _held(kv: Client) -> int:
    """Blobs in DRAM."""
    blobs: int = kv.stats()["tiers"]["dram"]["blobs"]
    return blobs


def _first_token_rows(setup: Setup, samples: Sequence[Sample]) -> Iterator[VllmRow]:
    by_way = {way: [sample for sample in samples if sample.way == way] for way in LEAST}
    for way, least in LEAST.items():
        yield first_token_row(by_way[way], setup.scale(least, 0.0))
    least = setup.scale(BESIDE_EXAMPLE_LEAST, 0.0)
    name = "vllm.dram_beside_example"
    yield beside_row(name, by_way[DRAM], by_way[EXAMPLE], "ExampleConnector", least)

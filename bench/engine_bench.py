"""`blobstore bench engine`: an agent's conversation through a real model, each turn in every way.

An engine process answers each request cold, then with the known prefix out of DRAM, out
of SSD and rebuilt by another process from its text. Then the daemon reads its disk only
as fast as the runner computes, and both work at once. The tokens must always be the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from blobstore.bench import engine_report
from blobstore.bench.blobs import require
from blobstore.bench.engine import CHUNK_TOKENS
from blobstore.bench.engine_conversation import AGENT, TINY, Request
from blobstore.bench.engine_process import EngineProcess, RebuilderProcess
from blobstore.bench.engine_report import EngineReport, Sample
from blobstore.bench.engine_turns import Turns
from blobstore.bench.engine_ways import (
    BOTH,
    BOTH_UNEVEN,
    COLD,
    DRAM,
    MAX_TOKENS,
    REBUILD,
    SSD,
    WAYS,
)
from blobstore.bench.machine import machine_facts
from blobstore.bench.model_file import ModelFile
from blobstore.bench.own_daemon import OwnDaemon
from blobstore.bench.pairs import alternate
from blobstore.bench.report import Row, Setting, latency_row
from blobstore.bench.setup import Setup
from blobstore.units import GIB, MIB

LEAST = {COLD: 0.0, DRAM: 200.0, SSD: 60.0, REBUILD: 0.9, BOTH: 1.6, BOTH_UNEVEN: 1 / 1.1}
"""What the ratio of each way's row has to reach, over a long prefix."""

UNEVEN = 3
"""How many times as fast as the rebuild the fetch is then."""
READERS_LEAST = 1 / 1.1
"""The last of many readers of one context waits a tenth longer than a single one, at most."""
WITHOUT_REUSE_LEAST = 0.97
"""Where nothing is shared, the store may cost 3 % of a turn."""

_MODEL_BYTES = 700 * MIB
_TOKEN_BYTES = 48 * 1024
"""Of a cache, which keeps fp32."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How large one run is."""

    script: Sequence[Request]
    layers: int
    """Of the model; 0 are all."""
    capacity_tokens: int
    dram_bytes: int
    prefix_tokens_min: int
    """Turns with shorter prefixes do not count in the rows."""
    rounds: int
    """In which both ways at once are measured."""
    uneven_rounds: int
    """The same, where one of them is faster."""
    readers: int
    """Of one missing context."""
    readers_tokens: int
    """Of that context, at most."""
    reader_pairs: int
    pairs: int
    """Of turns without reuse."""
    fresh_tokens: int


FULL = Scale(AGENT, 0, 8192, 640 * MIB, 1500, 3, 2, 32, 832, 4, 60, 256)
SMALL = Scale(TINY, 4, 512, 64 * MIB, 64, 2, 1, 8, 512, 1, 2, 128)


def report(setup: Setup) -> EngineReport:
    """The rows `engine.cold|dram|ssd|rebuild|both|both_uneven|readers|without_reuse`.

    And `engine.estimate_fetch|estimate_rebuild`, of the daemon since the conversation's pause.
    """
    scale = setup.scale(FULL, SMALL)
    file = ModelFile(layers=scale.layers)
    setup.need_memory(2 * (_MODEL_BYTES + scale.capacity_tokens * _TOKEN_BYTES) + scale.dram_bytes)
    found = EngineReport(machine_facts(setup.directory))
    with ExitStack() as stack:
        own = OwnDaemon(setup.directory, dram_bytes=scale.dram_bytes, ssd_bytes=4 * GIB)
        daemon = stack.enter_context(own)
        sizes = scale.capacity_tokens, scale.layers
        engine = stack.enter_context(EngineProcess(daemon.address, *sizes))
        runner = stack.enter_context(RebuilderProcess(daemon.address, *sizes))
        kv = stack.enter_context(daemon.client())
        turns = Turns(daemon, kv, engine, file, setup.say)
        run = _Run(setup, scale, daemon, engine, runner, turns)
        found.samples += run.conversation()
        others = [run.many_readers(found.samples), run.without_reuse()]
        found.estimates = kv.stats().get("rebuild", {}).get("estimates", {})
        found.samples += run.both_at_once(found.samples, BOTH, 1, scale.rounds)
        found.samples += run.both_at_once(found.samples, BOTH_UNEVEN, UNEVEN, scale.uneven_rounds)
        found.rows += [*run.rows(found.samples), *others]
        found.rows += engine_report.estimate_rows(found.estimates, wanted=not setup.tiny)
    return found


@dataclass(frozen=True, slots=True)
class _Run:
    """One daemon, one engine and one runner, through one conversation.

    Processes of the same program differ in how fast they compute, so a rebuild is held
    against what its own runner takes for the same.
    """

    setup: Setup
    scale: Scale
    daemon: OwnDaemon
    engine: EngineProcess
    runner: RebuilderProcess
    turns: Turns

    def conversation(self) -> Iterator[Sample]:
        """Every request, in all of its ways but `both`."""
        for sample in self.turns.converse(self.scale.script, seed=1):
            if sample.way == REBUILD and self._long(sample):
                ids = self.turns.prompts[sample.request][: sample.prefix_tokens]
                yield replace(sample, alone_s=(self.runner.cold_s(ids),))
            else:
                yield sample

    def both_at_once(
        self, samples: Sequence[Sample], name: str, times: int, rounds: int
    ) -> Iterator[Sample]:
        """One long prefix, fetched `times` as fast as it is rebuilt: each way alone, then both."""
        example = self._example(samples)
        rate = times * example.turn.restored_bytes / example.turn.restore_s
        self.setup.say(f"the daemon restarts, with a disk {times} x as fast as the runner")
        self.daemon.restart({"tiering.fetch_rate": str(int(rate))})
        ids = self.turns.prompts[example.request]
        blobs = self.turns.known_blobs(ids)  # the prompt itself has been stored meanwhile
        for _ in range(rounds):
            cold, rebuilt, fetched, both = (
                self.turns.take(way, ids, blobs) for way in (COLD, REBUILD, SSD, BOTH)
            )
            if times == 1 and not self.setup.tiny:  # a small prefix is read at once
                require(len(both.served) == 2, f"both ways brought blobs: {both.served}")
            alone_s = rebuilt.restore_s, fetched.restore_s
            yield Sample(example.request, name, blobs * CHUNK_TOKENS, both, cold, alone_s)

    def many_readers(self, samples: Sequence[Sample]) -> Row:
        """The last of many readers of one missing context, beside a single reader."""
        readers, example = self.scale.readers, self._example(samples)
        self.setup.say(f"engine.readers: {readers} of one context")
        ids = self.turns.prompts[example.request]
        blobs = min(example.prefix_tokens, self.scale.readers_tokens) // CHUNK_TOKENS
        pairs = alternate(
            lambda: [max(self.turns.rebuilt_for(ids, blobs, readers))],
            lambda: self.turns.rebuilt_for(ids, blobs, 1),
            self.scale.reader_pairs,
            warm_up=0,
        )
        least = self.setup.scale(READERS_LEAST, 0.0)
        nbytes = example.turn.restored_bytes // example.turn.restored_blobs * blobs
        setting = Setting(nbytes, cold=True, least=least)
        return latency_row("engine.readers", pairs, "a single reader", setting)

    def rows(self, samples: Sequence[Sample]) -> Iterator[Row]:
        """The row of each way, over its turns with a long prefix."""
        for way in (*WAYS, BOTH_UNEVEN):
            least = self.setup.scale(LEAST[way], 0.0)
            yield engine_report.row([s for s in samples if s.way == way and self._long(s)], least)

    def without_reuse(self) -> Row:
        """Turns that share no prefix, with the store asked and told, beside turns without it."""
        self.setup.say("engine.without_reuse")
        rng = random.Random(2)  # noqa: S311 (prompts that nothing else begins with)

        def turn(*, stored: bool) -> list[float]:
            ids = [rng.randrange(1000, 40_000) for _ in range(self.scale.fresh_tokens)]
            kept = "standard" if stored else ""
            turn = self.engine.answer(ids, MAX_TOKENS, restore=stored, store=kept)
            return [turn.total_s + turn.store_s]

        pairs = alternate(lambda: turn(stored=True), lambda: turn(stored=False), self.scale.pairs)
        setting = Setting(0, least=self.setup.scale(WITHOUT_REUSE_LEAST, 0.0))
        return latency_row("engine.without_reuse", pairs, "a turn without a store", setting)

    def _example(self, samples: Sequence[Sample]) -> Sample:
        return next(s for s in samples if s.way == REBUILD and self._long(s))

    def _long(self, sample: Sample) -> bool:
        return sample.prefix_tokens >= self.scale.prefix_tokens_min

"""`blobstore demo`: a real model's KV goes through a real daemon and comes back.

A first process reads a document cold and stores its state. Then other
processes go on from it: from DRAM, from SSD, after a crash, on a branch, and from its text alone.
Each step must be served by the tier that it is about, by the daemon's own
counters, and must give the very tokens of a run that computed everything.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from blobstore.bench.blobs import counters
from blobstore.bench.chat import Chat
from blobstore.bench.engine import CHUNK_TOKENS, Turn, namespace
from blobstore.bench.engine_process import EngineProcess, RebuilderProcess
from blobstore.bench.machine import machine_facts
from blobstore.bench.model_file import MODEL, ModelFile
from blobstore.bench.own_daemon import OwnDaemon
from blobstore.clients import Client, KVLayout, Namespace
from blobstore.errors import BlobStoreError
from blobstore.units import GIB, MIB, format_size

DOCUMENT_TOKENS_MIN = 1500
MAX_TOKENS = 24
DRAM_BYTES = 160 * MIB
SSD_BYTES = 2 * GIB
FILLER_BYTES = 4 * MIB
KEPT = "durable"
"""What is put survives a crash."""

INSTRUCTION = "You work in the harbour office. Answer in one short sentence, from this book.\n\n"
FIRST = "What is the name of the ferry to Saint Brannoc?"
FOLLOW_UP = "On which channel does the lifeboat station listen?"
BRANCH = "Who is the harbour master?"

Origin = Literal["dram", "ssd", "rebuild"]
Say = Callable[[str], None]


class DemoFailed(BlobStoreError):
    """A step was not served as it should have been, or gave other tokens."""

    code = "demo_failed"


@dataclass(frozen=True, slots=True)
class Step:
    """One turn by a process that started from the store, beside the run that computed all."""

    name: str
    served_from: Origin
    turn: Turn
    cold: Turn

    @property
    def speed_up(self) -> float:
        """How much sooner the first token came."""
        return self.cold.first_token_s / self.turn.first_token_s

    def as_json(self) -> dict[str, Any]:
        """The step as plain values."""
        return {
            "name": self.name,
            "served_from": self.served_from,
            **asdict(self.turn),
            "cold_prefill_s": self.cold.first_token_s,
            "speed_up": self.speed_up,
            "tokens_equal": self.turn.tokens == self.cold.tokens,
        }


@dataclass(slots=True)
class Outcome:
    """What the demo showed."""

    machine: dict[str, Any]
    document_tokens: int
    cold: Turn
    steps: list[Step] = field(default_factory=list)

    def to_json(self) -> str:
        """Everything, as one JSON document."""
        body = {
            "machine": self.machine,
            "model": MODEL,
            "document_tokens": self.document_tokens,
            "cold": {
                "prompt_tokens": self.cold.prompt_tokens,
                "prefill_s": self.cold.first_token_s,
                "stored_blobs": self.cold.puts.get("stored", 0),
                "text": self.cold.text,
            },
            "steps": [step.as_json() for step in self.steps],
        }
        return json.dumps(body, indent=2)

    def print(self, console: Console) -> None:
        """The table that the demo ends with."""
        console.print(_table(self))


@dataclass(frozen=True, slots=True)
class _Asked:
    """A prompt, and the turn of the process that computed all of it."""

    ids: list[int]
    cold: Turn


class Demo:
    """The steps, in order, against one daemon."""

    def __init__(self, daemon: OwnDaemon, file: ModelFile, say: Say, layers: int = 0) -> None:
        self._daemon = daemon
        self._namespace = namespace(file.sizes, file.digest)
        self._say = say
        self._layers = layers
        self._chat = Chat(file)
        document = (resources.files("blobstore.bench") / "demo_document.txt").read_text("utf-8")
        self._opening: list[tuple[str, str | list[int]]] = [("system", INSTRUCTION + document)]
        self._document_tokens = len(self._chat.turn("system", document))
        assert self._document_tokens >= DOCUMENT_TOKENS_MIN

    def run(self) -> Outcome:
        """All steps; raises DemoFailed at the first that does not hold."""
        first, follow_up, branch = self._cold()
        outcome = Outcome(machine_facts(self._daemon.data), self._document_tokens, first)

        def step(name: str, served_from: Origin, asked: _Asked) -> None:
            turn = self._warm(name, asked.ids, served_from)
            self._check(name, turn, asked.cold)
            outcome.steps.append(Step(name, served_from, turn, asked.cold))

        step("a: second process, follow-up", "dram", follow_up)
        self._squeeze(follow_up.ids)
        step("b: DRAM squeezed", "ssd", follow_up)
        self._say("the daemon is killed (SIGKILL) and started again")
        self._daemon.kill()
        self._daemon.start()
        step("c: after the crash", "ssd", follow_up)
        step("d: branch, another question", "dram", branch)
        with self._only_text(follow_up.ids):
            step("e: rebuilt from text", "rebuild", follow_up)
        return outcome

    def _cold(self) -> tuple[Turn, _Asked, _Asked]:
        """The first turn, which is stored; and two that go on from it, to compare with."""
        opening = self._opening
        asked = [*opening, ("user", FIRST)]
        with self._engine("first process: reads the document cold, answers, stores") as engine:
            cold = self._compute(engine, self._chat.prompt(asked), store=KEPT)
            self._say(f"  {cold.prompt_tokens} tokens in {cold.first_token_s:.1f} s: {cold.text}")
            self._say("  and computes the later turns in full, to compare with")
            follow_up = [*asked, ("assistant", cold.tokens), ("user", FOLLOW_UP)]
            later = [
                self._chat.prompt(messages)
                for messages in (follow_up, [*opening, ("user", BRANCH)])
            ]
            one, other = (_Asked(ids, self._compute(engine, ids)) for ids in later)
        return cold, one, other

    def _compute(self, engine: EngineProcess, ids: list[int], *, store: str = "") -> Turn:
        return engine.answer(ids, MAX_TOKENS, restore=False, store=store)

    @contextmanager
    def _engine(self, what: str) -> Iterator[EngineProcess]:
        self._say(what)
        with EngineProcess(self._daemon.address, layers=self._layers) as engine:
            yield engine

    def _warm(self, name: str, ids: list[int], served_from: Origin) -> Turn:
        """A turn of a new process; the daemon's counters must show the tier and no other."""
        with self._engine(name) as engine, self._daemon.client() as kv:
            before = _hits(kv)
            turn = engine.answer(ids, MAX_TOKENS, restore=True, store=KEPT)
            hits = {tier: n - before.get(tier, 0) for tier, n in _hits(kv).items()}
        served = {tier: n for tier, n in hits.items() if n}
        if served != {served_from: turn.restored_blobs} or not turn.restored_blobs:
            raise DemoFailed(
                f"{name}: {turn.restored_blobs} blobs should have come from {served_from}, but the "
                f"daemon counted {served or 'none'}"
            )
        self._say(f"  {turn.restored_blobs} blobs from {served_from}: {turn.text}")
        return turn

    def _check(self, name: str, turn: Turn, cold: Turn) -> None:
        shared = (cold.prompt_tokens - 1) // CHUNK_TOKENS
        document = self._document_tokens // CHUNK_TOKENS
        if turn.tokens != cold.tokens:
            raise DemoFailed(
                f"{name}: tokens {turn.tokens} differ from {cold.tokens}, computed cold"
            )
        if not document <= turn.restored_blobs <= shared:
            raise DemoFailed(f"{name}: {turn.restored_blobs} blobs restored of {document} or more")

    @contextmanager
    def _only_text(self, ids: list[int]) -> Iterator[None]:
        """Drop the conversation's payloads, while another process can compute them again."""
        self._say("a model runner registers, and all payloads are dropped: only their text is left")
        rebuilder = RebuilderProcess(self._daemon.address, layers=self._layers)
        with rebuilder, self._daemon.client() as kv:
            ns = kv.namespace(self._namespace)
            keys = ns.keys(ids)
            kv.drop(ns, keys)
            if kv.match(ns, keys).blobs:
                raise DemoFailed("payloads were dropped, and are still held")
            yield

    def _squeeze(self, ids: list[int]) -> None:
        """A neighbour puts blobs until the conversation's have left DRAM."""
        with self._daemon.client() as kv:
            ns = kv.namespace(self._namespace)
            keys = ns.keys(ids)
            filler = kv.namespace(
                Namespace("neighbour", KVLayout.opaque(FILLER_BYTES), hash_scheme="demo")
            )
            for number in range(2 * DRAM_BYTES // FILLER_BYTES):
                with kv.put(filler, [number.to_bytes(8, "little")], retention="volatile") as writer:
                    writer[0][:1] = b"x"
                if "dram" not in kv.match(ns, keys).tiers:
                    filled = format_size((number + 1) * FILLER_BYTES)
                    self._say(f"a neighbour puts {filled}: the conversation leaves DRAM")
                    return
        raise DemoFailed(
            f"the conversation is still in DRAM after {2 * DRAM_BYTES} bytes of others"
        )


def run_demo(directory: Path, say: Say, *, layers: int = 0) -> Outcome:
    """Run the demo with a daemon in a temporary directory under `directory`.

    With `layers` only the model's first ones compute: it is quick then, and talks nonsense.

    Raises SetupError if the model is not installed, before anything is
    started; DemoFailed if a step does not hold. Nothing is left behind.
    """
    file = ModelFile(layers=layers)
    Chat(file)
    dram, ssd = format_size(DRAM_BYTES), format_size(SSD_BYTES)
    say(f"{MODEL}; a daemon with {dram} of DRAM and {ssd} on disk")
    with OwnDaemon(directory, dram_bytes=DRAM_BYTES, ssd_bytes=SSD_BYTES) as daemon:
        return Demo(daemon, file, say, layers).run()


def _hits(kv: Client) -> dict[str, int]:
    hits: dict[str, int] = counters(kv)["hit_blobs"]
    return hits


def _table(outcome: Outcome) -> Table:
    table = Table(title="every token equals that of a run that computed all", title_justify="left")
    for column in ("step", "from"):
        table.add_column(column)
    for column in (
        "prompt",
        "restored",
        "bytes",
        "cold prefill",
        "restore",
        "first token",
        "sooner",
    ):
        table.add_column(column, justify="right")
    cold = outcome.cold
    seconds = f"{cold.first_token_s:.2f} s"
    table.add_row(
        "first process", "computed", str(cold.prompt_tokens), *"--", seconds, "-", seconds
    )
    for step in outcome.steps:
        turn = step.turn
        table.add_row(
            step.name,
            step.served_from,
            str(turn.prompt_tokens),
            str(turn.restored_tokens),
            format_size(turn.restored_bytes),
            f"{step.cold.first_token_s:.2f} s",
            f"{1e3 * turn.restore_s:.1f} ms",
            f"{turn.first_token_s:.2f} s",
            f"{step.speed_up:.1f} x",
        )
    return table

"""Random requests through vLLM's own scheduler: what a request reads is what its tokens dictate.

Whatever happens to requests (preemption, aborts), to the engine's cache, to what is stored
(evictions) and to the daemon (frozen, killed, started again).
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blobstore.clients import Client
from blobstore.clients.vllm import breaker, saves, scheduler_side
from tests.support.daemon import Daemon, daemon
from tests.vllm.simulated_engine import VOCABULARY, SimulatedEngine, simulated
from tests.vllm.simulated_rank import CONTENT, HEADS, dictated, next_token

BLOB = 64
ACTIONS = 70


class Machine:
    """One engine, one daemon, and all that may happen to them."""

    def __init__(self, home: Path, seed: int, **options: Any) -> None:
        self.random = random.Random(seed)
        self._home = home
        self._serving = ExitStack()
        self._ending = ExitStack()
        self._daemon: Daemon | None = None
        self._frozen = False
        self.serve()
        assert self._daemon is not None
        self.engine: SimulatedEngine = self._ending.enter_context(
            simulated(home, self._daemon.address, **options)
        )
        self.stems: list[list[int]] = [self._tokens(200) for _ in range(3)]
        self._aborted: set[str] = set()
        self._n: int = 0

    def close(self) -> None:
        """End it all."""
        self.thaw()
        self._ending.close()
        self._serving.close()

    def serve(self) -> None:
        """A daemon at the same address, if there is none, with what is on its disk."""
        if self._daemon is None:
            policy = {"BLOBSTORE__TIERING__POLICY": "lru"}
            self._daemon = self._serving.enter_context(daemon(self._home, environ=policy))

    def kill(self) -> None:
        """The daemon is gone."""
        self._serving.close()
        self._daemon, self._frozen = None, False

    def freeze(self) -> None:
        """The daemon answers nothing from now on."""
        if self._daemon is not None:
            self._daemon.process.send_signal(signal.SIGSTOP)
            self._frozen = True

    def thaw(self) -> None:
        """It answers again."""
        if self._daemon is not None:
            self._daemon.process.send_signal(signal.SIGCONT)
        self._frozen = False

    def evict(self) -> None:
        """Some of what is stored goes."""
        names = list(self.engine.done)
        if not names or self._daemon is None or self._frozen:
            return
        request = self.engine.done[self.random.choice(names)]
        keys = self.engine.identity.keys(request.block_hashes)
        if keys:
            with Client(self._daemon.address, timeout_s=20.0) as kv:
                ns = kv.namespace(self.engine.identity.bound().namespace)
                kv.drop(ns, [keys[self.random.randrange(len(keys))]])

    def request(self) -> None:
        """A prompt that continues a known one, or begins anew; some are known to the letter."""
        stem = self.random.choice(self.stems)
        kept = self.random.choice([0, 20, 64, 128, 130, len(stem)])
        prompt = stem[:kept] + self._tokens(self.random.choice([1, 10, 64, 150]))
        if self.random.random() < 0.3:
            self.stems[self.random.randrange(3)] = prompt[:400]
        params = {"no_store": True} if self.random.random() < 0.1 else {}
        answer = self.random.choice([1, 5, 60, 200])
        self.engine.add(f"r{self._n}", prompt[:500], answer, **params)
        self._n += 1

    def crowd(self) -> None:
        """Requests that all fit in the beginning, and not in the end."""
        for _ in range(6):
            self.engine.add(f"r{self._n}", self.random.choice(self.stems)[:80], 150)
            self._n += 1

    def abort(self) -> None:
        """One of those that run or wait."""
        if self.engine.unfinished:
            name = self.random.choice(self.engine.unfinished)
            self._aborted.add(name)
            self.engine.abort(name)

    def steps(self) -> None:
        """Some of the engine's; some that load find it gone, or no daemon."""
        for _ in range(self.random.randrange(1, 12)):
            fault = self.random.choice([self.evict, self.evict, self.freeze, self.thaw])
            self.engine.step(fault if self.random.random() < 0.05 else None)

    def settle(self) -> None:
        """All is over and well again: what is stored now is loaded next."""
        self.thaw()
        self.serve()
        self.crowd()
        self.engine.run()
        before = self.engine.loads
        for turn in range(2):
            for at, stem in enumerate(self.stems):
                self.engine.add(f"last {turn} {at}", stem, 1)
            self.engine.run()
            self.engine.forget()
        assert self.engine.loads > before

    def check(self) -> None:
        """All is over: answers are right, no block is lost, and what is stored is right too."""
        for name, request in self.engine.done.items():
            tokens = list(request.all_token_ids)
            known = len(request.prompt_token_ids or ())
            assert len(tokens) > known or name in self._aborted
            for at in range(known, len(tokens)):
                assert tokens[at] == next_token(tokens[:at]), f"{name} answers wrongly"
        self.engine.check_all_free()
        self.check_store()

    def check_store(self) -> int:
        """Every blob is what its tokens dictate; how many there are."""
        layers, found = self.engine.identity.geometry.layout.n_layers, 0
        assert self._daemon is not None
        with Client(self._daemon.address, timeout_s=20.0) as kv:
            ns = kv.namespace(self.engine.identity.bound().namespace)
            for request in self.engine.done.values():
                facts = dictated(list(request.all_token_ids), layers)
                with kv.get(ns, self.engine.identity.keys(request.block_hashes)) as lease:
                    for number, payload in enumerate(lease):
                        held = np.frombuffer(payload, np.uint8)
                        held = held.reshape(layers, HEADS, BLOB, CONTENT)
                        wanted = facts[number * BLOB : (number + 1) * BLOB].transpose(1, 2, 0, 3)
                        assert np.array_equal(held, wanted), f"blob {number} is wrong"
                        found += 1
        return found

    def _tokens(self, n: int) -> list[int]:
        return [self.random.randrange(VOCABULARY) for _ in range(n)]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Machine]]:
    monkeypatch.setattr(breaker, "PAUSE_S", 0.01)  # an engine made of formulas is fast
    monkeypatch.setattr(breaker, "PAUSE_MAX_S", 0.04)
    monkeypatch.setattr(scheduler_side, "RETRY_S", 0.01)
    monkeypatch.setattr(saves, "PATIENCE_S", 0.2)  # and the machine may be busy
    with ExitStack() as ending:

        def made(seed: int, **options: Any) -> Machine:
            machine = Machine(tmp_path, seed, **options)
            ending.callback(machine.close)
            return machine

        yield made


ENGINES = pytest.mark.parametrize(
    "kind",
    [
        {"sliding": False, "ahead": False, "layerwise": False},
        {"sliding": False, "ahead": True, "layerwise": True},
        {"sliding": True, "ahead": True, "layerwise": False},
        {"sliding": True, "ahead": False, "layerwise": True},
        {"sliding": True, "ahead": True, "layerwise": False, "ranks": 2},
    ],
    ids=lambda kind: " ".join(name for name, yes in kind.items() if yes) or "plain",
)


@ENGINES
def test_a_prefix_comes_back(machine: Callable[..., Machine], kind: dict[str, Any]) -> None:
    """Nothing random: stored by one request, loaded by another when the engine forgot it."""
    one = machine(0, num_blocks=200, **kind)
    for n in range(20):  # a busy machine may be too late for the first ones
        one.engine.add(f"r{n}", one.stems[0], 5)
        one.engine.run()
        one.engine.forget()
        if one.engine.loads:
            break
    assert one.engine.loads == 1
    assert one.check_store() >= 3
    one.check()


@ENGINES
def test_anything(machine: Callable[..., Machine], kind: dict[str, Any]) -> None:
    one = machine(1, num_blocks=52, **kind)
    weighted: list[tuple[Callable[[], None], int]] = [
        (one.request, 12), (one.steps, 24), (one.abort, 2), (one.engine.forget, 5), (one.evict, 3),
        (one.crowd, 1), (one.freeze, 1), (one.thaw, 4), (one.kill, 1), (one.serve, 4),
    ]  # fmt: skip
    actions = [action for action, weight in weighted for _ in range(weight)]
    for _ in range(ACTIONS):
        one.random.choice(actions)()
    one.settle()
    one.check()
    assert one.engine.preemptions

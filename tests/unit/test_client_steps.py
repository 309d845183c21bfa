"""How operations are stepped, whatever performs the steps, and what an interruption leaves."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from blobstore.clients.runner import Runner
from blobstore.clients.steps import Call, Step, Work, stepped, stepped_async
from blobstore.errors import BlobStoreError, Busy
from blobstore.protocol import Leased, Ping, Request


class Interrupted(BaseException):
    """As KeyboardInterrupt is."""


def _sums(log: list[str]) -> Generator[int, Any, int]:
    """Adds up the outcomes of two steps; a fault of the first counts 100."""
    try:
        try:
            first = yield 1
        except BlobStoreError:
            first = 100
        return int(first + (yield 2))
    finally:
        log.append("over")


def _tenfold(step: int, call: Call) -> int:
    return step * 10


def _fails_first(step: int, call: Call) -> int:
    if step == 1:
        raise Busy("no")
    return step


def _interrupted_second(step: int, call: Call) -> int:
    if step == 2:
        raise Interrupted
    return step


def test_outcomes_go_back_in_and_the_result_comes_out() -> None:
    assert stepped(_sums([]), _tenfold, Call(1.0)) == 30


def test_faults_are_thrown_into_the_operation() -> None:
    assert stepped(_sums([]), _fails_first, Call(1.0)) == 102


def test_an_interruption_ends_the_operation_and_undoes_the_last_outcome() -> None:
    log: list[str] = []
    undone: list[int] = []
    operation = _sums(log)  # held: it ends by being closed, not by being collected
    with pytest.raises(Interrupted):
        stepped(operation, _interrupted_second, Call(1.0), undone.append)
    assert undone == [1]
    assert log == ["over"]


async def test_tasks_step_in_the_same_way() -> None:
    async def perform(step: int, call: Call) -> int:
        return _interrupted_second(step, call)

    async def tenfold(step: int, call: Call) -> int:
        return _tenfold(step, call)

    async def fails_first(step: int, call: Call) -> int:
        return _fails_first(step, call)

    assert await stepped_async(_sums([]), tenfold, Call(1.0)) == 30
    assert await stepped_async(_sums([]), fails_first, Call(1.0)) == 102
    log: list[str] = []
    operation = _sums(log)
    with pytest.raises(Interrupted):
        await stepped_async(operation, perform, Call(1.0))
    assert log == ["over"]


def test_what_a_reply_lent_goes_back_if_nobody_took_it(monkeypatch: pytest.MonkeyPatch) -> None:
    reply = Leased(7, b"", "", {})
    undone: list[object] = []

    class Link:
        def undo(self, reply: object) -> None:
            undone.append(reply)

    def operation() -> Generator[Step, Any, None]:
        yield Ping()
        raise Interrupted

    def perform(runner: Runner, step: Request | Work, call: Call) -> Leased:
        call.link = Link()  # type: ignore[assignment]
        return reply

    monkeypatch.setattr(Runner, "_perform", perform)
    with pytest.raises(Interrupted):
        Runner.run(object.__new__(Runner), operation(), Call(1.0))
    assert undone == [reply]

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from blobstore.errors import Busy
from blobstore.turns import Turns
from tests.support.simulation import Simulation


@pytest.fixture
def sim() -> Iterator[Simulation]:
    simulation = Simulation(seed=0)
    yield simulation
    simulation.close()


class Room:
    """Something scarce."""

    def __init__(self, sim: Simulation, waiting_max: int = 100) -> None:
        self.free = 0
        self.served: list[str] = []
        self.turns = Turns(sim.clock, waiting_max)
        self._sim = sim

    def ask(self, name: str, wanted: int, timeout_s: float) -> asyncio.Task[bool]:
        def attempt() -> bool:
            if self.free < wanted:
                return False
            self.free -= wanted
            self.served.append(name)
            return True

        return self._sim.start(self.turns.wait(attempt, self._sim.clock() + timeout_s))

    def give(self, n: int) -> None:
        self.free += n
        self.turns.notify()
        self._sim.loop.run_ready()


def test_who_finds_room_and_nobody_waiting_does_not_wait(sim: Simulation) -> None:
    room = Room(sim)
    room.give(1)
    assert room.ask("a", 1, 0.0).result()


def test_without_time_it_fails_at_once(sim: Simulation) -> None:
    room = Room(sim)
    assert not room.ask("a", 1, 0.0).result()
    assert len(room.turns) == 0


def test_small_requests_do_not_overtake_a_large_one(sim: Simulation) -> None:
    room = Room(sim)
    large, small = room.ask("large", 3, 10.0), room.ask("small", 1, 10.0)
    room.give(2)
    assert room.served == []
    room.give(2)
    assert room.served == ["large", "small"]
    assert large.result()
    assert small.result()


def test_nobody_overtakes_at_the_deadline_either(sim: Simulation) -> None:
    room = Room(sim)
    first, hasty = room.ask("first", 3, 10.0), room.ask("hasty", 1, 1.0)
    room.give(1)
    sim.advance(1.0)
    assert hasty.result() is False
    room.give(2)
    assert first.result() is True


def test_when_the_first_gives_up_the_next_tries(sim: Simulation) -> None:
    room = Room(sim)
    first, second = room.ask("first", 5, 1.0), room.ask("second", 1, 10.0)
    room.give(1)
    assert not second.done()
    sim.advance(1.0)
    assert first.result() is False
    assert second.result() is True


def test_cancelling_the_first_lets_the_next_try(sim: Simulation) -> None:
    room = Room(sim)
    first, second = room.ask("first", 1, 10.0), room.ask("second", 1, 10.0)
    first.cancel()
    room.give(1)
    assert second.result() is True
    assert room.served == ["second"]
    assert len(room.turns) == 0


def test_room_that_comes_at_the_deadline_or_later_is_not_taken(sim: Simulation) -> None:
    room = Room(sim)
    late = room.ask("late", 1, 1.0)
    sim.advance(1.0)
    room.give(1)
    assert late.result() is False
    assert room.free == 1


def test_more_than_the_bound_are_refused(sim: Simulation) -> None:
    room = Room(sim, waiting_max=2)
    waiting = [room.ask("a", 1, 1.0), room.ask("b", 1, 1.0)]
    with pytest.raises(Busy):
        room.ask("c", 1, 1.0).result()
    sim.advance(1.0)
    assert [task.result() for task in waiting] == [False, False]
    assert not room.ask("d", 1, 0.0).result()

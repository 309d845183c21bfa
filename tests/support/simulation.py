"""A store without threads and without time of its own: what runs next is decided by the test.

Work that the store hands to threads is kept as jobs, each of which the test runs
when it likes; timers follow a clock that moves only when told. So one seed gives
one run, and any interleaving of loop and threads can be had.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from tests.support.clock import FakeClock
from tests.support.sim_disk import PowerLost

T = TypeVar("T")

STEPS_MAX = 5_000
"""Of one `run`: more is a store that goes round in circles."""


class Jobs:
    """Work handed to threads and not done yet."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._waiting: dict[str, list[Callable[[], None]]] = {}
        self._workers: dict[str, int] = {}
        self.power_lost = False
        """A job found the power cut: nothing runs any more."""

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def pool(self, workers: int, name: str) -> ThreadPoolExecutor:
        """A pool whose work waits here, as many at once as it has workers."""
        self._workers[name] = workers
        return _Pool(self._waiting.setdefault(name, []), workers)

    def run_one(self, name: str = "") -> None:
        """Do one of the jobs that threads (of the pool `name`) might be doing now."""
        busy = sorted(pool for pool, jobs in self._waiting.items() if jobs)
        name = name or self._rng.choice(busy)
        jobs = self._waiting[name]
        # A pool starts its work in order, and ends it in any order.
        at = self._rng.randrange(min(len(jobs), self._workers[name]))
        try:
            jobs.pop(at)()
        except PowerLost:
            self.power_lost = True

    def forget(self) -> None:
        """The threads are gone, and what they would have done."""
        for jobs in self._waiting.values():
            jobs.clear()
        self.power_lost = False


class _Pool(ThreadPoolExecutor):
    """Of this class because a loop's default executor has to be."""

    def __init__(self, jobs: list[Callable[[], None]], workers: int) -> None:
        super().__init__(workers)
        self._jobs = jobs

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._jobs.append(job)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        while self._jobs:
            self._jobs.pop(0)()


class SimLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is the clock's, and which never waits."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self._clock = clock

    def time(self) -> float:
        return self._clock()

    def run_ready(self) -> None:
        """Run callbacks until none is ready."""
        for _ in range(STEPS_MAX):
            self.call_soon(self.stop)
            self.run_forever()
            if not self._is_busy():
                return
        raise AssertionError("the loop never comes to rest")

    def next_timer_s(self) -> float | None:
        """When the next timer is due."""
        due = [timer.when() for timer in self._timers() if not timer.cancelled()]
        return min(due, default=None)

    def _is_busy(self) -> bool:
        due_s = self.next_timer_s()
        ready: object = getattr(self, "_ready")  # noqa: B009 - unknown to type checkers
        return bool(ready) or (due_s is not None and due_s <= self.time())

    def _timers(self) -> list[asyncio.TimerHandle]:
        timers: list[asyncio.TimerHandle] = getattr(self, "_scheduled")  # noqa: B009
        return timers


class Simulation:
    """A loop, its clock and its jobs. Close it when done."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = FakeClock()
        self.wall_jump_s = 0.0
        self.loop = SimLoop(self.clock)
        self.jobs = Jobs(self.rng)
        self.loop.set_default_executor(self.jobs.pool(4, "default"))

    def wall_clock(self) -> float:
        """Wall time, which may be set to anything by `wall_jump_s`."""
        return 1.7e9 + self.clock() + self.wall_jump_s

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begin `work`; it goes on whenever the loop runs."""
        task = self.loop.create_task(work)
        self.loop.run_ready()
        return task

    def step(self) -> bool:
        """Let one thing happen that threads do; False if there is none."""
        if not self.jobs or self.jobs.power_lost:
            return False
        self.jobs.run_one()
        self.loop.run_ready()
        return True

    def rest(self) -> None:
        """Let threads do all that they have, while the clock stands still."""
        self.loop.run_ready()
        for _ in range(STEPS_MAX):
            if not self.step():
                return
        raise AssertionError("the store never comes to rest")

    def advance(self, seconds: float) -> None:
        """Let time pass, timer by timer; threads do nothing meanwhile."""
        end_s = self.clock() + seconds
        while True:
            due_s = self.loop.next_timer_s()
            if due_s is None or due_s > end_s:
                break
            self.clock.now_s = max(self.clock(), due_s)
            self.loop.run_ready()
        self.clock.now_s = end_s
        self.loop.run_ready()

    def finish(self, task: asyncio.Task[T]) -> T:
        """Let whatever has to happen happen until `task` is done: jobs first, then timers."""
        for _ in range(STEPS_MAX):
            if task.done():
                return task.result()
            if self.step():
                continue
            if self.jobs.power_lost:
                raise PowerLost
            due_s = self.loop.next_timer_s()
            assert due_s is not None, f"nothing will ever end {task!r}"
            self.advance(max(due_s - self.clock(), 0.0))
        raise AssertionError(f"no end of {task!r} in sight")

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Begin `work` and finish it."""
        return self.finish(self.start(work))

    def kill(self) -> None:
        """As if the process had died: tasks end, nothing they still want to do is done."""
        self.jobs.forget()
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_ready()
        self.jobs.forget()

    def close(self) -> None:
        """Close the loop; every task must have ended."""
        left = asyncio.all_tasks(self.loop)
        self.loop.close()
        assert not left, f"tasks left: {left}"

"""Bringing back what is not in DRAM: loaded from SSD, rebuilt from its text, or both at once.

Decides for the end of a chain that a get asks for and that DRAM does not hold, by the terms
of its namespace and by what is estimated to be faster, and waits for what a runner makes.
What it leaves to loads is loaded by whoever asked. Used on the event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING

from blobstore.index import NamespaceState, Record
from blobstore.loader import Loader
from blobstore.meeting import Meeting
from blobstore.rebuild_wait import Wait
from blobstore.rebuilds import Rebuilds
from blobstore.residency import Residency
from blobstore.texts import Texts
from blobstore.wanted import Wanted

if TYPE_CHECKING:
    from blobstore.text_entry import TextEntry

LATE = 4.0
"""Times what a rebuild was estimated to take, after which what is on SSD is loaded instead."""

LATE_S = 0.5
"""In any case a runner has so long, where there is time."""

FETCH_MARGIN = 1.5
"""Times what a load is estimated to take: so much time is left for it until the deadline."""

RUN_BLOBS_MAX = 4096
"""Of one get that are brought back before it is answered."""

AHEAD_MAX = 64
"""Contexts that are brought back at once before anyone asks for them."""

AHEAD_S = 600.0
AHEAD_PRIORITY = -1


@dataclass(slots=True, eq=False)
class Recalled:
    """What was brought back for one caller, who holds it until `wanted.release`."""

    wanted: Wanted
    why: str = ""
    """Why what is still missing did not come; empty if nobody tried."""


@dataclass(slots=True, eq=False)
class _Run:
    """The end of a chain that is to be brought back."""

    ns: NamespaceState
    keys: list[bytes]
    entries: list[TextEntry]
    cold: list[Record]
    """The leading ones: on SSD alone."""
    deadline_s: float
    priority: int
    wanted: Wanted = field(repr=False)
    forgotten: bool = False
    """Its end was cut off: the texts are to be forgotten."""

    def take(self, n: int) -> tuple[list[bytes], list[TextEntry]]:
        """The leading `n` blobs, which are not part of it any more: they are about to come."""
        taken = self.keys[:n], self.entries[:n]
        del self.keys[:n], self.entries[:n]
        return taken


class Recall:
    """Has missing blobs rebuilt, where that is possible and agreed on."""

    def __init__(
        self,
        residency: Residency,
        loader: Loader | None,
        texts: Texts,
        rebuilds: Rebuilds,
        clock: Callable[[], float],
    ) -> None:
        self._residency = residency
        self._loader = loader
        self._texts = texts
        self._rebuilds = rebuilds
        self._clock = clock
        self._awaited: dict[tuple[bytes, bytes], list[Wanted]] = {}
        """By namespace and key: who waits for a blob."""
        self._ahead: set[asyncio.Task[None]] = set()
        self._runs: set[_Run] = set()
        """That are being brought back."""
        self._n_forgotten = 0

    def never_loads(self, ns: NamespaceState) -> bool:
        """Gets are given what is in DRAM, and nothing else."""
        return self._texts.terms(ns).recall == "never"

    def possible(self, ns: NamespaceState) -> bool:
        """Blobs of the namespace may be rebuilt."""
        agreed = self._texts.terms(ns).recall not in ("fetch", "never")
        return agreed and self._rebuilds.possible(ns)

    async def bring(
        self,
        ns: NamespaceState,
        keys: Sequence[bytes],
        deadline_s: float,
        *,
        follow: bool = False,
        priority: int = 0,
        pins: bool = True,
    ) -> Recalled:
        """Bring back what a runner should make of a chain, until the clock reads `deadline_s`.

        With `pins` what is held of it, and what comes, is kept until `wanted.release`. With
        `follow` blobs that are being written count as held. Cancelling it leaves nothing behind.
        """
        wanted = Wanted(self._residency, ns, pins=pins)
        recalled = Recalled(wanted)
        try:
            run = await self._run(wanted, keys, deadline_s, follow, priority)
            if run is not None:
                self._runs.add(run)
                try:
                    recalled.why = await self._bring(run)
                finally:
                    self._runs.discard(run)
        except TimeoutError:
            recalled.why = "deadline"
        except BaseException:
            wanted.release()
            raise
        return recalled

    def bring_ahead(self, ns: NamespaceState, keys: Sequence[bytes]) -> bool:
        """Bring back a chain before it is asked for; whether that has begun."""
        if len(self._ahead) >= AHEAD_MAX or not self.possible(ns):
            return False
        task = asyncio.get_running_loop().create_task(self._bring_ahead(ns, keys))
        self._ahead.add(task)
        task.add_done_callback(self._ahead.discard)
        return True

    def shown(self, record: Record, rebuilt: bool) -> None:
        """A blob has become readable: those who wait for it hold it from now on."""
        for wanted in self._awaited.get((record.ns.id, record.key), ()):
            wanted.shown(record, rebuilt=rebuilt)

    def forget(self, ns: NamespaceState, keys: Container[bytes]) -> None:
        """Texts are to be forgotten: of those that were read already nothing is begun any more."""
        self._n_forgotten += 1
        for run in self._runs:
            if run.ns is ns:
                n = next((n for n, key in enumerate(run.keys) if key in keys), None)
                if n is not None:
                    del run.keys[n:], run.entries[n:]
                    run.forgotten = True

    async def close(self) -> None:
        """Give up what is brought ahead."""
        for task in self._ahead:
            task.cancel()
        await asyncio.gather(*self._ahead, return_exceptions=True)

    async def _bring_ahead(self, ns: NamespaceState, keys: Sequence[bytes]) -> None:
        deadline_s = self._clock() + AHEAD_S
        await self.bring(ns, keys, deadline_s, priority=AHEAD_PRIORITY, pins=False)

    async def _run(
        self,
        wanted: Wanted,
        keys: Sequence[bytes],
        deadline_s: float,
        follow: bool,
        priority: int,
    ) -> _Run | None:
        """What of a chain might be rebuilt; None: nothing, or its text is not known."""
        first = wanted.hold(keys, follow=follow)
        left_s = deadline_s - self._clock()
        if first == len(keys) or left_s <= 0:
            return None
        asked = list(keys[first : first + RUN_BLOBS_MAX])
        cold = wanted.cold(asked)
        if len(cold) == len(asked) and await self._is_loaded_sooner(wanted.ns, cold):
            return None  # as most often: without a look at texts
        told = await asyncio.wait_for(self._known(wanted.ns, asked), left_s)
        now = wanted.hold(keys, follow=follow)  # as it is by now
        entries = told[max(now - first, 0) :]
        if now < first or not entries:
            return None
        run = list(keys[now : now + len(entries)])
        cold = wanted.cold(run)
        if not cold:  # what comes after a damaged blob may be held
            run = list(takewhile(lambda key: not wanted.holds(key), run))
        return _Run(wanted.ns, run, entries[: len(run)], cold, deadline_s, priority, wanted)

    async def _known(self, ns: NamespaceState, keys: Sequence[bytes]) -> list[TextEntry]:
        """The texts of the leading keys, as far as they are known."""
        n_forgotten = self._n_forgotten
        n = await self._texts.known(ns, keys)
        told = await self._texts.chain(ns, keys[:n]) if n else ()
        if n_forgotten != self._n_forgotten:  # it may be some of these
            return await self._known(ns, keys)
        return _leading_run(keys, told, ns.namespace.tokens_per_blob)

    async def _bring(self, run: _Run) -> str:
        """Go the way that is chosen for `run`; why not all came."""
        way = await self._way(run)
        if way == "rebuild":
            return await self._rebuild(run, *run.take(len(run.keys)))
        if way == "both":
            await self._from_both_ends(run, *run.take(len(run.cold)))
            if not all(record.held for record in run.cold):
                return "corrupt"
        else:
            run.take(len(run.cold))  # loads bring these
        if not run.keys:
            return "no_text" if run.forgotten else ""
        if self._loader is not None:  # while a runner makes what comes after
            self._loader.begin([record for record in run.cold if record.cold], stream=False)
        return await self._rebuild(run, *run.take(len(run.keys)))

    async def _way(self, run: _Run) -> str:
        """How to bring back what is on SSD: "fetch", "rebuild" or "both"."""
        recall = self._texts.terms(run.ns).recall
        if not run.cold or self._loader is None or recall == "rebuild":
            return "rebuild"
        if recall == "both":
            return "both" if len(run.cold) > 1 else "fetch"
        return "fetch" if await self._is_loaded_sooner(run.ns, run.cold) else "rebuild"

    async def _is_loaded_sooner(self, ns: NamespaceState, cold: Sequence[Record]) -> bool:
        """Whether to load what is on SSD alone, where the faster way is to be taken."""
        if self._texts.terms(ns).recall != "fastest" or self._loader is None:
            return False
        position = (cold[0].depth - 1) * ns.namespace.tokens_per_blob
        n_tokens = sum(record.tokens for record in cold)
        rebuild_s = await self._rebuilds.estimate_s(ns, position, n_tokens)
        fetch_s = self._loader.estimate_s(sum(record.nbytes for record in cold))
        return rebuild_s is None or fetch_s <= rebuild_s

    async def _estimate_s(self, ns: NamespaceState, entries: Sequence[TextEntry]) -> float | None:
        n_tokens = sum(entry.n_tokens for entry in entries)
        return await self._rebuilds.estimate_s(ns, entries[0].position, n_tokens)

    async def _rebuild(self, run: _Run, keys: Sequence[bytes], entries: Sequence[TextEntry]) -> str:
        """Wait for a runner to make blobs; why not all came.

        What of them is on SSD is loaded if the runner is late.
        """
        asked = set(keys)
        cold = [record for record in run.cold if record.key in asked]
        late_s = await self._late_s(run, cold, entries)
        with _Awaiting(self._awaited, run.wanted, keys):
            waiting = self._rebuilds.begin(
                run.ns, keys, entries, deadline_s=run.deadline_s, priority=run.priority
            )
            del entries  # the jobs have them: those who wait for one keep none of their own
            waiting.ended.add_done_callback(run.wanted.wake)
            try:
                if cold and not await self._all_here(run, keys, waiting, late_s):
                    if len(cold) == len(keys) or self._loader is None or waiting.ended.done():
                        waiting.leave(cancelled=True)
                        return _why(waiting)
                    self._loader.begin([record for record in cold if record.cold], stream=False)
                if await self._all_here(run, keys, waiting, run.deadline_s):
                    return ""
                return _why(waiting)
            except BaseException:
                waiting.leave(cancelled=True)
                raise
            finally:
                waiting.leave()

    async def _late_s(
        self, run: _Run, cold: Sequence[Record], entries: Sequence[TextEntry]
    ) -> float:
        """When, at the latest, what is on SSD must be loaded, should no runner have made it."""
        if not cold or self._loader is None:
            return run.deadline_s
        now_s = self._clock()
        fetch_s = self._loader.estimate_s(sum(record.nbytes for record in cold))
        rebuild_s = await self._estimate_s(run.ns, entries)
        patience_s = (run.deadline_s - now_s) / 2
        if rebuild_s is not None:
            patience_s = max(LATE * rebuild_s, LATE_S)
        return min(now_s + patience_s, run.deadline_s - FETCH_MARGIN * fetch_s)

    async def _all_here(
        self, run: _Run, keys: Sequence[bytes], waiting: Wait, until_s: float
    ) -> bool:
        """Wait until all `keys` are readable, or never will be, or time is up; whether they are."""
        n = 0
        while (n := run.wanted.leading(keys, n)) < len(keys):
            left_s = until_s - self._clock()
            if waiting.ended.done() or left_s <= 0:
                return False
            with suppress(TimeoutError):
                await asyncio.wait_for(run.wanted.change(), left_s)
        return True

    async def _from_both_ends(
        self, run: _Run, keys: Sequence[bytes], entries: Sequence[TextEntry]
    ) -> None:
        """Have what is on SSD rebuilt from its front and load it from its back, until they meet."""
        assert self._loader is not None
        n = len(keys)
        estimate_s = await self._estimate_s(run.ns, entries)
        with _Awaiting(self._awaited, run.wanted, keys):
            waiting = self._rebuilds.begin(
                run.ns, keys, entries, deadline_s=run.deadline_s, priority=run.priority
            )
            del entries
            meeting = Meeting(
                run.cold, run.wanted, waiting, self._loader, self._clock,
                None if estimate_s is None else estimate_s / n,
            )  # fmt: skip
            waiting.ended.add_done_callback(run.wanted.wake)
            try:
                await meeting.met(run.deadline_s)
            except BaseException:
                waiting.leave(cancelled=True)
                raise
            waiting.leave(cancelled=run.wanted.leading(keys) == n)


class _Awaiting:
    """While it lasts, `wanted` is told of `keys` as they become readable."""

    def __init__(
        self,
        awaited: dict[tuple[bytes, bytes], list[Wanted]],
        wanted: Wanted,
        keys: Sequence[bytes],
    ) -> None:
        self._awaited = awaited
        self._wanted = wanted
        self._names = [(wanted.ns.id, key) for key in keys]

    def __enter__(self) -> None:
        for name in self._names:
            self._awaited.setdefault(name, []).append(self._wanted)

    def __exit__(self, *exc: object) -> None:
        for name in self._names:
            waiting = self._awaited[name]
            waiting.remove(self._wanted)
            if not waiting:
                del self._awaited[name]


def _leading_run(
    keys: Sequence[bytes], told: Sequence[TextEntry | None], tokens_per_blob: int
) -> list[TextEntry]:
    """The leading texts, as far as each continues the one before.

    Of keys that are no chain nothing must be made as if they were one: it would be wrong for
    all others who have them. Nothing continues a partial blob.
    """
    run: list[TextEntry] = []
    for at, entry in enumerate(told):
        if entry is None:
            break
        if run and (entry.parent != keys[at - 1] or run[-1].n_tokens != tokens_per_blob):
            break
        run.append(entry)
    return run


def _why(waiting: Wait) -> str:
    """Why what was waited for is not there."""
    return waiting.ended.result() if waiting.ended.done() else "deadline"

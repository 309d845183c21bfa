"""Keys in ascending order, so that a listing can go on after any key, held or not.

Sorted lists of bounded length: to add or to remove one moves a few KiB at most, and a
page is found without a look at the others. A key costs 8 bytes beside itself.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator

RUN_KEYS_MAX = 512
"""A run that grows beyond is cut in two."""


class KeyOrder:
    """A set of byte strings that knows what comes after each."""

    __slots__ = ("_lasts", "_runs")

    def __init__(self, keys: Iterable[bytes] = ()) -> None:
        """Of these different keys; quick if they come in order, or nearly so."""
        ordered = sorted(keys)
        size = RUN_KEYS_MAX // 2
        self._runs = [ordered[at : at + size] for at in range(0, len(ordered), size)]
        self._lasts = [run[-1] for run in self._runs]

    def __len__(self) -> int:
        return sum(map(len, self._runs))

    def add(self, key: bytes) -> None:
        """Count in `key`, which is not here yet."""
        runs, lasts = self._runs, self._lasts
        at = bisect_left(lasts, key)
        if at == len(runs):  # the greatest so far
            if not runs:
                runs.append([])
                lasts.append(key)
            at = len(runs) - 1
            lasts[at] = key
        run = runs[at]
        insort(run, key)
        if len(run) > RUN_KEYS_MAX:
            self._cut(at)

    def discard(self, key: bytes) -> None:
        """Count out `key`, if it is here."""
        at = bisect_left(self._lasts, key)
        if at == len(self._runs):
            return
        run = self._runs[at]
        where = bisect_left(run, key)
        if run[where] != key:
            return
        del run[where]
        if run:
            self._lasts[at] = run[-1]
        else:
            del self._runs[at], self._lasts[at]

    def after(self, key: bytes) -> Iterator[bytes]:
        """All keys greater than `key`, ascending. Nothing may change while it is read."""
        at = bisect_right(self._lasts, key)
        for number in range(at, len(self._runs)):
            run = self._runs[number]
            start = bisect_right(run, key) if number == at else 0
            yield from run[start:] if start else run

    def _cut(self, at: int) -> None:
        run = self._runs[at]
        half = len(run) // 2
        self._runs[at : at + 1] = [run[:half], run[half:]]
        self._lasts[at : at + 1] = [run[half - 1], run[-1]]

"""Several contestants, taken in turns.

What `pairs` does for a measurement and its limit: all alternate in one loop, so
that a machine that slows down does so for all of them, and each goes first as often
as every other. Ratios are medians over rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from blobstore.bench.pairs import Pairs

Turn = Callable[[], Mapping[str, float]]
"""Does the work of one round; the seconds of each operation by its name."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """The seconds of each round, by contestant and operation."""

    seconds: Mapping[str, Mapping[str, tuple[float, ...]]]

    def median_s(self, name: str, operation: str) -> float | None:
        """The median of an operation; None if this contestant does not have it."""
        taken_s = self.seconds.get(name, {}).get(operation)
        return statistics.median(taken_s) if taken_s else None

    def pairs(self, ours: tuple[str, str], theirs: tuple[str, str]) -> Pairs:
        """One contestant's operation beside another's, as a measurement and its limit."""
        measured, limit = (self.seconds[name][operation] for name, operation in (ours, theirs))
        ratios = tuple(best / own for own, best in zip(measured, limit, strict=True))
        return Pairs(measured, limit, ratios)


def take_turns(turns: Mapping[str, Turn], n_rounds: int, *, warm_up: int = 1) -> Rounds:
    """Let all take `n_rounds` turns each, after `warm_up` rounds that are not recorded."""
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in turns}
    for number in range(-warm_up, n_rounds):
        for name in _order(list(turns), number):
            for operation, taken_s in turns[name]().items():
                if number >= 0:
                    seconds[name].setdefault(operation, []).append(taken_s)
    return Rounds(
        {
            name: {operation: tuple(all_s) for operation, all_s in operations.items()}
            for name, operations in seconds.items()
        }
    )


def _order(names: list[str], number: int) -> list[str]:
    """Each in turn is the first; the direction changes when all have been."""
    cycle, first = divmod(number, len(names))
    order = names[first:] + names[:first]
    return order[::-1] if cycle % 2 else order

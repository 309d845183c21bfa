"""How long it takes to write a tier full once: about as long as it keeps what is not used."""

from __future__ import annotations

from collections import deque

_STEPS = 64
"""Per turn: the time is known to 1/64."""

_LEAST = 1 / 16
"""Share of a turn that must have been seen before the whole is guessed from it."""


class Turnover:
    """Counts the bytes that go into a tier of `capacity_bytes`."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._written_bytes = 0
        self._marks: deque[tuple[float, int]] = deque()
        """When so many bytes had been written, at steps; the last turn and one before it."""

    def note(self, nbytes: int, now_s: float) -> None:
        """`nbytes` are written."""
        marks = self._marks
        if not marks:
            marks.append((now_s, 0))
        if now_s < marks[-1][0]:  # the clock jumped back: what is known of the past moves along
            ahead_s = marks[-1][0] - now_s
            self._marks = marks = deque((at_s - ahead_s, n) for at_s, n in marks)
        self._written_bytes += nbytes
        if self._written_bytes - marks[-1][1] >= self._capacity_bytes / _STEPS:
            marks.append((now_s, self._written_bytes))
            while len(marks) > 1 and marks[1][1] <= self._written_bytes - self._capacity_bytes:
                marks.popleft()

    def take_back(self, nbytes: int) -> None:
        """`nbytes` that were noted have not been written."""
        self._written_bytes -= nbytes

    def turn_s(self, now_s: float) -> float:
        """How long the last turn took, or would take as things go; infinite if that is unknown."""
        if not self._marks:
            return float("inf")
        start_s, start_bytes = self._marks[0]
        seen_bytes = self._written_bytes - start_bytes
        if seen_bytes < self._capacity_bytes * _LEAST or now_s <= start_s:
            return float("inf")
        return (now_s - start_s) * self._capacity_bytes / seen_bytes

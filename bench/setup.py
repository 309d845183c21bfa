"""How a benchmark is asked for: where its data goes, and how large it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from blobstore.bench.machine import memory_available_bytes
from blobstore.errors import NotEnough
from blobstore.units import format_size

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Setup:
    """One run of one benchmark.

    `tiny` sizes show that it works, not how fast: caches hold them.
    """

    directory: Path
    tiny: bool
    say: Callable[[str], None]

    def scale(self, full: T, tiny: T) -> T:
        """`full`, or `tiny` if so asked."""
        return tiny if self.tiny else full

    def need_memory(self, nbytes: int) -> None:
        """Raise NotEnough, with both numbers, unless `nbytes` of memory are free."""
        available = memory_available_bytes()
        if nbytes > available:
            raise NotEnough(
                f"this benchmark needs {format_size(nbytes)} of memory, available are "
                f"{format_size(available)}: stop other programs, or use --tiny for a smaller one"
            )

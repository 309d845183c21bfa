"""Keeping the two ends of a socket on different cores.

Left to itself, the scheduler sometimes runs both ends on one core, where a wake-up
costs a tenth of what it costs across cores, and changes its mind within a run. A
round trip and its limit can only be compared if both are treated alike.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def apart(*servers: int) -> Iterator[None]:
    """Keep this thread on one core and the main threads of `servers` (pids) on another.

    Does nothing where there is one core only.
    """
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        yield
        return
    ours, theirs, *_ = sorted(allowed)
    try:
        os.sched_setaffinity(0, {ours})
        for pid in servers:
            os.sched_setaffinity(pid, {theirs})
        yield
    finally:
        for pid in (0, *servers):
            os.sched_setaffinity(pid, allowed)

"""When each block of a trace is used next: what only a replay can know."""

from __future__ import annotations

from array import array
from bisect import bisect_right

import numpy as np

from blobstore.bench.trace import Trace


class Future:
    """The future of one replay, as it goes on: `go_on` with each request, then ask."""

    def __init__(self, trace: Trace) -> None:
        self.never = len(trace.requests)
        """The number of no request: of what is not used again."""
        lengths = np.array([len(request.blocks) for request in trace.requests], np.int64)
        blocks = np.concatenate(
            [np.asarray(request.blocks, np.int32) for request in trace.requests]
        )
        requests = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        order = np.argsort(blocks, kind="stable")
        starts = np.cumsum(np.bincount(blocks, minlength=trace.n_blocks))
        self._uses = array("i", requests[order].tobytes())
        self._starts = [0, *starts.tolist()]
        self._at = -1

    def go_on(self) -> None:
        """The next request is served: now is while it is."""
        self._at += 1

    def next_use(self, block: int) -> int:
        """The number of the next request that uses `block`, or `never`."""
        end = self._starts[block + 1]
        at = bisect_right(self._uses, self._at, self._starts[block], end)
        return self._uses[at] if at < end else self.never

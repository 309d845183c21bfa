"""Moving bytes of any address and length through files that want aligned I/O.

Goes by steps of a megabyte: with four threads in flight that is a fifth faster
than one call for 16 MiB, since the kernel pins the memory of one step while the
disk works on another (measured). Steps are of equal length, and fit one request.
What is not aligned passes through a small buffer of the thread's own; an aligned
view with an odd end passes only its last block that way, in the same call.
"""

from __future__ import annotations

import mmap
import threading

import numpy as np

from blobstore.tiering.disk import BLOCK_BYTES, Disk, Handle

STEP_BYTES = 254 * BLOCK_BYTES
"""The most pages, where no two lie together, that one request to a virtio disk takes
(max_segments; of 127 to an NVMe disk it is two): one more page would be a request of its own."""

_ZEROS = bytes(BLOCK_BYTES)


class _Bounce(threading.local):
    """An aligned buffer of one step per thread; goes with the thread."""

    def __init__(self) -> None:
        self.view = memoryview(mmap.mmap(-1, STEP_BYTES))


_bounce = _Bounce()


def write(disk: Disk, handle: Handle, offset: int, data: memoryview) -> None:
    """Write `data` at `offset`, a multiple of BLOCK_BYTES; a direct handle fills the
    last block with zeros.

    Raises OSError; the range is then undefined.
    """
    aligned = _is_aligned(data)
    step_bytes = _step_bytes(data.nbytes)
    for start in range(0, data.nbytes, step_bytes):
        step = data[start : start + step_bytes]
        if not handle.direct:
            disk.pwritev(handle, (step,), offset + start)
            continue
        whole = step.nbytes - step.nbytes % BLOCK_BYTES if aligned else 0
        views = [step[:whole]] if whole else []
        if whole < step.nbytes:
            views.append(_padded(step[whole:]))
        disk.pwritev(handle, views, offset + start)


def read(disk: Disk, handle: Handle, offset: int, into: memoryview) -> None:
    """Fill `into` from `offset`, a multiple of BLOCK_BYTES; its last block must be in the file.

    Raises OSError; `into` is then undefined.
    """
    aligned = _is_aligned(into)
    step_bytes = _step_bytes(into.nbytes)
    for start in range(0, into.nbytes, step_bytes):
        step = into[start : start + step_bytes]
        if not handle.direct:
            disk.preadv(handle, (step,), offset + start)
            continue
        whole = step.nbytes - step.nbytes % BLOCK_BYTES if aligned else 0
        views = [step[:whole]] if whole else []
        rest = step[whole:]
        if rest.nbytes:
            bounce = _bounce.view[: -(-rest.nbytes // BLOCK_BYTES) * BLOCK_BYTES]
            views.append(bounce)
        disk.preadv(handle, views, offset + start)
        if rest.nbytes:
            rest[:] = bounce[: rest.nbytes]


def _step_bytes(nbytes: int) -> int:
    """Steps of equal length, in whole blocks."""
    n_steps = max(1, -(-nbytes // STEP_BYTES))
    return max(BLOCK_BYTES, -(-nbytes // (n_steps * BLOCK_BYTES)) * BLOCK_BYTES)


def _padded(rest: memoryview) -> memoryview:
    n = rest.nbytes
    padded = _bounce.view[: -(-n // BLOCK_BYTES) * BLOCK_BYTES]
    padded[:n] = rest
    padded[n:] = _ZEROS[: padded.nbytes - n]
    return padded


def _is_aligned(view: memoryview) -> bool:
    if view.nbytes == 0:
        return True
    return np.frombuffer(view, np.uint8).ctypes.data % BLOCK_BYTES == 0

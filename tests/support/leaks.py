"""Finds what a test leaves behind: threads, descriptors, names in /dev/shm, children, tasks.

What existed before the test is allowed, whoever made it; what is on its way
out (a joined pool's last thread, a reaped child) gets a bounded grace.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing.resource_tracker
import os
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.polling import poll_until, poll_until_async

GRACE_S = 3.0
_SHM = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Belongings:
    """What this process has at one moment."""

    threads: frozenset[threading.Thread]
    descriptors: frozenset[tuple[int, str]]
    shm_names: frozenset[str]
    children: frozenset[int]

    @classmethod
    def now(cls) -> Belongings:
        return cls(
            frozenset(t for t in threading.enumerate() if t.is_alive()),
            frozenset(_descriptors()),
            frozenset(_shm_names()),
            frozenset(_children()),
        )

    def gained_since(self, before: Belongings) -> list[str]:
        """What is here and was not before, a line each."""
        tracker = multiprocessing.resource_tracker._resource_tracker
        # Multiprocessing starts it once per process and keeps it until the end.
        kept_fd, kept_pid = getattr(tracker, "_fd", None), getattr(tracker, "_pid", None)
        return [
            *(f"thread {t.name}" for t in self.threads - before.threads),
            *(
                f"descriptor {fd} -> {target}"
                for fd, target in sorted(self.descriptors - before.descriptors)
                if fd != kept_fd
            ),
            *(
                f"/dev/shm/{name}"
                for name in sorted(self.shm_names - before.shm_names)
                if not _in_foreign_use(_SHM / name)
            ),
            *(
                f"child process {pid}"
                for pid in sorted(self.children - before.children)
                if pid != kept_pid
            ),
        ]


@contextmanager
def no_leaks() -> Iterator[None]:
    """Fails the test if the block leaves anything of this process behind."""
    before = Belongings.now()
    yield
    if not (suspects := set(Belongings.now().gained_since(before))):
        return
    gc.collect()  # cycles may hold the last reference to a socket or a mapping

    def left() -> list[str]:
        # What was not there at first came from other programs on this machine.
        return [item for item in Belongings.now().gained_since(before) if item in suspects]

    with suppress(AssertionError):
        poll_until(lambda: not left(), GRACE_S)
    if gained := left():
        pytest.fail("the test left behind: " + "; ".join(gained), pytrace=False)


@asynccontextmanager
async def no_leaked_tasks() -> AsyncIterator[None]:
    """Fails the test if the block leaves tasks on the running loop."""
    before = asyncio.all_tasks()
    yield
    me = asyncio.current_task()

    def gained() -> set[asyncio.Task[object]]:
        return asyncio.all_tasks() - before - {me}

    with suppress(AssertionError):
        await poll_until_async(lambda: not gained(), GRACE_S)
    if left := gained():
        names = "; ".join(sorted(f"{t.get_name()} {t.get_coro()!r}" for t in left))
        for task in left:
            task.cancel()
        pytest.fail(f"the test left tasks behind: {names}", pytrace=False)


def _shm_names() -> Iterator[str]:
    """Segments of shared memory. A directory is somebody's temporary files, not a segment."""
    if _SHM.is_dir():
        yield from (entry.name for entry in os.scandir(_SHM) if entry.is_file())


def _descriptors() -> Iterator[tuple[int, str]]:
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own descriptor is gone again
            yield int(name), os.readlink(f"/proc/self/fd/{name}")


def _children() -> Iterator[int]:
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):
            listed = Path(f"/proc/self/task/{thread}/children").read_text()
            yield from map(int, listed.split())


def _in_foreign_use(path: Path) -> bool:
    """Whether a process that is neither this one nor below it has it open or mapped.

    "It" may be a file in a directory of that name. Then it is another program's on the
    same machine, and not ours to judge.
    """
    traces = {str(path), _as_mapped(path)}
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or _descends_from_us(int(entry)):
            continue
        with suppress(OSError):
            maps = Path(f"/proc/{entry}/maps").read_text()
            if any(trace in maps for trace in traces):
                return True
        with suppress(OSError):
            for fd in os.listdir(f"/proc/{entry}/fd"):
                with suppress(OSError):
                    target = Path(os.readlink(f"/proc/{entry}/fd/{fd}"))
                    if target == path or path in target.parents:
                        return True
    return False


def _as_mapped(path: Path) -> str:
    """Device and inode as /proc/…/maps shows them: a semaphore was created under another name."""
    try:
        found = path.stat()
    except OSError:
        return str(path)
    return f" {os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x} {found.st_ino} "


def _descends_from_us(pid: int) -> bool:
    while pid > 1:
        if pid == os.getpid():
            return True
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return False
        pid = int(stat.rpartition(")")[2].split()[1])
    return False

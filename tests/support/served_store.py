"""A real store behind a real local door, on a loop in a thread of this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import uvloop

from blobstore.local_door import LocalDoor
from blobstore.settings import StoreSettings
from blobstore.store import Store
from blobstore.units import MIB

T = TypeVar("T")

START_S = 20.0


class ServedStore:
    """The store that answers at `path`."""

    def __init__(self, path: Path, store: Store, loop: asyncio.AbstractEventLoop) -> None:
        self.path = path
        self.store = store
        self._loop = loop

    @property
    def address(self) -> str:
        """What a client is given."""
        return f"unix:{self.path}"

    def call(self, function: Callable[[Store], T]) -> T:
        """Call `function` where the store lives."""
        answer: Future[T] = Future()

        def called() -> None:
            try:
                answer.set_result(function(self.store))
            except BaseException as error:
                answer.set_exception(error)

        self._loop.call_soon_threadsafe(called)
        return answer.result(START_S)


@contextmanager
def served_store(path: Path, *, ssd_bytes: int = 64 * MIB) -> Iterator[ServedStore]:
    """The store, open; its data is beside `path`."""
    opened: Future[tuple[ServedStore, asyncio.Event]] = Future()

    async def serve() -> None:
        settings = StoreSettings(path.parent / "data", 16 * MIB, ssd_bytes=ssd_bytes)
        store = await Store.open(settings)
        door = LocalDoor(store, path)
        await door.start()
        done = asyncio.Event()
        opened.set_result((ServedStore(path, store, asyncio.get_running_loop()), done))
        await done.wait()
        await door.close(0.0)
        await store.close()

    def run() -> None:
        try:
            uvloop.run(serve())
        except BaseException as error:
            if opened.done():
                raise
            opened.set_exception(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        served, done = opened.result(START_S)
        try:
            yield served
        finally:
            served.call(lambda store: done.set())
    finally:
        thread.join(START_S)

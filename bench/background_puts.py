"""Puts that go on while something else is measured."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

from blobstore.bench.blobs import key_chain, opaque, require
from blobstore.bench.raw_copy import Bytes
from blobstore.clients import Client
from blobstore.keys import Keys

PAUSE_S = 0.05
"""Between two puts: a few hundred megabytes per second of 16 MiB blobs, as workers send them."""


class BackgroundPuts:
    """A thread that puts new blobs, each a copy of `payload`, until it is closed.

    They are dropped then.
    """

    def __init__(self, kv: Client, payload: Bytes) -> None:
        self._kv = kv
        self._payload = payload
        self._ns = kv.namespace(opaque("background", payload.nbytes))
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._run, name="background puts")
        self._error: BaseException | None = None
        self.done = 0
        """Blobs stored so far."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._enough.set()
        self._thread.join()
        for number in range(self.done):
            self._kv.drop(self._ns, self._keys(number))
        if self._error is not None and error is None:
            raise self._error

    def _keys(self, number: int) -> Keys:
        return key_chain(f"background-{number}", 1)

    def _run(self) -> None:
        try:
            while not self._enough.wait(PAUSE_S):
                keys = self._keys(self.done)
                results = self._kv.put_from(self._ns, keys, [self._payload])
                require(results == ["stored"], "puts went on")
                self.done += 1
        except BaseException as error:  # the thread's end is where it is raised
            self._error = error

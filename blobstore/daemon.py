"""The daemon's process: what is claimed, opened, announced and drained, in which order.

The store and its doors do the work. This module owns the process around them:
signals, the socket's place, limits and the log.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from blobstore.config import Config
from blobstore.errors import SetupError
from blobstore.latencies import Latencies
from blobstore.local_door import LocalDoor
from blobstore.pid_file import pid_file
from blobstore.settings import StoreSettings
from blobstore.sizing import settings_for
from blobstore.store import Store
from blobstore.units import format_size

if TYPE_CHECKING:
    from blobstore.http.door import DoorTerms, HttpDoor

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
FLUSH_S_MIN = 1.0
"""Granted to dirty blobs even if requests in flight have used up the drain limit."""
_PRIVATE = 0o077
"""umask: what the daemon creates is its own user's alone."""


def run(config: Config, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT, then drain.

    `announce` gets the socket's address once clients may connect. Raises
    SetupError (or another typed error) if the daemon cannot start as asked;
    nothing is left behind then.
    """
    settings = settings_for(config)
    os.umask(_PRIVATE)
    _prepare(settings.data_dir)
    _raise_descriptor_limit()
    with pid_file(config.local.socket):
        http = _http_terms(config)
        uvloop.run(_serve(config, settings, http, announce))


def _http_terms(config: Config) -> DoorTerms | None:
    """How the HTTP door is set up, or None if it is off."""
    http = config.http
    if not http.listen:
        return None
    # Here: a daemon without the door does without its libraries.
    from blobstore.http.door import DoorTerms
    from blobstore.http.listen import split_address, tls_context
    from blobstore.http.tokens import load as load_tokens

    return DoorTerms(
        listen=split_address(http.listen),
        tokens=load_tokens(config.store.data, http.tokens),
        tls=tls_context(http.tls_cert, http.tls_key),
        hosts=http.hosts,
        connections_max=http.max_connections,
        io_timeout_s=http.io_timeout_s,
    )


def _prepare(data_dir: Path) -> None:
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SetupError(
            f"cannot create the data directory {data_dir}: {error.strerror}: give --data a "
            "directory that this user may create"
        ) from error
    if not os.access(data_dir, os.R_OK | os.W_OK | os.X_OK):
        raise SetupError(
            f"the data directory {data_dir} is not writable for user {os.geteuid()}: "
            "change its owner, or give --data another one"
        )


def _raise_descriptor_limit() -> None:
    """Clients cost descriptors: use all that the hard limit grants."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class _Stop:
    """The first SIGTERM or SIGINT asks for a drain, the second to hurry, a third kills.

    Made once there is something to drain: before that, one signal ends the process.
    """

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.hurry = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._signalled)

    def _signalled(self) -> None:
        if not self.asked.is_set():
            self.asked.set()
            return
        self.hurry.set()
        for number in SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)


async def _serve(
    config: Config, settings: StoreSettings, http: DoorTerms | None, announce: Callable[[str], None]
) -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    store = await Store.open(settings)
    gc.freeze()  # the index is here to stay: no collection need walk it on the loop
    stop = _Stop()
    local = config.local
    # Only the HTTP door shows them.
    latencies = Latencies() if http is not None else None
    door = LocalDoor(
        store,
        local.socket,
        uids=local.uids,
        connections_max=local.max_connections,
        latencies=latencies,
    )
    second = _http_door(store, http, latencies, door) if http is not None else None
    doors: list[LocalDoor | HttpDoor] = [door] if second is None else [door, second]
    try:
        for each in doors:
            await each.start()
        ssd = format_size(settings.ssd_bytes) if settings.ssd_bytes else "off"
        log.info(
            "pid %d, dram %s, ssd %s, data in %s",
            *(os.getpid(), format_size(settings.dram_bytes), ssd, settings.data_dir),
        )
        if second is not None:
            announce(second.address)
        announce(f"unix:{local.socket}")
        await stop.asked.wait()
        log.info("draining for up to %g s; signal again to stop at once", config.times.drain_s)
    finally:
        await _drain(store, doors, config.times.drain_s, stop.hurry)
    log.info("stopped")


def _http_door(
    store: Store, terms: DoorTerms, latencies: Latencies | None, local: LocalDoor
) -> HttpDoor:
    from blobstore.http import door

    counted = {"local": lambda: local.n_connections}
    return door.HttpDoor(store, terms, latencies=latencies, connections=counted)


async def _drain(
    store: Store, doors: Sequence[LocalDoor | HttpDoor], drain_s: float, hurry: asyncio.Event
) -> None:
    """Refuse new requests, finish those in flight, flush, close; at once if `hurry` is set."""
    closing = asyncio.ensure_future(_close(store, doors, drain_s))
    hurried = asyncio.ensure_future(hurry.wait())
    await asyncio.wait({closing, hurried}, return_when=asyncio.FIRST_COMPLETED)
    hurried.cancel()
    if closing.done():
        await closing
        return
    closing.cancel()
    await asyncio.wait({closing})
    await _close_doors(doors, drain_s=0.0)
    await store.close(drain_s=0.0)


async def _close(store: Store, doors: Sequence[LocalDoor | HttpDoor], drain_s: float) -> None:
    loop = asyncio.get_running_loop()
    end_s = loop.time() + drain_s
    await _close_doors(doors, drain_s)
    await store.close(drain_s=max(FLUSH_S_MIN, end_s - loop.time()))


async def _close_doors(doors: Sequence[LocalDoor | HttpDoor], drain_s: float) -> None:
    await asyncio.gather(*(door.close(drain_s=drain_s) for door in doors))

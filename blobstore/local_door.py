"""The local socket: frames in, replies out, the arena's descriptors to those who may have it.

One trust domain: the daemon's own uid, root, and a configured list. A process is known
by its pid and start time; when its pidfd says that it has exited, all that it
held comes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
import struct
from collections.abc import Iterable
from pathlib import Path

from blobstore import protocol
from blobstore.connection import NOT_A_MESSAGE, Connection
from blobstore.errors import BlobStoreError, Busy, ProtocolError, SetupError
from blobstore.holder import Holder
from blobstore.latencies import Latencies
from blobstore.store import Store
from blobstore.transports import framing

HANDSHAKE_S = 5.0
HELLO_BYTES_MAX = 4096
DRAIN_POLL_S = 0.01
LAST_REPLY_S = 0.5
"""Granted to clients that are to read their last reply."""
BACKLOG = 256
_UCRED = struct.Struct("3i")

log = logging.getLogger(__name__)


class LocalDoor:
    """Serves one store on one Unix socket."""

    def __init__(
        self,
        store: Store,
        path: Path,
        *,
        uids: Iterable[int] = (),
        connections_max: int = 4096,
        latencies: Latencies | None = None,
    ) -> None:
        self._store = store
        self._latencies = latencies
        self._path = path
        self._allowed_uids = {0, os.getuid(), *uids}
        # Peer credentials decide who is served; the mode need only let those try.
        self._mode = 0o666 if self._allowed_uids - {0, os.getuid()} else 0o600
        self._connections_max = connections_max
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._handshakes: set[asyncio.Task[None]] = set()
        self._connections: set[Connection] = set()
        self._pidfds: dict[Holder, int] = {}

    @property
    def n_connections(self) -> int:
        """Open connections."""
        return len(self._connections)

    async def start(self) -> None:
        """Bind and serve. Raises SetupError if a daemon serves there or the path cannot be had.

        A socket that nobody serves any more is replaced.
        """
        self._listener = _bind(self._path, self._mode)
        self._accepting = asyncio.get_running_loop().create_task(self._accept_forever())

    async def close(self, drain_s: float = 5.0) -> None:
        """Refuse new connections and requests, let those in flight end for `drain_s`, close all.

        A put is in flight from its reservation to its seal.
        """
        if self._accepting is not None:
            for task in (self._accepting, *self._handshakes):
                task.cancel()
            await asyncio.gather(self._accepting, *self._handshakes, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
            with contextlib.suppress(OSError):
                self._path.unlink()
        for connection in self._connections:
            connection.drain()
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + drain_s
        # Reservations end in many places: a look now and then is simpler than a call from each.
        while self._in_flight() and loop.time() < deadline_s:  # noqa: ASYNC110
            await asyncio.sleep(DRAIN_POLL_S)
        connections = list(self._connections)
        if connections:
            for connection in connections:
                connection.finish()
            await asyncio.wait([c.lost for c in connections], timeout=LAST_REPLY_S)
        for connection in connections:
            connection.close()
        await asyncio.gather(*[connection.lost for connection in connections])
        for holder in list(self._pidfds):
            self._forget(holder)

    def _in_flight(self) -> bool:
        return self._store.writers.count > 0 or any(c.tasks for c in self._connections)

    async def _accept_forever(self) -> None:
        loop = asyncio.get_running_loop()
        assert self._listener is not None
        while True:
            try:
                peer, _ = await loop.sock_accept(self._listener)
            except OSError as error:  # out of descriptors, most likely
                log.warning("cannot accept a connection: %s", error)
                await asyncio.sleep(0.1)
                continue
            if len(self._connections) + len(self._handshakes) >= self._connections_max:
                peer.setblocking(False)
                _refuse(peer, Busy(f"{self._connections_max} connections are open, the most"))
                continue
            task = loop.create_task(self._welcome(peer))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _welcome(self, peer: socket.socket) -> None:
        try:
            peer.setblocking(False)
            request_id, hello = await asyncio.wait_for(_read_hello(peer), HANDSHAKE_S)
            holder = self._admit(peer, hello)
        except BlobStoreError as error:
            _refuse(peer, error)
            return
        except (OSError, TimeoutError, ValueError):
            peer.close()
            return
        except BaseException:  # cancelled
            peer.close()
            raise
        connection = Connection(self._store, holder, self._lost, self._latencies)
        try:
            _send_arena(peer, self._store, request_id, connection.connection_id)
            await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, peer)
        except OSError:
            peer.close()
            self._store.detach(holder, [])
            self._forget_if_idle(holder)
            return
        self._connections.add(connection)

    def _admit(self, peer: socket.socket, hello: protocol.Hello) -> Holder:
        if hello.version != protocol.VERSION:
            raise ProtocolError(
                f"this daemon speaks version {protocol.VERSION} of the protocol, "
                f"the client {hello.version}: use the same release on both sides"
            )
        pid, uid, _ = _UCRED.unpack(
            peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        )
        if uid not in self._allowed_uids:
            raise SetupError(f"uid {uid} is not allowed here: add it to local.uids")
        pidfd = _open_pidfd(pid)
        try:
            token = (pid, _start_time(pid))
            holder = self._store.attach(token, pid=pid, name=hello.client[:80])
        except BaseException:
            os.close(pidfd)
            raise
        if holder in self._pidfds:
            os.close(pidfd)
        else:
            self._pidfds[holder] = pidfd
            asyncio.get_running_loop().add_reader(pidfd, self._exited, holder)
        return holder

    def _exited(self, holder: Holder) -> None:
        for connection in [c for c in self._connections if c.holder is holder]:
            connection.close()
        self._forget(holder)

    def _lost(self, connection: Connection) -> None:
        """A connection ended; its process may live on."""
        self._connections.discard(connection)
        holder = connection.holder
        self._store.detach(holder, connection.reservation_ids)
        self._forget_if_idle(holder)

    def _forget_if_idle(self, holder: Holder) -> None:
        if not (holder.connections or holder.leases or holder.reservations or holder.kept):
            self._forget(holder)

    def _forget(self, holder: Holder) -> None:
        pidfd = self._pidfds.pop(holder, None)
        if pidfd is not None:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)
            self._store.gone(holder)


def _bind(path: Path, mode: int) -> socket.socket:
    if path.exists():
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise SetupError(f"{path} exists and is not a socket: choose another --socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(path))
            except OSError:
                path.unlink()  # left by a daemon that was killed
            else:
                raise SetupError(f"a daemon serves {path} already: choose another --socket")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        mask = os.umask(0o777 & ~mode)
        try:
            listener.bind(str(path))
        finally:
            os.umask(mask)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise SetupError(
            f"cannot listen on {path}: {error.strerror or error} (the directory must exist and be "
            "writable, the path at most 107 bytes long)"
        ) from error
    listener.setblocking(False)
    return listener


async def _read_hello(peer: socket.socket) -> tuple[int, protocol.Hello]:
    loop = asyncio.get_running_loop()
    reader = framing.FrameReader(HELLO_BYTES_MAX)
    while True:
        data = await loop.sock_recv(peer, HELLO_BYTES_MAX)
        if not data:
            raise ConnectionResetError
        for request_id, _, body in reader.feed(data):
            try:
                request = protocol.decode_request(body)
            except NOT_A_MESSAGE as error:
                raise ProtocolError(f"not a message of the protocol: {error}") from error
            if not isinstance(request, protocol.Hello):
                raise ProtocolError("the first frame of a connection must be Hello")
            return request_id, request


def _send_arena(peer: socket.socket, store: Store, request_id: int, connection_id: int) -> None:
    welcome = protocol.Welcome(
        protocol.VERSION,
        store.boot_id,
        store.arena.nbytes,
        framing.MAX_BODY_BYTES,
        store.settings.lent_quota_bytes,
        connection_id,
    )
    frame = framing.pack(request_id, store.boot_id, protocol.encode(welcome))
    # The socket's buffer is empty, so that this neither blocks nor falls short.
    socket.send_fds(peer, [frame], [store.arena.read_only_fd, store.arena.fd])


def _refuse(peer: socket.socket, error: BlobStoreError) -> None:
    with contextlib.suppress(OSError), peer:
        peer.send(framing.pack(0, 0, protocol.encode(protocol.Failed(error.code, str(error)))))


def _open_pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        raise SetupError(
            f"process {pid} is not visible to the daemon ({error.strerror}): "
            "they must share a pid namespace"
        ) from error


def _start_time(pid: int) -> int:
    """When the process started, in clock ticks since boot: with the pid it names one process."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return int(fields[19])

"""One connection to a daemon, frame by frame: it says whatever a test wants, right or wrong."""

from __future__ import annotations

import mmap
import os
import socket
from pathlib import Path
from types import TracebackType
from typing import Self

from blobstore.protocol import VERSION, AnyReply, Hello, Request, Welcome, decode_reply, encode
from blobstore.transports.framing import FrameReader, pack

Heard = tuple[int, int, AnyReply]
"""Request id, boot id, reply."""


class HungUp(ConnectionError):
    """The daemon closed the connection."""


class RawClient:
    """A socket that is connected, and greeted unless `greet` is false."""

    def __init__(self, path: Path, *, greet: bool = True, timeout_s: float = 10.0) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(timeout_s)
        self.sock.connect(os.fspath(path))
        self.boot_id = 0
        self._fds: list[int] = []
        self._reader = FrameReader()
        self._heard: list[Heard] = []
        self._next_id = 1
        if greet:
            self._greet()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket and the arena's descriptors; mappings stay."""
        self.sock.close()
        while self._fds:
            os.close(self._fds.pop())

    def send(self, data: bytes) -> None:
        """Send bytes as they are; HungUp if nobody reads them any more."""
        try:
            self.sock.sendall(data)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise HungUp(str(error)) from error

    def frame(self, request: Request, request_id: int | None = None) -> bytes:
        """One right frame."""
        if request_id is None:
            request_id, self._next_id = self._next_id, self._next_id + 1
        return pack(request_id, self.boot_id, encode(request))

    def ask(self, request: Request) -> AnyReply:
        """Send a request; the next reply."""
        self.send(self.frame(request))
        return self.hear()[2]

    def hear(self) -> Heard:
        """The next frame. Raises HungUp, or TimeoutError if nothing comes."""
        while not self._heard:
            try:
                data = self.sock.recv(1 << 16)
            except ConnectionResetError as error:
                raise HungUp(str(error)) from error
            if not data:
                raise HungUp
            self._take_in(data)
        return self._heard.pop(0)

    def arena(self) -> mmap.mmap:
        """The arena, mapped for reading."""
        return mmap.mmap(self._fds[0], self.welcome.arena_bytes, prot=mmap.PROT_READ)

    def _greet(self) -> None:
        self.send(self.frame(Hello(VERSION, "raw")))
        data, self._fds, _, _ = socket.recv_fds(self.sock, 1 << 12, 2)
        self._take_in(data)
        _, self.boot_id, reply = self.hear()
        assert isinstance(reply, Welcome), reply
        self.welcome = reply

    def _take_in(self, data: bytes) -> None:
        self._heard += [
            (request_id, boot_id, decode_reply(body))
            for request_id, boot_id, body in self._reader.feed(data)
        ]

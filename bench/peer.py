"""A store that `bench peers` measures: what each one implements.

A peer owns its server, a real process, and one client of it in this process.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Payload = bytes | memoryview | Bytes


@dataclass(frozen=True, slots=True)
class Room:
    """What a peer is started for."""

    directory: Path
    """On a disk, for those that need one."""
    held_bytes: int
    """How much it has to hold at once, without evicting anything."""
    memory: tuple[Bytes, ...]
    """All that is put from and got into: some transports register it first."""


class Peer(Protocol):
    """A store that keeps blobs by key. All calls are synchronous, from one thread."""

    name: str

    @property
    def how(self) -> str:
        """The versions, the transport and the calls that are measured, for the reader."""

    def missing(self) -> str:
        """What is not installed and how to get it, in a line; "" if all is here."""

    def start(self, room: Room) -> None:
        """Start the server and connect. If it raises, `stop` cleans up."""

    def put(self, keys: Sequence[bytes], sources: Sequence[Bytes]) -> None:
        """Store each source under its key; stored when it returns."""

    def get(self, keys: Sequence[bytes], targets: Sequence[Bytes]) -> Sequence[Payload]:
        """A copy of the bytes under each key: in `targets`, or in memory of the peer's making."""

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys are held, each for itself; [] if the peer cannot tell."""

    def remove(self, keys: Sequence[bytes]) -> None:
        """Give the room of these blobs back. Never measured."""

    def stop(self) -> None:
        """Disconnect and end the server and all its processes. May be called at any time."""


@runtime_checkable
class Lends(Protocol):
    """A peer that has a second form of get as well, which copies nothing."""

    def lease(self, keys: Sequence[bytes]) -> AbstractContextManager[Sequence[Payload]]:
        """The bytes under each key, in place, until the block ends."""


def find_package(name: str) -> bool:
    """Whether a Python package is installed; does not import it."""
    return find_spec(name) is not None


def find_program(name: str) -> str:
    """A program beside this Python or on PATH; "" if there is none."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.is_file() else shutil.which(name) or ""


def view(payload: Payload) -> memoryview:
    """The bytes of a payload, whatever holds them."""
    return payload.data if isinstance(payload, np.ndarray) else memoryview(payload)

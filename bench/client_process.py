"""A client process that works for a given time and counts what it did.

Reads one command per line (`work SECONDS`), answers each with the number of
calls it finished in that time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from blobstore.bench.blobs import key_chain, opaque
from blobstore.bench.raw_copy import caller_buffers
from blobstore.clients import Client
from blobstore.units import MIB

BLOB_BYTES = 4 * MIB
BLOBS = 16
MATCHED = 100

Kind = str
KINDS: tuple[Kind, ...] = ("match", "get_into", "put")


class ClientProcesses:
    """`n` client processes of one kind, started by the `with` block and ended by its end."""

    def __init__(self, address: str, kind: Kind, n: int) -> None:
        self._commands = [
            [sys.executable, "-m", "blobstore.bench.client_process", address, kind, str(number)]
            for number in range(n)
        ]
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        for command in self._commands:
            self._processes.append(
                subprocess.Popen(  # noqa: S603 (our own module)
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            )
        for process in self._processes:
            _read_line(process)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()

    def work(self, n: int, seconds: float) -> int:
        """Let the first `n` work at once for `seconds`; the calls that they finished together."""
        working = self._processes[:n]
        for process in working:
            assert process.stdin is not None
            process.stdin.write(f"work {seconds}\n")
            process.stdin.flush()
        return sum(int(_read_line(process)) for process in working)


def _read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise ChildProcessError(f"a client process ended with code {process.wait()}")
    return line


def main(address: str, kind: Kind, number: str) -> None:
    """Do the work that standard input asks for."""
    with Client(address, timeout_s=60.0) as kv:
        call = _calls(kv, number)[kind]
        call()
        _say("ready")
        for line in sys.stdin:
            deadline_s = time.monotonic() + float(line.split()[1])
            done = 0
            while time.monotonic() < deadline_s:
                call()
                done += 1
            _say(str(done))


def _calls(kv: Client, number: str) -> dict[Kind, Callable[[], object]]:
    ns = kv.namespace(opaque("clients", BLOB_BYTES))
    keys = key_chain("clients", BLOBS)
    target = caller_buffers(BLOBS, BLOB_BYTES)
    asked = key_chain("clients", MATCHED)

    def put() -> Sequence[str]:
        fresh = key_chain(f"clients-{number}-{os.urandom(8).hex()}", 4)
        results = kv.put_from(ns, fresh, target[: len(fresh)])
        kv.drop(ns, fresh)
        return list(results)

    return {
        "match": lambda: kv.match(ns, asked),
        "get_into": lambda: kv.get_into(ns, keys, target),
        "put": put,
    }


def _say(word: str) -> None:
    sys.stdout.write(word + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])

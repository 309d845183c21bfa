"""`blobstore get`: one blob to a file, or to standard output."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blobstore.cli.ask import reached
from blobstore.cli.naming import Model, Revision, described, named
from blobstore.cli.options import ConfigFile, Json, Socket, Timeout, configured
from blobstore.cli.output import console, print_json
from blobstore.cli.transfer import STANDARD, client, pace, save, target
from blobstore.errors import BY_CODE, BlobStoreError, InvalidRequest, Retryable

if TYPE_CHECKING:
    from blobstore.namespace import Namespace

Words = Annotated[
    list[str],
    typer.Argument(
        metavar="NAMESPACE KEY",
        help="A namespace id in hex, or its first 8 or more digits (not with --model), then a "
        "key in hex.",
        show_default=False,
    ),
]


def get(
    words: Words,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="Where to; - is standard output.")
    ] = "",
    model: Model = None,
    revision: Revision = None,
    socket: Socket = None,
    config: ConfigFile = None,
    timeout_s: Timeout = 60.0,
    as_json: Json = False,
) -> None:
    """Write one blob to a file, or to standard output (exits 1 if it is not held).

    A file that is there is replaced once all is written. Without --output the bytes go to
    standard output, unless that is a terminal.

    \b
    Examples:
      blobstore get 3f2a9c1b 9c0d51... -o cache.bin
      blobstore get --model llama 9c0d51... | zstd > cache.zst
    """
    name, keys = named(words, model, revision)
    if keys.n != 1:
        raise InvalidRequest(f"{keys.n} keys: get takes one at a time")
    to = _to(output, as_json=as_json)
    path = configured(config, socket=socket).local.socket
    with reached(path, timeout_s) as daemon:
        found = described(daemon, name.find(daemon, keys))
    nbytes, tier, seconds = _read(path, timeout_s, found["encoding"], keys.packed, to)
    if as_json:
        facts = {"namespace": found["id"], "key": keys.packed, "output": to, "tier": tier}
        print_json(facts | {"nbytes": nbytes, "seconds": seconds})
    elif to != STANDARD:
        console().print(f"{to}: {pace(nbytes, seconds)} from {tier}", markup=False)


def _to(output: str, *, as_json: bool) -> str:
    if not output and sys.stdout.isatty():
        raise InvalidRequest("bytes would garble the terminal: name a file with --output")
    if as_json and output in ("", STANDARD):
        raise InvalidRequest("--json and the bytes cannot share standard output: give --output")
    return output or STANDARD


def _read(
    path: Path, timeout_s: float, encoding: bytes, key: bytes, to: str
) -> tuple[int, str, float]:
    """Copy it there; how many bytes, from which tier, and in what time."""
    from blobstore.namespace import Namespace

    ns = Namespace.decode(encoding)
    with client(path, timeout_s) as kv:
        bound, started_s = kv.namespace(ns), time.monotonic()
        with kv.get(bound, [key]) as lease:
            if not lease:
                raise _miss(lease.reason, ns, key)
            with target(to) as file, lease[0] as payload:
                try:
                    save(payload, file)
                except BrokenPipeError:
                    _nobody_reads()
                nbytes = payload.nbytes
            tier = next(iter(lease.served), "")
    return nbytes, tier, time.monotonic() - started_s


def _miss(reason: str, ns: Namespace, key: bytes) -> BlobStoreError:
    where = f"{key.hex()} in namespace {ns.id.hex()[:12]}"
    kind = BY_CODE.get(reason, BlobStoreError)
    if issubclass(kind, Retryable):
        return kind(f"{where} was not given: {_LATER.get(reason, reason)}")
    return BlobStoreError(f"miss: no {where} ({reason})")


_LATER = {
    "deadline": "it took too long: give --timeout more seconds",
    "unavailable": "the daemon went away",
}


def _nobody_reads() -> None:
    """Who read standard output has enough. Python must not try to flush the rest at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise typer.Exit(1)

"""`blobstore pin`: keep blobs from eviction for a time."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from blobstore.cli.ask import reached
from blobstore.cli.naming import KeyWords, Model, Revision, named
from blobstore.cli.options import ConfigFile, Json, Socket, Timeout, configured
from blobstore.cli.output import console, duration, print_json
from blobstore.errors import BlobStoreError, InvalidRequest
from blobstore.protocol import Done, Pin

_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def pin(
    words: KeyWords,
    ttl: Annotated[
        str, typer.Option("--ttl", metavar="TIME", help="30m, 2h, 7d, or seconds; 0 ends it.")
    ] = "1h",
    model: Model = None,
    revision: Revision = None,
    socket: Socket = None,
    config: ConfigFile = None,
    timeout_s: Timeout = 5.0,
    as_json: Json = False,
) -> None:
    """Keep blobs that are held from eviction, and what they continue (exits 1 if none is held).

    Pinning again counts from now. Pins end with the daemon.

    \b
    Examples:
      blobstore pin 3f2a9c1b 9c0d51... --ttl 2h
      blobstore pin --model llama --ttl 0 - < keys.txt
    """
    ttl_s = _seconds(ttl)
    name, keys = named(words, model, revision)
    path = configured(config, socket=socket).local.socket
    with reached(path, timeout_s) as daemon:
        ns_id = name.find(daemon, keys)
        count = daemon.ask(Pin(ns_id, keys.packed, keys.key_bytes, ttl_s), Done).count
    if as_json:
        print_json({"namespace": ns_id, "keys": keys.n, "count": count, "ttl_s": ttl_s})
        raise typer.Exit(0 if count else 1)
    if not count:
        raise BlobStoreError(f"nothing was pinned: none of {keys.n:,} keys is held")
    done = f"pinned for {duration(ttl_s)}" if ttl_s else "pinned no longer"
    console().print(f"{count:,} of {keys.n:,} {done}")


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)(s|m|min|h|d)?", text, re.ASCII)
    if found is None:
        raise InvalidRequest(f"not a time: {text[:40]!r} (examples: 30m, 2h, 7d, 90)")
    return float(found[1]) * _SECONDS[found[2] or ""]

"""`blobstore supersede`: say that one context goes on as another."""

from __future__ import annotations

import typer

from blobstore.cli.ask import reached
from blobstore.cli.naming import KeyWords, Model, Revision, named
from blobstore.cli.options import ConfigFile, Json, Socket, Timeout, configured
from blobstore.cli.output import console, print_json
from blobstore.errors import BlobStoreError, InvalidRequest
from blobstore.protocol import Done, Exists, Held, Supersede


def supersede(
    words: KeyWords,
    model: Model = None,
    revision: Revision = None,
    socket: Socket = None,
    config: ConfigFile = None,
    timeout_s: Timeout = 5.0,
    as_json: Json = False,
) -> None:
    """Say that a context goes on as another: name the last blob of the old, then of the new.

    What only the old one has leaves first from now on, after a grace period; nothing is
    dropped, and a use takes it back. Exits 1 if either is not held, or nothing is the old one's
    alone.

    \b
    Examples:
      blobstore supersede 3f2a9c1b 9c0d51... 77ab02...
      blobstore supersede --model llama 9c0d51... 77ab02...
    """
    name, keys = named(words, model, revision)
    if keys.n != 2:
        raise InvalidRequest(
            f"name two keys, the old context's last one and the new's: {keys.n} given"
        )
    old, new = keys.first, keys.packed[keys.key_bytes :]
    path = configured(config, socket=socket).local.socket
    with reached(path, timeout_s) as daemon:
        ns_id = name.find(daemon, keys)
        held = daemon.ask(Exists(ns_id, keys.packed, keys.key_bytes), Held).held
        count = daemon.ask(Supersede(ns_id, old, new), Done).count
    if as_json:
        print_json({"namespace": ns_id, "old_leaf": old, "new_leaf": new, "count": count})
        raise typer.Exit(0 if count else 1)
    if not count:
        raise BlobStoreError(f"nothing was superseded: {_why(*held)}")
    blobs = "1 blob" if count == 1 else f"{count:,} blobs"
    console().print(f"{blobs} of the old context leave first from now on")


def _why(old_held: int, new_held: int) -> str:
    if not old_held:
        return "the old context's last blob is not held"
    if not new_held:
        return "the new context's last blob is not held"
    return "others go on from the old context, or end where it does"

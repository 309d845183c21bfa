"""`blobstore rm`: drop blobs, and erase what is known of their tokens."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from blobstore.cli.ask import reached
from blobstore.cli.naming import KeyWords, Model, Revision, named
from blobstore.cli.options import ConfigFile, Json, Socket, Timeout, configured
from blobstore.cli.output import console, print_json
from blobstore.errors import BlobStoreError, InvalidRequest
from blobstore.protocol import Done, Drop, Exists, Forget, Held, Keyed


class Tier(StrEnum):
    """Where only a copy is given up."""

    DRAM = "dram"


def rm(
    words: KeyWords,
    tier: Annotated[
        Tier | None,
        typer.Option("--tier", help="Free only this copy of blobs that are on disk too."),
    ] = None,
    forget: Annotated[
        bool,
        typer.Option("--forget", help="Erase also what is known of their tokens, for good."),
    ] = False,
    model: Model = None,
    revision: Revision = None,
    socket: Socket = None,
    config: ConfigFile = None,
    timeout_s: Timeout = 30.0,
    as_json: Json = False,
) -> None:
    """Drop blobs and all that continue them, without asking (exits 1 if none was held).

    Those under a lease go when it ends; a pin keeps none. With --tier dram, blobs stay, and
    are read from disk the next time; pinned ones stay in memory too. Without --forget, a model
    runner can make again what was put with its token ids.

    \b
    Examples:
      blobstore rm 3f2a9c1b 9c0d51...
      blobstore rm --model llama --tier dram - < keys.txt
      blobstore rm --forget 3f2a9c1b 9c0d51...
    """
    if forget and tier:
        raise InvalidRequest("--forget leaves nothing: give it without --tier")
    name, keys = named(words, model, revision)
    path = configured(config, socket=socket).local.socket
    with reached(path, timeout_s) as daemon:
        ns_id = name.find(daemon, keys)
        held = daemon.ask(Exists(ns_id, keys.packed, keys.key_bytes), Held).held
        wanted: Keyed = Drop(ns_id, keys.packed, keys.key_bytes, tier.value if tier else "")
        if forget:
            wanted = Forget(ns_id, keys.packed, keys.key_bytes)
        count = daemon.ask(wanted, Done).count
    n_held = sum(held)
    if as_json:
        body = {"namespace": ns_id, "keys": keys.n, "held": n_held, "count": count}
        print_json(body | {"tier": tier.value if tier else None, "forget": forget})
        raise typer.Exit(0 if count else 1)
    if not count:
        raise BlobStoreError(_nothing(keys.n, n_held))
    out = console()
    if forget:
        out.print(f"forgot {count:,} {'blob' if count == 1 else 'blobs'}, and their tokens")
        return
    if tier:
        out.print(f"freed {count:,} of {keys.n:,} in {tier.value}: they are on disk")
        return
    out.print(f"dropped {count:,} {'blob' if count == 1 else 'blobs'}", end="")
    more = count - n_held
    out.print(f": {n_held:,} named, {more:,} that continued them" if more > 0 else "")
    if n_held < keys.n:
        out.print(f"{keys.n - n_held:,} of the keys were not held")


def _nothing(n: int, n_held: int) -> str:
    if not n_held:
        return f"nothing was dropped: none of {n:,} keys is held" if n > 1 else "it is not held"
    return "nothing was freed: no copy in dram that is on disk too and that nobody holds"

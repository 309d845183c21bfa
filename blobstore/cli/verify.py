"""`blobstore verify`: have the daemon read everything back."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console

from blobstore.cli.ask import ask
from blobstore.cli.options import ConfigFile, Json, Socket, configured
from blobstore.cli.output import console, duration, print_json
from blobstore.protocol import Report, Verify
from blobstore.units import format_size

TIMEOUT_MAX_S = 3600.0
"""The daemon grants no longer to any request."""

ANSWER_S = 30.0
"""For the one blob that it is reading when the time is up."""


def verify(
    socket: Socket = None,
    config: ConfigFile = None,
    timeout_s: Annotated[
        float,
        typer.Option(
            "--timeout", metavar="SECONDS", min=0.001, max=TIMEOUT_MAX_S, help="Read no longer."
        ),
    ] = TIMEOUT_MAX_S,
    as_json: Json = False,
) -> None:
    """Read every copy of every blob and check its digests.

    Corrupt copies are put aside and never returned. Exits 1 if anything was corrupt
    or unreadable, or if there was no time to read all.
    """
    started_s = time.monotonic()
    waiting = Console(stderr=True).status("reading every blob back")
    path = configured(config, socket=socket).local.socket
    with waiting:
        body = ask(path, Verify(timeout_s), Report, timeout_s + ANSWER_S).body
    if as_json:
        print_json(body)
    else:
        _show(body, time.monotonic() - started_s)
    sound = body["complete"] and not body["corrupt"] and not body["unreadable"]
    raise typer.Exit(0 if sound else 1)


def _show(body: Mapping[str, Any], took_s: float) -> None:
    out = console()
    out.print(
        f"{body['blobs']:,} blobs in {body['copies']:,} copies, {format_size(body['bytes'])} "
        f"read in {duration(took_s)}"
    )
    for bad in body["corrupt"]:  # lines, since ids that are broken by a table cannot be copied
        print(f"corrupt, put aside: {bad['namespace']} {bad['key']} ({bad['tier']})")
    for bad in body["unreadable"]:
        print(f"unreadable: {bad['key']} ({bad['error']})")
    if not body["complete"]:
        out.print("[yellow]stopped early:[/] give --timeout more seconds to read the rest")
    elif not (body["corrupt"] or body["unreadable"]):
        out.print("[green]all good[/]")

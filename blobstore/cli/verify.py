"""`blobstore verify`: have the daemon read everything back."""

from __future__ import annotations

import typer
from rich.console import Console

from blobstore.cli.options import ConfigFile, Json, Socket, Timeout, connected
from blobstore.cli.output import console, print_json, table
from blobstore.cli.stats import leaves, shown


def verify(
    socket: Socket = None,
    config: ConfigFile = None,
    timeout_s: Timeout = 3600.0,
    as_json: Json = False,
) -> None:
    """Read every blob of every tier and check its digests; exits 1 if any is corrupt."""
    with (
        connected(config, socket, timeout_s) as client,
        Console(stderr=True).status("reading every blob back"),
    ):
        body = client.verify(timeout_s=timeout_s)
    if as_json:
        print_json(body)
    else:
        rows = [(name, shown(name, value)) for name, value in leaves(body)]
        console().print(table("verify", ("name", ">value"), rows))
    raise typer.Exit(1 if body.get("corrupt") else 0)

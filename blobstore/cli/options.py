"""Options that several commands share, and what they mean for the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blobstore.config import Config, load
from blobstore.errors import InvalidRequest

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", envvar="BLOBSTORE_CONFIG", help="A TOML file."),
]
DataDir = Annotated[
    str | None, typer.Option("--data", metavar="DIR", help="Where the tier on disk lives.")
]
Socket = Annotated[
    str | None, typer.Option("--socket", metavar="PATH", help="The daemon's Unix socket.")
]
Http = Annotated[
    str | None, typer.Option("--http", metavar="HOST:PORT", help="Serve HTTP there; off without.")
]
Dram = Annotated[
    str | None, typer.Option("--dram", metavar="SIZE", help="Shared memory: 4GiB, or auto.")
]
Ssd = Annotated[
    str | None, typer.Option("--ssd", metavar="SIZE", help="Bound on disk: 500GB, auto, or off.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Timeout = Annotated[
    float, typer.Option("--timeout", metavar="SECONDS", min=0.001, help="Wait no longer.")
]


def configured(
    file: Path | None,
    *,
    data: str | None = None,
    socket: str | None = None,
    dram: str | None = None,
    ssd: str | None = None,
    http: str | None = None,
) -> Config:
    """The effective configuration under these options."""
    if socket is not None and socket.startswith(("http:", "https:")):
        raise InvalidRequest(
            f"--socket {socket}: the command line reaches a daemon by its Unix socket; over HTTP "
            "use curl, or Client of blobstore.clients"
        )
    flags = {
        "store.data": data,
        "local.socket": socket,
        "http.listen": http,
        "dram.size": dram,
        "ssd.size": ssd,
    }
    return load(file, flags=flags)

"""`blobstore stat`: the daemon at a glance, or one blob."""

from __future__ import annotations

from blobstore.cli.options import ConfigFile, Json, Socket, Timeout, connected


def stat(
    socket: Socket = None,
    config: ConfigFile = None,
    timeout_s: Timeout = 5.0,
    as_json: Json = False,
) -> None:
    """todo"""
    with connected(config, socket, timeout_s) as client:
        client.stats()

"""`blobstore serve`: run the daemon in the foreground."""

from __future__ import annotations

import logging
import sys

from blobstore.cli.options import ConfigFile, DataDir, Dram, Http, Socket, Ssd, configured


def serve(
    data: DataDir = None,
    socket: Socket = None,
    http: Http = None,
    dram: Dram = None,
    ssd: Ssd = None,
    config: ConfigFile = None,
) -> None:
    """Run the daemon until SIGTERM or SIGINT.

    Once clients may connect, it says "ready: unix:PATH" on standard error, and with
    --http before that "ready: http://HOST:PORT".
    """
    from blobstore.daemon import run  # here: other commands need none of its libraries

    tree = configured(config, data=data, socket=socket, http=http, dram=dram, ssd=ssd)
    logging.basicConfig(
        level=tree.log.level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    run(tree, announce=lambda address: print(f"ready: {address}", file=sys.stderr, flush=True))

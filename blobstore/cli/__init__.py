"""The command line: `blobstore` and `blobstored`.

One file per command. `main` alone decides what a failure looks like: one line on
standard error and the exit code of the error's class, never a traceback.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated, Any

import typer
from typer.main import get_command

from blobstore import __version__
from blobstore.cli import (
    completion,
    config,
    doctor,
    explain,
    get,
    ls,
    match,
    pin,
    put,
    rm,
    serve,
    stat,
    stats,
    supersede,
    top,
    verify,
)
from blobstore.cli.output import report, report_usage
from blobstore.cli.plugins import CommandGroup

__all__ = ["app", "main", "serve_main"]

DEBUG = "BLOBSTORE_DEBUG"
"""Set in the environment, it adds the traceback to the error's line."""

app = typer.Typer(
    name="blobstore",
    cls=CommandGroup,
    help="Keep the KV caches of LLM inference servers in shared memory and on disk.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("serve")(serve.serve)
app.command("put")(put.put)
app.command("get")(get.get)
app.command("match")(match.match)
app.command("ls")(ls.ls)
app.command("rm")(rm.rm)
app.command("pin")(pin.pin)
app.command("supersede")(supersede.supersede)
app.command("stat")(stat.stat)
app.command("explain")(explain.explain)
app.command("stats")(stats.stats)
app.command("top")(top.top)
app.command("verify")(verify.verify)
app.command("doctor")(doctor.doctor)
app.add_typer(config.app, name="config")
app.command("completion")(completion.completion)
app.command("complete", hidden=True)(completion.complete)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"blobstore {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say it and exit.")
    ] = False,
) -> None:
    pass


def main(arguments: list[str] | None = None, *, program: str = "blobstore") -> int:
    """Run one command; its exit code: 0 ok, 1 failed, 2 usage, 3 unavailable, 130 interrupted."""
    given = sys.argv[1:] if arguments is None else arguments
    command: Any = get_command(app)
    try:
        result = command.main(given, prog_name=program, standalone_mode=False)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if os.environ.get(DEBUG):
            traceback.print_exc()
        return report_usage(error) or report(error)
    return result if isinstance(result, int) else 0


def serve_main() -> int:
    """`blobstored` is `blobstore serve`."""
    return main(["serve", *sys.argv[1:]])

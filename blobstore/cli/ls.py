"""`blobstore ls`: the namespaces, or the blobs of one."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Annotated, Any

import typer

from blobstore.cli.ask import Daemon, reached
from blobstore.cli.naming import (
    PAGE,
    Model,
    Name,
    NamespaceText,
    Revision,
    all_namespaces,
    cursor_of,
)
from blobstore.cli.options import ConfigFile, Json, Socket, Timeout, configured
from blobstore.cli.output import console, duration, print_json, print_table, printable
from blobstore.protocol import List, Report
from blobstore.units import format_size


def ls(
    namespace: NamespaceText = None,
    model: Model = None,
    revision: Revision = None,
    limit: Annotated[
        int, typer.Option("--limit", metavar="N", min=1, help="Show so many at most.")
    ] = 1000,
    after: Annotated[
        str | None,
        typer.Option("--after", metavar="HEX", help="Go on after this key, or namespace id."),
    ] = None,
    socket: Socket = None,
    config: ConfigFile = None,
    timeout_s: Timeout = 30.0,
    as_json: Json = False,
) -> None:
    """List the namespaces or, with NAMESPACE or --model, the blobs of one.

    In ascending order of ids or keys. Sizes of a namespace are those of its blobs' payloads
    in each tier.

    \b
    Examples:
      blobstore ls
      blobstore ls 3f2a9c1b --limit 20
      blobstore ls --model llama --json | jq -r .blobs[].key
    """
    cursor = cursor_of(after) if after is not None else b""
    name = None
    if namespace is not None or model is not None or revision is not None:
        name = Name(namespace, model, revision)
    path = configured(config, socket=socket).local.socket
    with reached(path, timeout_s) as daemon:
        if name is None:
            body = _namespaces(daemon, cursor, limit)
        else:
            body = _blobs(daemon, name.find(daemon), cursor, limit)
    if as_json:
        print_json(body)
    elif name is None:
        _show_namespaces(body["namespaces"])
    else:
        _show_blobs(body["namespace"], body["blobs"])
    if not as_json and body["next"]:
        console().print(f"more: --after {body['next']}", style="dim")


def _namespaces(daemon: Daemon, after: bytes, limit: int) -> dict[str, Any]:
    found = list(islice(all_namespaces(daemon, after), limit + 1))
    page = found[:limit]
    return {"namespaces": page, "next": page[-1]["id"] if len(found) > limit else None}


def _blobs(daemon: Daemon, namespace_id: bytes, after: bytes, limit: int) -> dict[str, Any]:
    blobs: list[dict[str, Any]] = []
    while True:
        wanted = min(PAGE, limit - len(blobs))
        body = daemon.ask(List(namespace_id, after, wanted), Report).body
        blobs += body["blobs"]
        after = body["next"]
        if not after or len(blobs) == limit:
            break
    named = {fact: value for fact, value in body["namespace"].items() if fact != "encoding"}
    return {"namespace": named, "blobs": blobs, "next": after.hex() or None}


def _show_namespaces(found: list[dict[str, Any]]) -> None:
    short = 12 if console().is_terminal else 64  # a start of the id names it as well
    rows = [
        (
            facts["id"][:short],
            printable(facts["model"]),
            printable(facts["revision"]),
            f"{facts['blobs']:,}",
            format_size(facts["blob_bytes"]),
            format_size(facts["dram_bytes"]),
            format_size(facts["ssd_bytes"]),
        )
        for facts in found
    ]
    columns = ("namespace", "model", "revision", ">blobs", ">of", ">in dram", ">on ssd")
    print_table("", columns, rows, whole=True)


def _show_blobs(named: Mapping[str, Any], blobs: list[dict[str, Any]]) -> None:
    title = f"{named['id']}  {printable(named['model'])} {printable(named['revision'])}".rstrip()
    rows = [
        (
            facts["key"],
            f"{facts['tokens']:,}",
            format_size(facts["nbytes"]),
            "+".join(facts["tiers"]) or "none",
            facts["retention"],
            duration(facts["idle_s"]),
            f"{facts['pins']:,}",
        )
        for facts in blobs
    ]
    columns = ("key", ">tokens", ">size", "tiers", "retention", ">idle", ">pins")
    print_table(title, columns, rows, whole=True)

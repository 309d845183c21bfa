"""`blobstore stats`: every counter and gauge of the daemon."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby

from blobstore.cli.ask import ask
from blobstore.cli.options import ConfigFile, Json, Socket, Timeout, configured
from blobstore.cli.output import console, print_json, print_table
from blobstore.protocol import Report, Stats
from blobstore.units import format_size


def stats(
    socket: Socket = None,
    config: ConfigFile = None,
    timeout_s: Timeout = 5.0,
    as_json: Json = False,
) -> None:
    """Print all counters and gauges."""
    path = configured(config, socket=socket).local.socket
    body = ask(path, Stats(), Report, timeout_s).body
    if as_json:
        print_json(body)
        return
    out = console()
    for group, items in groupby(_flat(body), key=lambda item: item[0]):
        rows = [(name, shown(name, value)) for _, name, value in items]
        print_table(group, ("name", ">value"), rows)
        out.print()


def _flat(body: Mapping[str, object]) -> Iterator[tuple[str, str, object]]:
    """(group, dotted name, value) of every leaf; plain values first, under one heading."""
    for name, value in body.items():
        if not isinstance(value, Mapping):
            yield "daemon", name, value
    for name, value in body.items():
        if isinstance(value, Mapping):
            for inner, leaf in leaves(value):
                yield name, inner, leaf


def leaves(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Dotted name and value of every leaf."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def shown(name: str, value: object) -> str:
    """A value for people: digits in groups, bytes also in the unit that fits."""
    if name.endswith("_id") or isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if "bytes" in name:
        return f"{value:,} ({format_size(value)})" if value >= 1024 else f"{value}"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"

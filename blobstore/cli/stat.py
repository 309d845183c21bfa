"""`blobstore stat`: the daemon at a glance, or one blob."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from blobstore.cli.ask import ask, reached
from blobstore.cli.naming import Chain, Model, Name, Revision, named
from blobstore.cli.options import ConfigFile, Json, Socket, Timeout, configured
from blobstore.cli.output import console, duration, print_json, print_table
from blobstore.errors import InvalidRequest
from blobstore.protocol import Report, Stat, Stats
from blobstore.units import format_size

BAR_WIDTH = 20

WORRIES = {
    "corrupt": "corrupt copies put aside",
    "ssd_errors": "refused by the disk",
    "unsaved": "blobs could not be written to disk",
    "lost_unsaved": "of those were lost",
}
"""Counters that should stay 0, and what they count."""


def stat(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAMESPACE KEY",
            help="A namespace id in hex, or its first 8 or more digits (not with --model), and "
            "the key of one of its blobs in hex.",
            show_default=False,
        ),
    ] = None,
    model: Model = None,
    revision: Revision = None,
    socket: Socket = None,
    config: ConfigFile = None,
    timeout_s: Timeout = 5.0,
    as_json: Json = False,
) -> None:
    """Show the daemon at a glance or, with NAMESPACE and KEY, one blob (exits 1 if unknown).

    \b
    Examples:
      blobstore stat
      blobstore stat 3f2a9c1b 9c0d51...
      blobstore stat --model llama 9c0d51... --json
    """
    path = configured(config, socket=socket).local.socket
    if not words and model is None and revision is None:
        _daemon(path, timeout_s, as_json)
        return
    if len(words or ()) + (model is not None) < 2:
        raise InvalidRequest("NAMESPACE alone names no blob: give its KEY too")
    name, keys = named(words or (), model, revision)
    if keys.n != 1:
        raise InvalidRequest(f"{keys.n} keys: stat takes one at a time")
    _blob(name, keys, path, timeout_s, as_json)


def _daemon(path: Path, timeout_s: float, as_json: bool) -> None:
    body = ask(path, Stats(), Report, timeout_s).body
    if as_json:
        print_json(body)
        return
    out = console()
    out.print(Text.assemble((f"unix:{path}", "bold"), f"  up {duration(body['uptime_s'])}"))
    out.print()
    print_table("", ("tier", "", ">used", ">of", ">", "beside"), tier_rows(body))
    out.print()
    for label, text in _lines(body):
        out.print(Text.assemble((f"{label:<9}", "red" if label == "faults" else "dim"), text))


def tier_rows(body: Mapping[str, Any]) -> list[tuple[str | Text, ...]]:
    """For each tier its name, a bar, what is used of what, and what beside."""
    rows: list[tuple[str | Text, ...]] = []
    for name, tier in body["tiers"].items():
        used, capacity = tier["used_bytes"], tier["capacity_bytes"]
        share = used / capacity if capacity else 0.0
        rows.append(
            (
                name,
                _bar(share),
                format_size(used),
                format_size(capacity),
                f"{share:.0%}",
                _beside(name, body, tier),
            )
        )
    return rows


def _beside(name: str, body: Mapping[str, Any], tier: Mapping[str, Any]) -> str:
    if name == "dram":
        return f"{format_size(body['pinned_bytes'])} pinned, {format_size(body['lent_bytes'])} lent"
    notes = {"waiting to be written": tier.get("dirty_bytes", 0)}
    notes["of it free for reuse"] = tier.get("spare_bytes", 0)
    return ", ".join(f"{format_size(nbytes)} {what}" for what, nbytes in notes.items() if nbytes)


def _bar(share: float) -> Text:
    full = min(BAR_WIDTH, round(share * BAR_WIDTH))
    colour = "green" if share < 0.8 else "yellow"  # full is how a cache should be, not an alarm
    return Text.assemble(("█" * full, colour), ("░" * (BAR_WIDTH - full), "dim"))


def _lines(body: Mapping[str, Any]) -> list[tuple[str, str]]:
    counters = body["counters"]
    hits, missed = counters["hit_blobs"], sum(counters["missed_blobs"].values())
    puts = counters["put_blobs"]
    lines = [
        ("blobs", f"{body['blobs']:,} in {body['namespaces']:,} namespaces"),
        (
            "clients",
            f"{body['clients']:,} with {body['leases']:,} leases, "
            f"{body['reservations']:,} reservations",
        ),
        ("hits", f"{_by(hits)}; missed {missed:,}"),
        ("puts", _by(puts)),
    ]
    found = [f"{counters[name]:,} {text}" for name, text in WORRIES.items() if counters[name]]
    if found:
        lines.append(("faults", ", ".join(found)))
    return lines


def _by(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items()) or "none yet"


def _blob(name: Name, keys: Chain, path: Path, timeout_s: float, as_json: bool) -> None:
    with reached(path, timeout_s) as daemon:
        wanted = Stat(name.find(daemon, keys), keys.packed, keys.key_bytes)
        report = daemon.ask(wanted, Report)
    (facts,) = report.body["blobs"]
    if as_json:
        print_json(facts)
    elif facts:
        print_table("", ("fact", "value"), [(n, _fact(n, v)) for n, v in facts.items()])
    else:
        console().print("unknown: no such blob was put here, or it was dropped")
    raise typer.Exit(0 if facts else 1)


def _fact(name: str, value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none: only its record is left"
    if name == "nbytes" and isinstance(value, int):
        return f"{value:,} ({format_size(value)})"
    if name.endswith("_s") and isinstance(value, float):
        return duration(value)
    return str(value)

"""`blobstore top`: what the daemon does right now."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from blobstore.ages import medians
from blobstore.cli.ask import ask
from blobstore.cli.options import ConfigFile, Json, Socket, Timeout, configured
from blobstore.cli.output import console, duration, print_json
from blobstore.cli.stat import WORRIES, tier_rows
from blobstore.errors import Retryable
from blobstore.protocol import Report, Stats
from blobstore.units import format_size

RATES = (
    "gets", "matches", "hit_blobs", "hit_bytes", "missed_blobs", "put_blobs", "put_bytes",
    "loaded_blobs", "loaded_bytes", "saved_blobs", "saved_bytes", "demoted", "dropped",
    "moved_blobs", "moved_bytes", "refused_blobs", "refused_bytes",
)  # fmt: skip
"""Counters that are shown as so many a second."""

GAUGES = (
    "blobs", "namespaces", "clients", "leases", "reservations", "waiting_for_room",
    "pinned_bytes", "lent_bytes",
)  # fmt: skip

POLICY = ("policy", "wanted", "shadows", "regret", "fits", "write_budget")
"""What is shown of the plan's stats."""

Tree = Mapping[str, Any]


def top(
    interval_s: Annotated[
        float,
        typer.Option("--interval", metavar="SECONDS", min=0.05, max=3600.0, help="Between looks."),
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look for one interval, and end.")] = False,
    socket: Socket = None,
    config: ConfigFile = None,
    timeout_s: Timeout = 5.0,
    as_json: Json = False,
) -> None:
    """Watch tiers fill, bytes flow and blobs move, and why, until Ctrl-C.

    Rates are those of the last interval. With --json, one document on a line for each
    interval; with --once, a single one.

    \b
    Examples:
      blobstore top
      blobstore top --once --json | jq .rates.hit_bytes
      blobstore top --interval 10 --json >> blobstore.jsonl
    """
    path = configured(config, socket=socket).local.socket
    samples = _samples(path, interval_s, timeout_s)
    if once:
        sample = next(samples)
        print_json(sample) if as_json else console().print(_view(path, sample))
        return
    try:
        if as_json:
            for sample in samples:
                print(json.dumps(sample), flush=True)
        elif console().is_terminal:
            _watch(path, interval_s, timeout_s)
        else:
            for sample in samples:
                console().print(_view(path, sample))
    except KeyboardInterrupt:  # how it is meant to end
        return


def sample_of(before: Tree, after: Tree) -> dict[str, Any]:
    """What happened between two answers of Stats, and how things stand at the second.

    Rates are of nothing if the daemon restarted in between.
    """
    restarted = before["boot_id"] != after["boot_id"]
    seconds = after["uptime_s"] if restarted else after["uptime_s"] - before["uptime_s"]
    ssd = after["tiers"].get("ssd", {})
    return {
        "interval_s": 0.0 if restarted else seconds,
        "uptime_s": after["uptime_s"],
        **{name: after[name] for name in GAUGES},
        "dirty_bytes": ssd.get("dirty_bytes", 0),
        "tiers": {
            name: {"used_bytes": tier["used_bytes"], "capacity_bytes": tier["capacity_bytes"]}
            for name, tier in after["tiers"].items()
        },
        "rates": {
            name: _rate(None if restarted else before["counters"][name], value, seconds)
            for name, value in after["counters"].items()
            if name in RATES
        },
        "faults": {name: after["counters"][name] for name in WORRIES},
        "policy": {name: after["plan"][name] for name in POLICY if name in after.get("plan", {})},
        "median_ages_s": medians(after["ages"]),
    }


def _rate(before: Any, after: Any, seconds: float) -> Any:
    """How much more a second; by name where the counter is by name."""
    if isinstance(after, Mapping):
        known = before or {}
        return {
            name: _rate(None if before is None else known.get(name, 0), value, seconds)
            for name, value in after.items()
        }
    if before is None or seconds <= 0:
        return 0.0
    return (after - before) / seconds


def _samples(path: Path, interval_s: float, timeout_s: float) -> Iterator[dict[str, Any]]:
    before = ask(path, Stats(), Report, timeout_s).body
    due_s = time.monotonic()
    while True:
        due_s = max(due_s + interval_s, time.monotonic())
        time.sleep(due_s - time.monotonic() if due_s > time.monotonic() else 0.0)
        after = ask(path, Stats(), Report, timeout_s).body
        yield sample_of(before, after)
        before = after


def _watch(path: Path, interval_s: float, timeout_s: float) -> None:
    """On the whole terminal. A daemon that goes away is waited for."""
    first = ask(path, Stats(), Report, timeout_s).body  # or it is said why not, and that is all
    with Live(
        _view(path, sample_of(first, first)), console=console(), screen=True, auto_refresh=False
    ) as live:
        while True:
            try:
                for sample in _samples(path, interval_s, timeout_s):
                    live.update(_view(path, sample), refresh=True)
            except Retryable as error:
                live.update(Text(str(error), "red"), refresh=True)
                time.sleep(interval_s)


def _view(path: Path, sample: Tree) -> RenderableType:
    rates = sample["rates"]
    held = Text.assemble((f"unix:{path}", "bold"), f"  up {duration(sample['uptime_s'])}")
    return Group(held, Text(), _tiers(sample), Text(), _flows(rates), Text(), *_standing(sample))


def _tiers(sample: Tree) -> Table:
    table = Table.grid(padding=(0, 1))
    for row in tier_rows(sample):
        table.add_row(*row)
    return table


def _flows(rates: Tree) -> Table:
    table = Table(box=None, pad_edge=False)
    for column, justify in (("", "left"), ("blobs/s", "right"), ("bytes/s", "right")):
        table.add_column(column, header_style="dim", justify=justify)  # type: ignore[arg-type]
    for name, blobs, nbytes in _lines(rates):
        some = blobs or nbytes
        size = f"{format_size(nbytes)}/s" if nbytes else ""
        table.add_row(name, _number(blobs), size, style="" if some else "dim")
    return table


def _lines(rates: Tree) -> Iterator[tuple[str, float, float | None]]:
    """What is called how, blobs and bytes a second."""
    for tier, blobs in rates["hit_blobs"].items():
        yield f"hits: {tier}", blobs, rates["hit_bytes"].get(tier, 0.0)
    for why, blobs in rates["missed_blobs"].items():
        yield f"misses: {why}", blobs, None
    puts = rates["put_blobs"]
    yield "puts: stored", puts.get("stored", 0.0), rates["put_bytes"]
    for result, blobs in puts.items():
        if result != "stored":
            yield f"puts: {result}", blobs, None
    yield "loaded from ssd", rates["loaded_blobs"], rates["loaded_bytes"]
    yield "saved to ssd", rates["saved_blobs"], rates["saved_bytes"]
    yield "left dram, kept on ssd", rates["demoted"], None
    yield "evicted", rates["dropped"], None
    yield from _by_reason("", rates["moved_blobs"], rates["moved_bytes"])
    yield from _by_reason("not let into ", rates["refused_blobs"], rates["refused_bytes"])


def _by_reason(
    what: str, blobs: Mapping[str, Tree], nbytes: Mapping[str, Tree]
) -> Iterator[tuple[str, float, float | None]]:
    for where, reasons in sorted(blobs.items()):
        for reason, rate in sorted(reasons.items()):
            yield f"{what}{where}: {reason}", rate, nbytes[where][reason]


def _standing(sample: Tree) -> Iterator[Text]:
    rates = sample["rates"]
    yield Text(
        f"{sample['clients']:,} clients, {sample['leases']:,} leases, "
        f"{sample['reservations']:,} reservations, {sample['waiting_for_room']:,} waiting for room"
    )
    yield Text(
        f"{format_size(sample['pinned_bytes'])} pinned, {format_size(sample['lent_bytes'])} lent, "
        f"{format_size(sample['dirty_bytes'])} waiting to be written"
    )
    yield Text(
        f"{sample['blobs']:,} blobs in {sample['namespaces']:,} namespaces; "
        f"{_number(rates['gets'])} gets/s, {_number(rates['matches'])} matches/s"
    )
    if sample["policy"]:
        yield Text(_decided(sample["policy"]))
    if sample["median_ages_s"]:
        yield Text(_lain(sample["median_ages_s"]))
    faults = [f"{n:,} {WORRIES[name]}" for name, n in sample["faults"].items() if n]
    if faults:
        yield Text(", ".join(faults), "red")


def _decided(plan: Tree) -> str:
    """Who decides what stays, how it does beside the references, and what may be written."""
    said = [f"policy {plan['policy']}"]
    if plan.get("wanted", plan["policy"]) != plan["policy"]:
        said[0] += f" in place of {plan['wanted']}"
    if plan.get("regret") is not None:
        side = "behind" if plan["regret"] > 0 else "ahead of"
        said.append(f"{abs(plan['regret']):.2%} of tokens {side} the best reference")
    if plan.get("fits"):
        said.append(f"{plan['fits']:,} fits")
    left_bytes = (plan.get("write_budget") or {}).get("day_left_bytes")
    if left_bytes is not None:
        said.append(f"{format_size(left_bytes)} may be written to ssd at once")
    return ", ".join(said)


def _lain(median_ages_s: Mapping[str, float]) -> str:
    """How long blobs have not been used when they are again, or leave, since the start."""
    said = [
        f"when {f'leaving {tier}' if tier else 'used again'} {duration(age_s)}"
        for tier, age_s in median_ages_s.items()
    ]
    return "median age " + ", ".join(said)


def _number(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 or rate == 0 else f"{rate:.1f}"

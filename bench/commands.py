"""The commands `blobstore bench …` and `blobstore demo`; the command line finds them by name."""

from __future__ import annotations

import importlib
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, TextIO

import typer
from rich.console import Console

from blobstore.errors import BlobStoreError, InvalidRequest, SetupError

if TYPE_CHECKING:
    from blobstore.bench.report import Report, Row

DISK = Path("/var/tmp")  # noqa: S108 (a fresh directory is made in it)
"""Used if --data is not given: /tmp is in memory on many machines."""

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data", metavar="DIR", help="Directory on the disk to use; /var/tmp if not given."
    ),
]


def _svg_only(plot: Path | None) -> Path | None:
    """Refuse what would be no picture to those who open it by its name."""
    if plot is not None and plot.suffix.lower() != ".svg":
        raise InvalidRequest(f"--plot writes SVG: name a file that ends in .svg, found {plot.name}")
    return plot


Plot = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        metavar="FILE.svg",
        help="Write a picture of the ratios (SVG).",
        callback=_svg_only,
    ),
]
Tiny = Annotated[bool, typer.Option("--tiny", help="Small and quick: shows that it works.")]
Check = Annotated[bool, typer.Option("--check", help="Fail if a row misses what it must reach.")]

_BENCHES = {
    "tiers": ("tiers", "Bandwidth and latency of each tier beside its physical limit."),
    "rpc": ("rpc", "Round trips on the local socket beside a bare echo."),
    "midfill": ("midfill", "One turn of a 127,000 token conversation (needs 10 GB of memory)."),
    "clients": ("clients_at_once", "Four client processes at once beside one alone."),
    "catalogue": ("catalogue_scale", "200,000 blobs: seconds to open, memory per blob."),
    "texts": ("texts_scale", "100,000 texts: seconds to open, memory per text, to forget some."),
    "put-cost": ("put_cost", "A put beside 10,000 blobs and beside 100."),
    "http": ("http_load", "HTTP: requests a second, lag of the loop, memory of large transfers."),
    "idle": ("idle", "CPU of an idle daemon, and its memory under load."),
}


Peers = Annotated[
    str,
    typer.Option(
        "--peers", metavar="NAMES", help="Some of redis,mooncake,ray,lmcache; all if not given."
    ),
]


PYTHON_VARIABLE = "BLOBSTORE_VLLM_PYTHON"
"""Names the Python that has vLLM, for those who measure often."""


class Runner(StrEnum):
    """What computes in `bench engine`."""

    NUMPY = "numpy"
    VLLM = "vllm"


class BelowBound(BlobStoreError):
    """A row misses what it has to reach."""

    code = "below_bound"


bench = typer.Typer(
    help="Measure this machine and this store, in turns, and show both.",
    no_args_is_help=True,
    add_completion=False,
)


def _add(name: str, module: str, summary: str) -> None:
    def command(
        json: Json = False,
        plot: Plot = None,
        tiny: Tiny = False,
        data: Data = None,
        check: Check = False,
    ) -> None:
        _run(module, json=json, plot=plot, tiny=tiny, data=data, check=check)

    command.__doc__ = summary
    bench.command(name)(command)


for _name, (_module, _summary) in _BENCHES.items():
    _add(_name, _module, _summary)


@bench.command("peers")
def bench_peers(
    json: Json = False,
    plot: Plot = None,
    tiny: Tiny = False,
    data: Data = None,
    check: Check = False,
    peers: Peers = "",
) -> None:
    """The same puts, gets and look-ups by Redis, Mooncake, Ray and LMCache."""
    from blobstore.bench import peers as comparison
    from blobstore.bench.peers_plot import to_svg
    from blobstore.bench.setup import Setup

    _end_in_order()
    setup = Setup(_directory(data), tiny, _sayer(quiet=json))
    report = comparison.report(setup, [name for name in peers.split(",") if name])
    _show(report, json=json, plot=plot, check=check, draw=to_svg)


@bench.command("engine")
def bench_engine(
    json: Json = False,
    plot: Plot = None,
    tiny: Tiny = False,
    data: Data = None,
    check: Check = False,
    runner: Annotated[
        Runner, typer.Option("--runner", help="What computes: our NumPy model, or a real vLLM.")
    ] = Runner.NUMPY,
    vllm_python: Annotated[
        Path | None,
        typer.Option(
            "--vllm-python",
            metavar="FILE",
            help="The Python that has vLLM; this one or .venv-vllm/bin/python if not given.",
            envvar=PYTHON_VARIABLE,
        ),
    ] = None,
) -> None:
    """An agent's conversation through a real model: cold, from DRAM, from SSD, rebuilt, both."""
    from blobstore.bench import engine_bench, engine_plot, engine_vllm_bench, engine_vllm_plot
    from blobstore.bench.setup import Setup

    _end_in_order()
    setup = Setup(_directory(data), tiny, _sayer(quiet=json))
    if runner is Runner.VLLM:
        report: Report = engine_vllm_bench.report(setup, vllm_python)
        _show(report, json=json, plot=plot, check=check, draw=engine_vllm_plot.to_svg)
    else:
        report = engine_bench.report(setup)
        _show(report, json=json, plot=plot, check=check, draw=engine_plot.to_svg)


@bench.command("replay")
def bench_replay(
    traces: Annotated[
        list[str] | None,
        typer.Argument(metavar="TRACE…", help="Files, or names of bundled traces; all of those."),
    ] = None,
    sizes: Annotated[
        str,
        typer.Option(metavar="SHARES", help="Of the distinct blocks: 0.01,0.02."),
    ] = "",
    policies: Annotated[
        str,
        typer.Option(metavar="NAMES", help="lru, ours and min (the optimum) if not given."),
    ] = "",
    hints: Annotated[
        bool, typer.Option("--hints", help="Tell session, turn, kind and why an answer ended.")
    ] = False,
    ssd: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="A second tier; count what is written to it."),
    ] = None,
    cost: Annotated[bool, typer.Option("--cost", help="Ours is to save cost, not tokens.")] = False,
    score: Annotated[
        bool, typer.Option("--score", help="Mean share of the gap from lru to min that is closed.")
    ] = False,
    live: Annotated[
        bool,
        typer.Option("--live", help="The head of each trace, also against daemons, with bytes."),
    ] = False,
    json: Json = False,
    plot: Plot = None,
    tiny: Tiny = False,
    data: Data = None,
) -> None:
    """Traces of requests through the policies in virtual time, beside the optimum."""
    from blobstore.bench import replay_command
    from blobstore.bench.replay import ReplaySettings
    from blobstore.bench.replay_plot import to_svg

    _end_in_order()
    asked = replay_command.Asked(
        traces or [],
        replay_command.numbers(sizes),
        replay_command.names(policies),
        ReplaySettings(hints, ssd, "cost" if cost else "tokens"),
        tiny,
        score,
        _directory(data) if live else None,
    )
    reports = list(asked.reports(_sayer(quiet=json)))
    replay_command.show(reports, _console_on(sys.stdout), as_json=json, score=score)
    if plot is not None:
        plot.write_text(to_svg(reports), encoding="utf-8")


def demo(json: Json = False, data: Data = None) -> None:
    """A real model's KV goes through a daemon, to disk, through a crash, and back from its text."""
    from blobstore.bench.demo import run_demo  # here: help needs none of its libraries

    _end_in_order()
    outcome = run_demo(_directory(data), _sayer(quiet=False))
    if json:
        sys.stdout.write(outcome.to_json() + "\n")
    else:
        outcome.print(_console_on(sys.stdout))


def _run(
    module: str, *, json: bool, plot: Path | None, tiny: bool, data: Path | None, check: bool
) -> None:
    from blobstore.bench.machine import machine_facts
    from blobstore.bench.plot import to_svg
    from blobstore.bench.report import Report
    from blobstore.bench.setup import Setup

    _end_in_order()
    setup = Setup(_directory(data), tiny, _sayer(quiet=json))
    report = Report(machine_facts(setup.directory))
    report.rows += importlib.import_module(f"blobstore.bench.{module}").rows(setup)
    _show(report, json=json, plot=plot, check=check, draw=to_svg)


def _show(
    report: Report,
    *,
    json: bool,
    plot: Path | None,
    check: bool,
    draw: Callable[[Sequence[Row]], str],
) -> None:
    if json:
        sys.stdout.write(report.to_json() + "\n")
    else:
        report.print(_console_on(sys.stdout))
    if plot is not None:
        plot.write_text(draw(report.rows), encoding="utf-8")
    if check and not report.met:
        missed = ", ".join(f"{row.name} {row.ratio:.2f}" for row in report.rows if not row.met)
        raise BelowBound(f"below what they have to reach: {missed}")


def _directory(data: Path | None) -> Path:
    directory = data or (DISK if DISK.is_dir() else Path(tempfile.gettempdir()))
    if not directory.is_dir():
        raise SetupError(f"{directory} is no directory: give --data one on the disk to use")
    return directory


def _sayer(*, quiet: bool) -> Callable[[str], None]:
    """Progress goes to standard error, so that standard output stays one document."""
    console = _console_on(sys.stderr)
    return lambda line: None if quiet else console.print(line, style="dim", markup=False)


def _console_on(stream: TextIO) -> Console:
    return Console(file=stream, width=None if stream.isatty() else 200, highlight=False)


def _end_in_order() -> None:
    """SIGTERM unwinds, so that daemons and directories go with us."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)

"""What commands print: JSON for programs, tables for people, one line for errors."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from blobstore.errors import BlobStoreError
from blobstore.units import GIB, KIB, MIB

PIPE_WIDTH = 2000
"""Columns when there is no terminal: a line is then one row, so that grep finds it whole."""


def console() -> Console:
    """Standard output as it is now: as wide as the terminal, or as wide as its rows in a pipe."""
    wide = None if sys.stdout.isatty() else PIPE_WIDTH
    return Console(file=sys.stdout, width=wide, highlight=False)


def print_json(body: object) -> None:
    """`body` as one JSON document; bytes as lower-case hex."""
    print(json.dumps(body, indent=2, default=_plain))


def _plain(value: Any) -> object:
    return value.hex() if isinstance(value, bytes) else str(value)


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    whole: bool = False,
) -> None:
    """A table without lines; a column whose name starts with ">" is for numbers.

    With `whole` no cell is broken to fit the terminal, so that ids can be copied; without
    any name of a column there is no head.
    """
    made = Table(box=None, pad_edge=False, show_header=any(columns))
    for number, column in enumerate(columns):
        made.add_column(
            column.removeprefix(">"),
            justify="right" if column.startswith(">") else "left",
            header_style="dim",
            overflow="fold",
            no_wrap=whole or number == 0,
        )
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    out = Console(file=sys.stdout, width=PIPE_WIDTH, highlight=False) if whole else console()
    if title:  # not the table's own: that one is broken at the table's width
        out.print(Text(title, "bold"))
    out.print(made)


def exact_size(nbytes: int) -> str:
    """`nbytes` in a form that parses back to the same number."""
    for scale, unit in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if nbytes and nbytes % scale == 0:
            return f"{nbytes // scale}{unit}"
    return str(nbytes)


def duration(seconds: float) -> str:
    """Seconds as people say them, two units at most."""
    whole = int(seconds)
    for unit, size, lower, lower_size in (("d", 86400, "h", 3600), ("h", 3600, "min", 60)):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // lower_size} {lower}"
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{round(seconds, 2):g} s"


def printable(text: str) -> str:
    """Text of somebody else's, on one line and without what a terminal would obey."""
    return "".join(char if char.isprintable() else "\ufffd" for char in text)


def report(error: BaseException) -> int:
    """Say on standard error what went wrong, in one line; the exit code for it."""
    if isinstance(error, BlobStoreError):
        code, said = error.exit_code, str(error) or error.code
    else:
        code, said = 1, f"{type(error).__name__}: {error} (BLOBSTORE_DEBUG=1 shows where)"
    print(f"error: {' '.join(said.split())}", file=sys.stderr)
    return code


def report_usage(error: Exception) -> int:
    """The same for arguments that typer refuses; 0 if `error` is something else.

    Told apart by their shape: typer has its own copy of click since 0.26, so that
    the class has no one public name.
    """
    if not hasattr(error, "format_message"):
        return 0
    ctx = getattr(error, "ctx", None)
    hint = f" (see `{ctx.command_path} --help`)" if ctx is not None else ""
    print(f"error: {error.format_message()}{hint}", file=sys.stderr)
    return 2

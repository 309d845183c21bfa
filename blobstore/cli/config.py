"""`blobstore config`: what is in force and why, and a file to start from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer

from blobstore.cli.options import ConfigFile, Json, configured
from blobstore.cli.output import exact_size, print_json, print_table
from blobstore.config import Config, Entry
from blobstore.errors import SetupError

app = typer.Typer(help="Show the configuration in force, or write a file to start from.")

_HEAD = """\
# Configuration of blobstore. Every line below is a default: remove the leading "# " of
# those that you change. BLOBSTORE__SECTION__KEY in the environment and flags override it.
"""


@app.command()
def show(config: ConfigFile = None, as_json: Json = False) -> None:
    """Print every key, its value and where that was set."""
    tree = configured(config)
    if as_json:
        print_json(_as_tree(tree))
        return
    rows = [(f"{e.section}.{e.key}", _shown(e), e.source, e.comment) for e in tree.entries()]
    print_table("", ("key", "value", "set by", "meaning"), rows)


@app.command()
def init(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Not to the terminal.")
    ] = None,
) -> None:
    """Write a TOML file of all defaults, with their meaning; an existing file is kept."""
    text = "\n".join(_template(Config()))
    if output is None:
        print(text)
        return
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(f"{text}\n")
    except OSError as error:
        raise SetupError(
            f"cannot write {output}: {error.strerror}: give --output another path"
        ) from error


def _as_tree(tree: Config) -> dict[str, dict[str, object]]:
    body: dict[str, dict[str, object]] = {}
    for entry in tree.entries():
        section = body.setdefault(entry.section, {})
        section[entry.key] = {"value": entry.plain, "source": entry.source}
    return body


def _shown(entry: Entry) -> str:
    if isinstance(entry.value, int) and entry.key in ("size", "staging", "lent_max"):
        return exact_size(entry.value) if entry.value else "off"
    if isinstance(entry.plain, list):
        return ", ".join(map(str, entry.plain)) or "none"
    return str(entry.plain) or '""'


def _template(tree: Config) -> Iterator[str]:
    yield _HEAD
    for section, entries in groupby(tree.entries(), key=lambda entry: entry.section):
        yield f"[{section}]"
        for entry in entries:
            yield f"# {entry.key} = {json.dumps(entry.plain)}  # {entry.comment}"
        yield ""

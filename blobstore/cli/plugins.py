"""Commands that live outside the service join through the group `blobstore.commands`.

They are loaded when they are named or listed, so that no other command pays for
their imports, and one that is broken does not take the rest with it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from blobstore.errors import SetupError

GROUP = "blobstore.commands"


class CommandGroup(TyperGroup):
    """The built-in commands and those of the entry points, which cannot replace them."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in the order of the help: built in first."""
        own = super().list_commands(ctx)
        return [*own, *sorted({point.name for point in entry_points(group=GROUP)} - set(own))]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of that name, None if there is none."""
        found = super().get_command(ctx, cmd_name)
        if found is None:
            points = entry_points(group=GROUP, name=cmd_name)
            found = next((_command(point) for point in points), None)
        if found is not None:
            _unwrap_help(found)
        return found


def _command(point: EntryPoint) -> Any:
    """A typer app, or a function, as a command."""
    try:
        loaded: typer.Typer | Callable[..., Any] = point.load()
    except (ImportError, AttributeError) as error:
        loaded = _broken(point, error)
    if not isinstance(loaded, typer.Typer):
        single = typer.Typer(add_completion=False)
        single.command(point.name)(loaded)
        loaded = single
    command = get_command(loaded)
    command.name = point.name
    return command


def _unwrap_help(command: Any) -> None:
    """Join the lines of each paragraph of its help, which would be kept at any width.

    Of help in "rich" mode typer joins those of the first paragraph only (0.26).
    """
    paragraphs = (command.help or "").split("\n\n")
    command.help = "\n\n".join(
        text if "\b" in text else " ".join(text.split()) for text in paragraphs
    )
    for inner in getattr(command, "commands", {}).values():
        _unwrap_help(inner)


def _broken(point: EntryPoint, error: Exception) -> Callable[[], None]:
    reason = (
        f"the command {point.name} ({point.value}) cannot be loaded: {error}: install what it "
        f"needs (pip install 'kv-blobstore[{point.name}]' for ours)"
    )

    def broken() -> None:
        raise SetupError(reason)

    broken.__doc__ = "(cannot be loaded)"
    return broken

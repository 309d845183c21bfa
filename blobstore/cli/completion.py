"""`blobstore completion`: what a shell runs to complete commands and options.

The scripts ask `blobstore complete` for the words that may come next, so they never
are out of date. Where it knows none, such as for files, the shell does what it does.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any

import typer

_BASH = """\
_blobstore() {
    local IFS=$'\\n'
    COMPREPLY=($(blobstore complete -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null | cut -f 1))
}
complete -o default -F _blobstore blobstore
"""
_ZSH = """\
#compdef blobstore
_blobstore() {
    local -a found
    local word help
    while IFS=$'\\t' read -r word help; do
        found+=("${word//:/\\\\:}:$help")
    done < <(blobstore complete -- "${(@)words[2,CURRENT]}" 2>/dev/null)
    if (( $#found )); then _describe blobstore found; else _files; fi
}
if [ "$funcstack[1]" = _blobstore ]; then _blobstore "$@"; else compdef _blobstore blobstore; fi
"""
_FISH = """\
function __blobstore_complete
    set -l words (commandline -opc) (commandline -ct)
    blobstore complete -- $words[2..-1] 2>/dev/null
end
complete -c blobstore -a '(__blobstore_complete)'
"""


class Shell(StrEnum):
    """Those that are known."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


SCRIPTS = {Shell.BASH: _BASH, Shell.ZSH: _ZSH, Shell.FISH: _FISH}


def completion(
    shell: Annotated[Shell, typer.Argument(help="The shell that is to read it.")],
) -> None:
    """Print the script that completes commands and options in a shell.

    \b
    Examples:
      source <(blobstore completion bash)
      blobstore completion zsh > ~/.zfunc/_blobstore
      blobstore completion fish > ~/.config/fish/completions/blobstore.fish
    """
    print(SCRIPTS[shell], end="")


def complete(
    ctx: typer.Context,
    words: Annotated[list[str] | None, typer.Argument(help="What is typed so far.")] = None,
) -> None:
    """Print the words that may stand in place of the last one, each with its meaning."""
    for word, meaning in candidates(ctx, words or [""]):
        print(f"{word}\t{meaning}")


def candidates(ctx: typer.Context, words: list[str]) -> Iterator[tuple[str, str]]:
    """What the last of `words`, of which there may be only the start, can be, and its meaning.

    By the shape of commands, since typer has had its own copy of click's classes since 0.26.
    """
    *before, start = words
    command: Any = ctx.find_root().command
    for word in before:
        if hasattr(command, "get_command") and not word.startswith("-"):
            command = command.get_command(ctx, word)
    params = getattr(command, "params", [])
    option = [param for param in params if before and before[-1] in param.opts]
    if option and not getattr(option[0], "is_flag", False):
        found = _values(ctx, option[0], start)
    elif start.startswith("-"):
        found = _options(params)
    elif hasattr(command, "list_commands"):
        found = _commands(ctx, command)
    else:
        arguments = (param for param in params if param.param_type_name == "argument")
        found = (value for param in arguments for value in _values(ctx, param, start))
    return ((word, meaning) for word, meaning in found if word.startswith(start))


def _commands(ctx: typer.Context, group: Any) -> Iterator[tuple[str, str]]:
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        if command is not None and not command.hidden:
            yield name, command.get_short_help_str(limit=80)


def _options(params: list[Any]) -> Iterator[tuple[str, str]]:
    for param in params:
        for option in (*param.opts, *param.secondary_opts):
            if option.startswith("--"):
                yield option, " ".join((getattr(param, "help", "") or "").split())
    yield "--help", "Show what it does."


def _values(ctx: typer.Context, param: Any, start: str) -> Iterator[tuple[str, str]]:
    """What a parameter takes, if it is one of a few words."""
    for item in param.shell_complete(ctx, start):
        if item.type == "plain":
            yield str(item.value), ""

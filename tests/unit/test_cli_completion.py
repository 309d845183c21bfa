"""What a shell is told when somebody presses the tabulator."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from blobstore.cli import main

Output = pytest.CaptureFixture[str]


def words(capsys: Output, *typed: str) -> list[str]:
    assert main(["complete", "--", *typed]) == 0
    return [line.split("\t")[0] for line in capsys.readouterr().out.splitlines()]


def test_commands_by_their_start(capsys: Output) -> None:
    assert words(capsys, "st") == ["stat", "stats"]
    every = words(capsys, "")
    assert {"put", "get", "match", "ls", "rm", "pin", "top", "bench", "config"} <= set(every)
    assert "complete" not in every
    assert words(capsys) == every


def test_each_comes_with_its_meaning(capsys: Output) -> None:
    assert main(["complete", "--", "verif"]) == 0
    assert capsys.readouterr().out.startswith("verify\tRead every copy")


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["config", ""], ["show", "init"]),
        (["config", "sh"], ["show"]),
        (["put", "--re"], ["--revision", "--retention"]),
        (["put", "file", "--retention", ""], ["volatile", "standard", "durable"]),
        (["put", "file", "--retention", "d"], ["durable"]),
        (["completion", ""], ["bash", "zsh", "fish"]),
        (["--v"], ["--version"]),
        (["ls", "--json", "--li"], ["--limit"]),
        (["put", ""], []),
        (["get", "ab"], []),
        (["put", "file", "--key", ""], []),
        (["no-such-command", ""], []),
        (["no-such-command", "deeper", "--x"], []),
    ],
)
def test_what_may_come_next(capsys: Output, typed: list[str], expected: list[str]) -> None:
    assert words(capsys, *typed) == expected


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_are_right_in_the_eyes_of_their_shell(capsys: Output, shell: str) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "blobstore complete --" in script
    if shutil.which(shell) is not None:
        checked = subprocess.run([shell, "-n"], input=script, text=True, capture_output=True)
        assert (checked.returncode, checked.stderr) == (0, "")


def test_an_unknown_shell_is_a_usage_error(capsys: Output) -> None:
    assert main(["completion", "cmd"]) == 2


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_command_names() -> None:
    script = """
        source <(blobstore completion bash)
        complete -p blobstore
        COMP_WORDS=(blobstore sta); COMP_CWORD=1; _blobstore; echo "${COMPREPLY[*]}"
        COMP_WORDS=(blobstore put --ret); COMP_CWORD=2; _blobstore; echo "${COMPREPLY[*]}"
    """
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        env=os.environ | {"PATH": path},
        text=True,
        capture_output=True,
        timeout=60,
    )
    assert done.stderr == ""
    registered, commands, options = done.stdout.splitlines()
    assert registered.startswith("complete -o default -F _blobstore")
    assert commands.split() == ["stat", "stats"]
    assert options == "--retention"

"""Rules that keep the code readable, and that no linter has."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("blobstore", "tiering", "transports", "clients", "bench", "tests")
LINKS = {ROOT / "blobstore" / name for name in FOLDERS[1:]}
FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70
LEFTOVERS = tuple(word + mark for word in ("TO" + "DO", "FIX" + "ME", "XX" + "X") for mark in " :(")
VAGUE = {"utils", "util", "helpers", "helper", "manager", "common", "misc"}


def python_files() -> list[Path]:
    return sorted(
        path
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if not LINKS.intersection(path.parents)
    )


FILES = python_files()


def found_in_any(look: Callable[[Path], object]) -> dict[str, object]:
    """What `look` finds, by file, where it finds anything."""
    looked = {path.relative_to(ROOT).as_posix(): look(path) for path in FILES}
    return {name: found for name, found in looked.items() if found}


def called(node: ast.Call) -> str:
    """Dotted name of what is called, as far as it is written out."""
    return ast.unparse(node.func)


def calls(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, ast.Call]]:
    """Every call, with the name of the function around it."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.Call):
            yield inside, child
        around = child.name if isinstance(child, ast.FunctionDef) else inside
        yield from calls(child, around)


def banned(path: Path) -> Iterator[str]:
    place = path.relative_to(ROOT)
    tests, terminal = place.parts[0] == "tests", place.parts[:2] == ("blobstore", "cli")
    polling = place.parts[:2] == ("tests", "support")
    for inside, node in calls(ast.parse(path.read_text(encoding="utf-8"))):
        name = called(node)
        where = f"line {node.lineno}: {name}("
        if name.startswith(("pickle.", "marshal.", "shelve.")) or name in ("eval", "exec"):
            yield f"{where} runs code from its input; use msgspec"
        if name == "hash" and inside != "__hash__":
            yield f"{where} differs between processes; use a digest"
        if name == "time.time":
            yield f"{where} jumps; use time.monotonic, or the injected wall clock"
        if name == "print" and not (terminal or tests):
            yield f"{where} is for the command line; use logging, or return the text"
        if (
            name == "time.sleep"
            and [ast.unparse(arg) for arg in node.args] != ["0"]
            and tests
            and not polling
        ):
            yield f"{where} makes tests slow or flaky; poll with a deadline"


def too_long(path: Path) -> list[str]:
    return [
        f"{node.name}: {lines} lines"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES_MAX
    ]


def leftovers(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if any(word in line for word in LEFTOVERS)]


def test_no_file_is_too_long_to_hold_in_the_head() -> None:
    lines = {path: path.read_text(encoding="utf-8").count("\n") for path in FILES}
    assert [path for path, n in lines.items() if n > FILE_LINES_MAX] == [], "split it by idea"


def test_every_function_fits_a_screen() -> None:
    assert found_in_any(too_long) == {}


def test_no_banned_call() -> None:
    assert found_in_any(lambda path: list(banned(path))) == {}


def test_nothing_is_left_over() -> None:
    assert found_in_any(leftovers) == {}


def test_modules_are_named_by_what_they_are() -> None:
    assert [path for path in FILES if path.stem in VAGUE] == []


def test_the_walk_sees_every_room_once() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(FOLDERS)
    assert len({path.resolve() for path in FILES}) == len(FILES)


@pytest.mark.parametrize(
    "line",
    ["pickle.loads(b'')", "hash('x')", "time.time()", "print('x')", "eval('1')"],
)
def test_the_ban_notices(line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / "blobstore" / "x.py"
    path.parent.mkdir()
    path.write_text(f"def f():\n    {line}\n")
    assert len(list(banned(path))) == 1

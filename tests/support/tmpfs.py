"""A small file system of one's own, to fill up for real. Needs root: mark such tests `root`."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def tmpfs(path: Path, nbytes: int, options: str = "") -> Iterator[Path]:
    """`path` as a new tmpfs of `nbytes`; unmounted at the end, even if still in use.

    Skips the test where mounting is not allowed (root in a container).
    """
    path.mkdir(parents=True, exist_ok=True)
    wanted = f"size={nbytes}" + (f",{options}" if options else "")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", wanted, "tmpfs", str(path)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)

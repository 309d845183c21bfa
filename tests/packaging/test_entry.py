"""The doors of the repository itself: make and CI."""

from __future__ import annotations

import os
import subprocess
import tomllib
from pathlib import Path

import pytest

import blobstore

ROOT = Path(__file__).parents[2]


def test_the_version_is_written_once_for_both_readers() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == blobstore.__version__


def test_ci_can_be_started_as_a_program() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


@pytest.mark.parametrize("target", ["demo", "test", "lint", "bench", "soak"])
def test_make_knows_each_documented_target(target: str) -> None:
    done = subprocess.run(
        ["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_make_says_what_is_missing_without_a_python(tmp_path: Path) -> None:
    done = subprocess.run(
        ["make", "test", "PYTHON=no-such-python", f"VENV={tmp_path / 'venv'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "wanted Python 3.11" in done.stderr
    assert "no-such-python" in done.stderr

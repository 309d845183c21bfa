"""The five folders are one package, whichever way a tool reaches them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("tiering", "transports", "clients", "bench")

IMPORT_EVERYTHING = """
import importlib, pkgutil, sys
import blobstore

for module in pkgutil.walk_packages(blobstore.__path__, "blobstore."):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:  # only inside vLLM, which has an environment of its own
        if error.name != "vllm" or not module.name.startswith("blobstore.clients.vllm."):
            raise
print(*sorted(sys.modules), sep="\\n")
"""


@pytest.mark.parametrize("room", ROOMS)
def test_each_link_is_relative_and_leads_to_its_folder(room: str) -> None:
    link = ROOT / "blobstore" / room
    assert link.is_symlink()
    assert link.readlink() == Path("..") / room
    assert link.resolve() == ROOT / room


def test_nothing_is_imported_under_two_names() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_EVERYTHING],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.split()
    assert {f"blobstore.{room}" for room in ROOMS} < set(loaded)
    assert [name for name in loaded if name.split(".")[0] in ROOMS] == []

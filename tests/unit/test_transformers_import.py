"""Without torch or transformers the rest works, and what is missing is said."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

from blobstore.clients.transformers import StoredCache, libraries

LOADED = """
import sys
import blobstore.clients.transformers
assert not {"torch", "transformers"} & set(sys.modules)
"""


def test_torch_is_imported_only_when_it_is_used() -> None:
    subprocess.run([sys.executable, "-c", LOADED], check=True)


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    for name in ("torch", "transformers", "transformers.cache_utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name in (missing, f"{missing}.cache_utils"):
        monkeypatch.setitem(sys.modules, name, None)
    nothing: Any = None
    with pytest.raises(ImportError, match=r"pip install 'kv-blobstore\[transformers\]'"):
        StoredCache(nothing, nothing)


def test_a_version_without_sliding_layers_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("transformers", "transformers.cache_utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with pytest.raises(ImportError, match="this transformers is too old"):
        libraries.cache_utils()

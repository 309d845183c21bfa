"""The test vectors of docs/FORMAT.md, and the values that they describe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from blobstore.layer_group import LayerGroup
from blobstore.layout import KVLayout
from blobstore.namespace import Namespace

FOLDER = Path(__file__).parents[2] / "docs" / "vectors"


def load(name: str) -> list[dict[str, Any]]:
    """The cases of one file."""
    cases: list[dict[str, Any]] = json.loads((FOLDER / f"{name}.json").read_text())
    assert cases
    return cases


def layout_of(fields: dict[str, Any]) -> KVLayout:
    """The layout that a case describes."""
    groups = tuple(LayerGroup(**group) for group in fields["groups"])
    return KVLayout(**{**fields, "groups": groups})


def namespace_of(fields: dict[str, Any]) -> Namespace:
    """The namespace that a case describes."""
    return Namespace(**{**fields, "layout": layout_of(fields["layout"])})

"""How much the texts of a model's blobs take beside their payloads."""

from __future__ import annotations

import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from blobstore import texts as module
from blobstore.clients import KVLayout, Namespace
from blobstore.index import NamespaceState
from blobstore.settings import RebuildSettings
from blobstore.text_rows import ROW_BYTES
from blobstore.texts import Texts
from tests.support.clock import FakeClock
from tests.support.polling import poll_until_async
from tests.support.texts import texts_of

DOCS = Path(__file__).parents[2] / "docs"
VOCABULARY = 49_152
STEP = 64
BLOBS = 100
SMALL_TOKEN_BYTES = 30 * 2 * 3 * 64 * 2
"""A token's keys and values in SmolLM2-135M: 30 layers, 3 heads of 64, 16 bits."""
LARGE_TOKEN_BYTES = 32 * 2 * 8 * 128 * 2
"""In a model of 8 billion parameters: 32 layers, 8 heads of 128, 16 bits."""


def natural() -> list[int]:
    """Words and signs of the documentation, each numbered when it comes first."""
    number: dict[str, int] = {}
    text = "\n".join(page.read_text() for page in sorted(DOCS.glob("*.md")))
    found = re.findall(r"\w+|[^\w\s]", text)[: BLOBS * STEP]
    return [number.setdefault(word, len(number)) for word in found]


def incompressible() -> list[int]:
    rng = random.Random(1)
    return [rng.randrange(VOCABULARY) for _ in range(BLOBS * STEP)]


IDS = {"natural": natural, "random": incompressible}


@pytest.mark.parametrize("kind", IDS)
@pytest.mark.parametrize(
    ("token_bytes", "least"), [(SMALL_TOKEN_BYTES, 2_500), (LARGE_TOKEN_BYTES, 10_000)]
)
async def test_texts_are_told_as_a_small_share_of_the_payloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, token_bytes: int, least: int
) -> None:
    monkeypatch.setattr(module, "COMMIT_S", 0.0)
    layout = KVLayout.opaque(STEP * token_bytes)
    namespace = Namespace("model", layout, tokens_per_blob=STEP)
    chain = texts_of(IDS[kind](), namespace=namespace)
    assert len(chain) == BLOBS
    clock = FakeClock()
    texts = await Texts.open(
        RebuildSettings(),
        tmp_path,
        threads=lambda n, name: ThreadPoolExecutor(n, name),
        clock=clock,
        wall_clock=clock,
    )
    try:
        texts.note(NamespaceState(namespace), chain)
        await poll_until_async(lambda: texts.stats()["pending"] == 0, 10.0, "all is at rest")
        stats = texts.stats()
        shelf = texts._shelf
        assert shelf is not None
        with shelf._tables.reading() as txn:
            stored = [len(row) + ROW_BYTES for row in txn.rows()]
    finally:
        await texts.close()
    assert len(stored) == BLOBS
    assert (stats["bytes"], stats["kv_bytes"]) == (sum(stored), BLOBS * namespace.nbytes)
    assert stats["ratio"] == BLOBS * namespace.nbytes / sum(stored)
    assert stats["ratio"] >= least, sum(stored) / BLOBS

"""Chains of texts whose keys are what their tokens hash to, and files searched for bytes."""

from __future__ import annotations

import os
import random
from contextlib import suppress
from pathlib import Path

import numpy as np

from blobstore.layout import KVLayout
from blobstore.namespace import Namespace
from blobstore.text_entry import TextEntry

TOKENS = 16
NBYTES = 1000
NAMESPACE = Namespace("m", KVLayout.opaque(NBYTES), tokens_per_blob=TOKENS)


def texts_of(
    ids: object, *, namespace: Namespace = NAMESPACE, text: str = ""
) -> dict[bytes, TextEntry]:
    """A text for each full blob of these ids, root first; the caller's `text` with the root."""
    keys = namespace.keys(ids)
    packed = np.asarray(ids, "<u4").tobytes()
    step = namespace.tokens_per_blob
    return {
        key: TextEntry(
            parent=keys[at - 1] if at else b"",
            position=at * step,
            tokens=packed[at * step * 4 : (at + 1) * step * 4],
            nbytes=namespace.nbytes,
            digest=key[:16],
            text="" if at else text,
        )
        for at, key in enumerate(keys)
    }


def run_of(n: int, *, seed: int = 0, namespace: Namespace = NAMESPACE) -> dict[bytes, TextEntry]:
    """Texts of a chain of `n` blobs; of different seeds none are equal."""
    rng = random.Random(seed)
    ids = [seed, *(rng.randrange(50_000) for _ in range(n * namespace.tokens_per_blob - 1))]
    return texts_of(ids, namespace=namespace)


def found_in(directory: Path, *sought: bytes) -> set[bytes]:
    """Which of these bytes any file below a directory holds."""
    found: set[bytes] = set()
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            data = _data_of(path)
            found |= {some for some in sought if some in data}
    return found


def _data_of(path: Path) -> bytes:
    """A file without its holes, which may be most of it."""
    parts: list[bytes] = []
    with path.open("rb") as file:
        start = end = 0
        with suppress(OSError):  # ENXIO: nothing but a hole follows
            while True:
                start = os.lseek(file.fileno(), end, os.SEEK_DATA)
                end = os.lseek(file.fileno(), start, os.SEEK_HOLE)
                parts.append(os.pread(file.fileno(), end - start, start))
    return b"".join(parts)

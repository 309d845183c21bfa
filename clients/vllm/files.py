"""Digests of a model's files, read whole: the only thing that tells weights apart."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from xxhash import xxh3_128

from blobstore.errors import InvalidRequest
from blobstore.units import MIB

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
"""What vLLM's loaders and those of adapters read: a folder with none of them is a mistake."""
_SAYS_MORE = (".json", ".py", ".yaml", ".yml")
"""Configurations, and code that comes with a model."""

_RUN_BYTES = 64 * MIB
"""Digested by one thread: there are many in a model, so that none is left alone at the end."""
_READ_BYTES = 4 * MIB
"""At a time: enough for any disk, and still warm in a core's cache when it is digested."""
_THREADS = 4
"""They keep a fast SSD busy, and leave cores to an engine that is starting."""


class _Run(NamedTuple):
    path: Path
    start: int
    end: int


def path_digest(path: Path) -> str:
    """Of a file, or of all weights, configurations and code in a folder, by relative names.

    Reads them once, at several GB/s where they are in the page cache. InvalidRequest for a
    folder without weights; OSError if they cannot be read, or change meanwhile.
    """
    return _directory_digest(path) if path.is_dir() else _digest([path], [""])


def _directory_digest(directory: Path) -> str:
    paths = sorted(path for path in _files(directory) if path.suffix in (*WEIGHTS, *_SAYS_MORE))
    if not any(path.suffix in WEIGHTS for path in paths):
        raise InvalidRequest(f"{directory} holds no weights ({', '.join(WEIGHTS)})")
    return _digest(paths, [path.relative_to(directory).as_posix() for path in paths])


def _files(directory: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(directory):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        yield from (Path(folder, name) for name in names)


def _digest(paths: Sequence[Path], names: Sequence[str]) -> str:
    sizes = [path.stat().st_size for path in paths]
    runs = [
        _Run(path, start, min(start + _RUN_BYTES, size))
        for path, size in zip(paths, sizes, strict=True)
        for start in range(0, size, _RUN_BYTES)
    ]
    whole = sha256()
    for name, size in zip(names, sizes, strict=True):
        whole.update(f"{name}\0{size}\0".encode())
    with ThreadPoolExecutor(_THREADS) as threads:
        for digest in threads.map(_run_digest, runs):
            whole.update(digest)
    return whole.hexdigest()


def _run_digest(run: _Run) -> bytes:
    digest, buffer = xxh3_128(), memoryview(bytearray(_READ_BYTES))
    left = run.end - run.start
    with run.path.open("rb", buffering=0) as file:
        file.seek(run.start)
        while left:
            n = file.readinto(buffer[: min(left, _READ_BYTES)])
            if not n:
                raise OSError(f"{run.path} ended {left} bytes early: it was written to meanwhile")
            digest.update(buffer[:n])
            left -= n
    return digest.digest()

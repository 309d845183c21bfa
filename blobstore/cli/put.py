"""`blobstore put`: a file, or standard input, as one blob."""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from blobstore.cli.ask import reached
from blobstore.cli.naming import Name, described, key_of
from blobstore.cli.options import ConfigFile, Json, Socket, Timeout, configured
from blobstore.cli.output import print_json, print_table
from blobstore.cli.transfer import client, load, pace, sha256, source
from blobstore.errors import BY_CODE, BlobStoreError, Full, InvalidRequest, SizeMismatch

if TYPE_CHECKING:  # others than put and get need none of its libraries
    from blobstore.namespace import Namespace

DERIVED_BYTES = 32
"""A SHA-256."""


class Kept(StrEnum):
    """How long a blob must be kept."""

    VOLATILE = "volatile"
    STANDARD = "standard"
    DURABLE = "durable"


def put(
    file: Annotated[str, typer.Argument(metavar="FILE", help="What to put; - is standard input.")],
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="NAME", help="Declare a namespace of plain bytes of this size."
        ),
    ] = None,
    revision: Annotated[
        str, typer.Option("--revision", metavar="TEXT", help="With --model: the model's revision.")
    ] = "",
    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace", "-n", metavar="ID", help="A declared one: its id, or 8 digits of it."
        ),
    ] = None,
    key: Annotated[
        str | None, typer.Option("--key", metavar="HEX", help="8 to 64 bytes, in hex.")
    ] = None,
    parent: Annotated[
        str | None, typer.Option("--parent", metavar="HEX", help="The key that this continues.")
    ] = None,
    retention: Annotated[
        Kept, typer.Option("--retention", help="durable: on disk when the command ends.")
    ] = Kept.STANDARD,
    socket: Socket = None,
    config: ConfigFile = None,
    timeout_s: Timeout = 60.0,
    as_json: Json = False,
) -> None:
    """Put a file as one blob, and say by which namespace and key it is found.

    Without --key, the key is the SHA-256 of the file, as sha256sum prints it (with --parent:
    of the parent's key followed by the file), so that equal bytes are stored once. The size
    belongs to a namespace: with --model, files of different sizes are in different ones.

    \b
    Examples:
      blobstore put cache.bin --model llama
      zstd -dc cache.zst | blobstore put - --model llama --retention durable
      blobstore put next.bin -n 3f2a9c1b --parent 9c0d51...
    """
    parent_key = key_of("--parent", parent) if parent is not None else b""
    own_key = key_of("--key", key) if key is not None else b""
    _check(own_key, parent_key, model, namespace)
    path = configured(config, socket=socket).local.socket
    declared, most = _reach(path, timeout_s, namespace)
    with source(file, most) as (opened, nbytes):
        ns = _namespace(declared, model, revision, nbytes)
        found_key = own_key or sha256(opened, nbytes, parent_key)
        result, reason, seconds = _write(
            path, timeout_s, ns, found_key, opened, parent_key, retention, compare=own_key != b""
        )
    facts = {
        "result": result, "reason": reason, "namespace": ns.id.hex(), "key": found_key.hex(),
        "nbytes": nbytes, "seconds": seconds,
    }  # fmt: skip
    if as_json:
        print_json(facts)
    elif result in ("stored", "exists"):
        said = pace(nbytes, seconds) if result == "stored" else "the same bytes were held before"
        rows = [(result, said), ("namespace", ns.id.hex()), ("key", found_key.hex())]
        print_table("", ("", ""), rows, whole=True)
    _judge(result, reason, nbytes)


def _check(own: bytes, parent: bytes, model: str | None, namespace: str | None) -> None:
    if (model is None) == (namespace is None):
        raise InvalidRequest("say where it belongs: --model NAME, or --namespace ID")
    if parent and len(parent) != (len(own) or DERIVED_BYTES):
        raise InvalidRequest(
            f"--parent has {len(parent)} bytes, the key {len(own) or DERIVED_BYTES}: the keys of a "
            "chain have one length (give --key)"
        )


def _reach(path: Path, timeout_s: float, name: str | None) -> tuple[bytes | None, int]:
    """The encoding of the namespace, if one is named, and the most bytes that may be put.

    First of all: if nobody answers, that is said before anything is read.
    """
    with reached(path, timeout_s) as daemon:
        if name is None:
            return None, daemon.lent_bytes_max
        return described(daemon, Name(name).find(daemon))["encoding"], daemon.lent_bytes_max


def _namespace(declared: bytes | None, model: str | None, revision: str, nbytes: int) -> Namespace:
    """The declared one that is named, or a new one of plain bytes."""
    from blobstore.layout import KVLayout
    from blobstore.namespace import Namespace

    if declared is None:
        assert model is not None
        return Namespace(model, KVLayout.opaque(nbytes), revision)
    ns = Namespace.decode(declared)
    if ns.nbytes != nbytes:
        raise SizeMismatch(
            f"the file has {nbytes} bytes, blobs of namespace {ns.id.hex()[:12]} have {ns.nbytes}"
        )
    return ns


def _write(
    path: Path,
    timeout_s: float,
    ns: Namespace,
    key: bytes,
    file: BinaryIO,
    parent: bytes,
    retention: Kept,
    *,
    compare: bool,
) -> tuple[str, str, float]:
    """What became of it, why, and in what time.

    With `compare`, bytes that are held already are compared.
    """
    with client(path, timeout_s) as kv:
        bound, started_s = kv.namespace(ns), time.monotonic()
        with kv.put(bound, [key], parent=parent or None, retention=retention) as writer:
            before = writer.results[0]
            if before == "" or (before == "exists" and compare):
                load(file, writer[0])
        return writer.results[0], writer.reasons[0], time.monotonic() - started_s


_MEANING = {
    "no_room": "there is no room, and nothing may be evicted now",
    "full": "there is no room, and nothing may be evicted now",
    "lent_bytes": "it is more than the daemon lends to one process (local.lent_max)",
    "too_large": "it is larger than the arena (dram.size)",
    "orphan": "the blob that it continues is not held: put that first",
    "deadline": "the daemon took too long: give --timeout more seconds",
    "unavailable": "the daemon went away",
}


def _judge(result: str, reason: str, nbytes: int) -> None:
    """Raise if the blob is not held now."""
    if result in ("stored", "exists"):
        return
    if result == "divergent":
        raise BlobStoreError("other bytes are held under this key, and stay: nothing was stored")
    kind = Full if reason == "no_room" else BY_CODE.get(reason, BlobStoreError)
    raise kind(f"{nbytes:,} bytes were refused: {_MEANING.get(reason, reason or result)}")

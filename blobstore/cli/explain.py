"""`blobstore explain`: where one blob is, why, and what would happen to it next."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer

from blobstore.cli.ask import Daemon, reached
from blobstore.cli.naming import PREFIX_DIGITS_MIN, Chain, Model, Name, Revision, all_namespaces
from blobstore.cli.options import ConfigFile, Json, Socket, Timeout, configured
from blobstore.cli.output import console, print_json, print_table
from blobstore.cli.telling import lines
from blobstore.errors import InvalidRequest
from blobstore.keys import KEY_BYTES_MAX, KEY_BYTES_MIN
from blobstore.protocol import Explain, List, Report


def explain(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[NAMESPACE] KEY",
            help="A namespace id in hex, or its first 8 or more digits, and the key of a blob, or "
            "its first 8 or more digits. Without NAMESPACE and --model it is looked for in all.",
            show_default=False,
        ),
    ],
    model: Model = None,
    revision: Revision = None,
    socket: Socket = None,
    config: ConfigFile = None,
    timeout_s: Timeout = 5.0,
    as_json: Json = False,
) -> None:
    """Tell a blob's story: where it is, what moved it and why, and what would be next.

    Exits 1 if nothing is known of it. A blob that has left is remembered for a while; name
    it by its whole key.

    \b
    Examples:
      blobstore explain 9c0d51aa
      blobstore explain 3f2a9c1b 9c0d51aa
      blobstore explain --model llama 9c0d51aa --json
    """
    path = configured(config, socket=socket).local.socket
    if len(words) > (2 if model is None else 1):
        raise InvalidRequest("explain takes one KEY at a time, after at most one NAMESPACE")
    namespace = words[0] if len(words) == 2 else None
    name = Name(namespace, model, revision) if namespace or model or revision else None
    key = _key_text(words[-1])
    with reached(path, timeout_s) as daemon:
        facts = _found_anywhere(daemon, key) if name is None else _found_in(daemon, name, key)
    if as_json:
        print_json(facts)
    elif facts:
        title = f"{facts['key']}  in namespace {facts['namespace'][:12]}"
        print_table(title, ("", ""), list(lines(facts)))
    else:
        console().print("unknown: no such blob was put here, or it left long ago")
    raise typer.Exit(0 if facts else 1)


def _key_text(text: str) -> str:
    if not re.fullmatch(rf"[0-9a-fA-F]{{{PREFIX_DIGITS_MIN},{2 * KEY_BYTES_MAX}}}", text):
        raise InvalidRequest(
            f"KEY must be {PREFIX_DIGITS_MIN} to {2 * KEY_BYTES_MAX} hex digits, "
            f"found {text[:140]!r}"
        )
    return text.lower()


def _found_anywhere(daemon: Daemon, text: str) -> dict[str, Any]:
    """`_found` in the one namespace that has it."""
    facts: dict[str, Any] = {}
    is_namespace = False
    for namespace in all_namespaces(daemon):
        found = _found(daemon, bytes.fromhex(namespace["id"]), text)
        if found and facts:
            ids = f"{facts['namespace'][:12]}, {found['namespace'][:12]}"
            raise InvalidRequest(f"several namespaces have {text} ({ids}, …): name one before it")
        facts = found or facts
        is_namespace = is_namespace or namespace["id"].startswith(text)
    if is_namespace and not facts:
        raise InvalidRequest(f"{text} is a namespace: add a key, or its first 8 or more digits")
    return facts


def _found_in(daemon: Daemon, name: Name, text: str) -> dict[str, Any]:
    whole = _whole(text)
    return _found(daemon, name.find(daemon, Chain.of([whole]) if whole else None), text)


def _whole(text: str) -> bytes:
    """The key, if it is long enough to be one; else nothing."""
    may_be = len(text) % 2 == 0 and len(text) >= 2 * KEY_BYTES_MIN
    return bytes.fromhex(text) if may_be else b""


def _found(daemon: Daemon, namespace_id: bytes, text: str) -> dict[str, Any]:
    """All about the blob whose key is `text`, or else starts so."""
    whole = _whole(text)
    if whole and (facts := _asked(daemon, namespace_id, whole)):
        return facts
    after = bytes.fromhex(text + "0" * (len(text) % 2))
    page = daemon.ask(List(namespace_id, after, 2), Report).body["blobs"]
    keys = [facts["key"] for facts in page if facts["key"].startswith(text)]
    if len(keys) > 1:
        raise InvalidRequest(f"several keys start with {text}: {', '.join(keys)}, …")
    return _asked(daemon, namespace_id, bytes.fromhex(keys[0])) if keys else {}


def _asked(daemon: Daemon, namespace_id: bytes, key: bytes) -> dict[str, Any]:
    (facts,) = daemon.ask(Explain(namespace_id, key, len(key)), Report).body["blobs"]
    found: dict[str, Any] = facts
    return found

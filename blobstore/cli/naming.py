"""How people name namespaces and keys, and which ones they mean."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import typer

from blobstore.cli.ask import Daemon
from blobstore.errors import BlobStoreError, FrameTooLarge, InvalidRequest, UnknownNamespace
from blobstore.protocol import KEYS_MAX, Exists, Held, List, Namespaces, Report

ID_DIGITS = 64
KEY_BYTES = (8, 64)
PREFIX_DIGITS_MIN = 8
"""Of an id: fewer would soon be those of several."""

PAGE = 1000

NamespaceText = Annotated[
    str | None,
    typer.Argument(
        metavar="[NAMESPACE]",
        help="A namespace id in hex, or its first 8 or more digits.",
        show_default=False,
    ),
]
KeyText = Annotated[
    str | None, typer.Argument(metavar="[KEY]", help="A key, in hex.", show_default=False)
]
KeyWords = Annotated[
    list[str],
    typer.Argument(
        metavar="NAMESPACE KEY",
        help="A namespace id in hex, or its first 8 or more digits (not with --model), then "
        "keys in hex, root side first; - reads keys from standard input, one on each line.",
        show_default=False,
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME",
        help="Name the namespace by its model instead; if several have it, it is the one that "
        "holds the first KEY.",
    ),
]
Revision = Annotated[
    str | None,
    typer.Option("--revision", metavar="TEXT", help="With --model: the model's revision."),
]


@dataclass(frozen=True, slots=True)
class Name:
    """A namespace as somebody named it: by (the start of) its id, or by its model."""

    text: str | None
    model: str | None = None
    revision: str | None = None

    def __post_init__(self) -> None:
        if (self.text is None) == (self.model is None):
            raise InvalidRequest("name a namespace: by its id (see `blobstore ls`), or by --model")
        if self.revision is not None and self.model is None:
            raise InvalidRequest("--revision goes with --model")
        if self.text is not None and not re.fullmatch(r"[0-9a-fA-F]{8,64}", self.text):
            raise InvalidRequest(
                f"NAMESPACE must be {ID_DIGITS} hex digits, or the first {PREFIX_DIGITS_MIN} or "
                f"more of them, found {self.text[:140]!r}"
            )

    def find(self, daemon: Daemon, keys: Chain | None = None) -> bytes:
        """The id that is meant. Raises UnknownNamespace, or InvalidRequest if it is not clear.

        If several have the model, it is the one that holds the first of `keys`.
        """
        if self.text is not None and len(self.text) == ID_DIGITS:
            return bytes.fromhex(self.text)
        found = self._starting(daemon) if self.text is not None else self._of_model(daemon)
        if not found:
            raise UnknownNamespace(f"no namespace {self}: `blobstore ls` lists them")
        if len(found) > 1 and self.model is not None and keys is not None:
            several = len(found)
            found = [ns_id for ns_id in found if _holds(daemon, ns_id, keys.first)]
            if not found:
                key = keys.first.hex()
                raise BlobStoreError(f"{key} is held in none of {several} namespaces {self}")
        if len(found) == 1:
            return found[0]
        ids = ", ".join(ns_id.hex()[:12] for ns_id in found[:3])
        more = ", …" if len(found) > 3 else ""
        raise InvalidRequest(f"several namespaces {self} ({ids}{more}): name one by its id")

    def __str__(self) -> str:
        if self.text is not None:
            return f"starting with {self.text.lower()}"
        revision = f" and revision {self.revision!r}" if self.revision is not None else ""
        return f"with model {self.model!r}{revision}"

    def _starting(self, daemon: Daemon) -> list[bytes]:
        assert self.text is not None
        start = self.text.lower()
        after = bytes.fromhex(start + "0" * (len(start) % 2))  # shorter than an id, so before it
        page = daemon.ask(Namespaces(after, 4), Report).body["namespaces"]
        return [bytes.fromhex(facts["id"]) for facts in page if facts["id"].startswith(start)]

    def _of_model(self, daemon: Daemon) -> list[bytes]:
        return [
            bytes.fromhex(facts["id"])
            for facts in all_namespaces(daemon)
            if facts["model"] == self.model and self.revision in (None, facts["revision"])
        ]


def all_namespaces(daemon: Daemon, after: bytes = b"") -> Iterator[dict[str, Any]]:
    """Facts about each whose id comes after `after`, page by page."""
    limit = PAGE
    while True:
        try:
            body = daemon.ask(Namespaces(after, limit), Report).body
        except FrameTooLarge:  # names may be long
            if limit == 1:
                raise
            limit //= 2
            continue
        yield from body["namespaces"]
        after = body["next"]
        if not after:
            return


def described(daemon: Daemon, namespace_id: bytes) -> dict[str, Any]:
    """Facts about one, with its canonical encoding."""
    facts: dict[str, Any] = daemon.ask(List(namespace_id, b"", 1), Report).body["namespace"]
    return facts


def key_of(name: str, text: str) -> bytes:
    """One key, written in hex; upper case is taken as lower."""
    least, most = KEY_BYTES
    if not re.fullmatch(r"([0-9a-fA-F]{2})*", text) or not least <= len(text) // 2 <= most:
        raise InvalidRequest(
            f"{name} must be {2 * least} to {2 * most} hex digits, found {text[:140]!r}"
        )
    return bytes.fromhex(text)


def cursor_of(text: str) -> bytes:
    """Where a listing goes on, in hex: a key, an id, or the start of one."""
    if not re.fullmatch(r"([0-9a-fA-F]{2}){1,64}", text):
        raise InvalidRequest(f"--after must be an even number of hex digits, found {text[:140]!r}")
    return bytes.fromhex(text)


class Chain(NamedTuple):
    """Keys of one length, packed as requests have them."""

    packed: bytes
    key_bytes: int

    @property
    def n(self) -> int:
        """How many."""
        return len(self.packed) // self.key_bytes

    @property
    def first(self) -> bytes:
        """The one on the root side."""
        return self.packed[: self.key_bytes]

    @classmethod
    def of(cls, keys: Sequence[bytes]) -> Chain:
        """These; InvalidRequest if there are none, too many, or of several lengths."""
        if not 0 < len(keys) <= KEYS_MAX:
            raise InvalidRequest(f"{len(keys):,} keys: name 1 to {KEYS_MAX:,} at a time")
        lengths = sorted({len(key) for key in keys})
        if len(lengths) > 1:
            raise InvalidRequest(
                f"keys of one namespace have one length, found {lengths[0]} and {lengths[1]} bytes"
            )
        return cls(b"".join(keys), lengths[0])


def named(words: Sequence[str], model: str | None, revision: str | None) -> tuple[Name, Chain]:
    """The namespace and the keys that the words of KeyWords stand for."""
    texts = list(words)
    if len(texts) == 1 and model is None:
        raise InvalidRequest(
            f"found {texts[0][:140]!r} alone: name a namespace (its id, or --model) and then a key"
        )
    name = Name(texts.pop(0) if model is None else None, model, revision)
    return name, Chain.of([_whole_key(text) for text in _with_standard_input(texts)])


def _whole_key(text: str) -> bytes:
    try:
        return key_of("KEY", text)
    except InvalidRequest:
        if not re.fullmatch(rf"[0-9a-fA-F]{{{PREFIX_DIGITS_MIN},{2 * KEY_BYTES[1]}}}", text):
            raise
        raise InvalidRequest(
            f"KEY must be whole here, found {len(text)} hex digits: `blobstore explain` takes "
            f"its first {PREFIX_DIGITS_MIN} or more, and shows all"
        ) from None


def _holds(daemon: Daemon, namespace_id: bytes, key: bytes) -> bool:
    return daemon.ask(Exists(namespace_id, key, len(key)), Held).held == b"\x01"


def _with_standard_input(texts: Sequence[str]) -> Iterator[str]:
    for text in texts:
        if text == "-":
            yield from sys.stdin.read().split()
        else:
            yield text

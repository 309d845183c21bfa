"""What every handler of the door has at hand: the store, who asks, and what he may see."""

from __future__ import annotations

import binascii
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from urllib.parse import unquote

from aiohttp import web

from blobstore.errors import InvalidRequest, UnknownNamespace
from blobstore.hint import Hint
from blobstore.holder import Holder
from blobstore.http.answers import Refusal
from blobstore.http.tokens import Right, Token, Tokens
from blobstore.index import NamespaceState
from blobstore.keys import KEY_BYTES_MAX, KEY_BYTES_MIN
from blobstore.store import Store

TIMEOUT_MAX_S = 3600.0
HINTS = ("Session", "Turn", "Kind", "Finish")
"""Headers, after "X-Blobstore-"; their values are percent-encoded."""


@dataclass(frozen=True, slots=True)
class Context:
    """Shared by all requests of one door."""

    store: Store
    holder: Holder
    """The door itself, as a process that uses the store."""
    tokens: Tokens
    pool: Executor
    """For digests that only HTTP has."""
    io_timeout_s: float
    """How long a peer may take for the next piece of a body."""

    def bearer(self, request: web.Request) -> Token:
        """The token of a request; refuses it without a good one."""
        token = self.tokens.find(request.headers.getall("Authorization", ()))
        if token is None:
            raise Refusal(
                401,
                "unauthorized",
                "a good token is needed: Authorization: Bearer TOKEN",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return token

    def namespace(self, request: web.Request, right: Right) -> NamespaceState:
        """The namespace in a request's path, in which its token has `right`.

        What the token may not see does not exist for it. The right is asked for before
        anything else about the request is looked at, so that a refusal tells nothing.
        """
        token = self.bearer(request)
        namespace_id = hex_bytes(request.match_info["namespace"], "a namespace's id")
        state = self.store.index.namespaces.get(namespace_id)
        if state is None or not token.sees(state.namespace.model):
            raise UnknownNamespace(
                f"namespace {namespace_id.hex()[:12]} is not declared to this daemon: "
                "declare it first"
            )
        require(token, right)
        return state


def require(token: Token, right: Right) -> None:
    """Refuse a token with less than `right`."""
    if token.right < right:
        wanted, found = right.name.lower(), token.right.name.lower()
        raise Refusal(403, "forbidden", f"this needs the right {wanted!r}, the token has {found!r}")


def hex_bytes(text: str, what: str) -> bytes:
    """The bytes of a key, an id or a digest. InvalidRequest unless 8 to 64 in lower-case hex."""
    return unpacked([text], what)[0]


def unpacked(texts: Sequence[str], what: str) -> tuple[bytes, int]:
    """Keys of one length, packed, and that length. InvalidRequest as `hex_bytes` raises it."""
    joined = "".join(texts)
    digits = len(texts[0]) if texts else 0
    if any(len(text) != digits for text in texts):
        raise InvalidRequest(f"{what}: all keys of a call are of one length")
    try:
        # unhexlify is strict where bytes.fromhex skips blanks.
        packed = binascii.unhexlify(joined) if joined == joined.lower() else b""
    except ValueError:
        packed = b""
    if digits % 2 or not KEY_BYTES_MIN <= digits // 2 <= KEY_BYTES_MAX or not packed:
        raise InvalidRequest(
            f"{what} is {KEY_BYTES_MIN} to {KEY_BYTES_MAX} bytes in lower-case hex, "
            f"found {texts[0][:20] if texts else 'none'!r}"
        )
    return packed, digits // 2


def seconds_of(request: web.Request, default_s: float) -> float:
    """`timeout_s` of the query."""
    text = request.query.get("timeout_s")
    if text is None:
        return default_s
    try:
        return bounded(float(text), "timeout_s")
    except ValueError:
        raise InvalidRequest(f"timeout_s is a number of seconds, found {text[:20]!r}") from None


def hint_of(request: web.Request) -> Hint | None:
    """What the headers of a request for one blob tell of what it is for; None if nothing."""
    try:
        found = {
            name: unquote(text, errors="strict")
            for name in HINTS
            if (text := request.headers.get(f"X-Blobstore-{name}")) is not None
        }
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"a hint is not percent-encoded UTF-8: {error}") from None
    if not found:
        return None
    turn = found.pop("Turn", None)
    if turn is not None and not (turn.isascii() and turn.isdigit() and len(turn) < 20):
        raise InvalidRequest(f"X-Blobstore-Turn is a whole number, found {turn[:20]!r}")
    fields: dict[str, object] = {name.lower(): text for name, text in found.items()}
    return Hint.from_dict(fields if turn is None else fields | {"turn": int(turn)})


def bounded(seconds: float, what: str, most_s: float = TIMEOUT_MAX_S) -> float:
    """`seconds` if that may be asked for; InvalidRequest otherwise (NaN too)."""
    if not 0 <= seconds <= most_s:
        raise InvalidRequest(f"{what} is 0 to {most_s:.0f} seconds, found {seconds}")
    return seconds


def whole_of(request: web.Request, name: str, default: int, least: int, most: int) -> int:
    """A whole number of the query, from `least` to `most`."""
    text = request.query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most):
        raise InvalidRequest(f"{name} is a whole number, {least} to {most}, found {text[:20]!r}")
    return int(text)

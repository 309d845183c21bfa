"""Where a daemon answers over HTTP: host, port, TLS, and the token that is shown to it."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from blobstore.errors import InvalidRequest

_PORTS = {"http": 80, "https": 443}


def is_http(address: str) -> bool:
    """Whether `address` is one of a daemon that is reached over HTTP."""
    return address.lower().startswith(("http://", "https://"))


@dataclass(frozen=True, slots=True)
class HttpAddress:
    """An address like `https://kv.example:8080`, taken apart."""

    url: str
    host: str
    port: int
    base: str
    """Path before that of every request; empty, or without a slash at its end."""
    head_lines: str = field(repr=False)
    """Of every request: Host, and the token."""
    tls: ssl.SSLContext | None = field(repr=False)

    @classmethod
    def of(cls, address: str, *, token: str = "", ca_file: str = "") -> HttpAddress:
        """Of a URL; InvalidRequest if it is none, or the token or the CA file cannot be used."""
        try:
            url = urlsplit(address)
            host, port = url.hostname, url.port
        except ValueError as error:
            raise InvalidRequest(f"not a URL: {address!r}: {error}") from error
        if url.scheme not in _PORTS or not host or url.query or url.fragment or "@" in url.netloc:
            raise InvalidRequest(
                f"not an address of a daemon over HTTP: {address!r} (example: "
                "http://127.0.0.1:8470; its token is given as token=…)"
            )
        if not (address.isascii() and address.isprintable()) or " " in address:
            raise InvalidRequest(f"an address has printable ASCII only: {address!r}")
        if not (token.isascii() and token.isprintable()) or " " in token:
            raise InvalidRequest("a token has printable ASCII only, and no space")
        if ca_file and url.scheme != "https":
            raise InvalidRequest(f"ca_file is for https, the address is {address!r}")
        lines = f"Host: {url.netloc}\r\n"
        if token:
            lines += f"Authorization: Bearer {token}\r\n"
        tls = _context(ca_file) if url.scheme == "https" else None
        base = url.path.rstrip("/")
        return cls(address, host, port or _PORTS[url.scheme], base, lines, tls)


def _context(ca_file: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file or None)
    except (OSError, ssl.SSLError) as error:
        raise InvalidRequest(f"ca_file {ca_file!r} cannot be used: {error}") from error

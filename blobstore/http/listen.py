"""Where the door listens: address, TLS, and the names it may be called by."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
import ssl
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from blobstore.errors import SetupError

BACKLOG = 1024
LOCALHOST = "localhost"

_HOST = re.compile(r"(?:\[([^\[\]]+)\]|([^\[\]:]+))(?::[0-9]*)?")

Address = tuple[str, int]
"""Host and port."""
Place = tuple[socket.AddressFamily, tuple[Any, ...]]
"""Family and address, as sockets take them."""


def split_address(text: str) -> Address:
    """Host and port of `HOST:PORT`, `[IPV6]:PORT`; ValueError if it is neither."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        ipaddress.IPv6Address(host)
    elif ":" in host:
        raise ValueError(text)
    if not (colon and host and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise ValueError(text)
    return host, int(port)


def joined(host: str, port: int) -> str:
    """The reverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def tls_context(cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """The server side of TLS, or None without a certificate. Raises SetupError."""
    if cert is None:
        if key is not None:
            raise SetupError("http.tls_key without http.tls_cert: name the certificate too")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])

    def no_password() -> str:
        raise SetupError(f"the key of {cert} is encrypted: give one without a passphrase")

    try:
        context.load_cert_chain(cert, key, password=no_password)
    except ssl.SSLError as error:
        raise SetupError(
            f"cannot use the certificate {cert} with the key {key or cert} "
            f"({error.reason or 'not PEM'}): both must be PEM and belong together"
        ) from error
    except OSError as error:
        raise SetupError(
            f"cannot read the certificate {cert} or its key {key or cert}: {error.strerror}"
        ) from error
    return context


def resolved(address: Address, *, tls: bool) -> list[Place]:
    """Every address that the host has. Raises SetupError.

    Without TLS only loopback may be served: tokens would travel in the clear.
    """
    host, port = address
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise SetupError(f"http.listen: no address for {host!r}: {error.strerror}") from error
    places: list[Place] = list(dict.fromkeys((family, place) for family, _, _, _, place in found))
    for _, place in places:
        if not tls and not ipaddress.ip_address(str(place[0]).partition("%")[0]).is_loopback:
            raise SetupError(
                f"http.listen = {joined(host, port)} is not loopback, and there is no TLS: name "
                "http.tls_cert and http.tls_key, or listen on 127.0.0.1 behind a proxy that has it"
            )
    return places


def bind(address: Address, *, tls: bool) -> list[socket.socket]:
    """Listening sockets for every address that the host has. Raises SetupError as `resolved`."""
    host, port = address
    places = resolved(address, tls=tls)
    with contextlib.ExitStack() as undo:
        sockets: list[socket.socket] = []
        for family, place in places:
            # An unspecified port is chosen once, for all addresses.
            wanted = (place[0], port or (sockets[0].getsockname()[1] if sockets else 0), *place[2:])
            listener = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listener.bind(wanted)
                listener.listen(BACKLOG)
            except OSError as error:
                raise SetupError(
                    f"cannot listen on http.listen = {joined(host, port)}: "
                    f"{error.strerror or error}: choose another --http"
                ) from error
            listener.setblocking(False)
            sockets.append(listener)
        undo.pop_all()
    return sockets


class Names:
    """The Host headers that are answered: a page that rebinds its own name to us has another."""

    def __init__(self, bound: str, extra: Iterable[str]) -> None:
        self._names = {LOCALHOST, "127.0.0.1", "::1", bound.lower()}
        self._names.update(_without_port(name).lower() or name.lower() for name in extra)
        # Every address of the machine is a bound one then; and no name can be rebound to them.
        self._any_address = _is_unspecified(bound)

    def admit(self, host: str) -> bool:
        """Whether a Host header is one of them, with any port."""
        name = _without_port(host).lower()
        return name in self._names or (self._any_address and _is_address(name))


def _without_port(host: str) -> str:
    found = _HOST.fullmatch(host)
    return (found[1] or found[2]) if found is not None else ""


def _is_unspecified(host: str) -> bool:
    return _is_address(host) and ipaddress.ip_address(host).is_unspecified


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True

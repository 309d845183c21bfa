"""Addresses, and the names by which the door may be called."""

from __future__ import annotations

import socket

import pytest

from blobstore.errors import SetupError
from blobstore.http.listen import Names, bind, joined, split_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:80", ("127.0.0.1", 80)),
        ("localhost:0", ("localhost", 0)),
        ("[::1]:65535", ("::1", 65535)),
        ("kv-1.example.org:8470", ("kv-1.example.org", 8470)),
    ],
)
def test_an_address_is_split_and_joined(text: str, address: tuple[str, int]) -> None:
    assert split_address(text) == address
    assert joined(*address) == text


@pytest.mark.parametrize(
    "text",
    ["", ":", "host", "host:", ":80", "host:x", "host:65536", "::1:80", "[x]:80", "h:\u0661"],
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        split_address(text)


def test_a_name_may_be_given_with_its_port() -> None:
    names = Names("127.0.0.1", ["KV1.example.org:8470", "[fe80::2]:80", "fe80::3"])
    for host in ("kv1.example.org", "kv1.example.org:1", "[fe80::2]:8470", "[fe80::3]"):
        assert names.admit(host), host
    assert not names.admit("kv2.example.org:8470")


def test_an_unspecified_port_is_chosen() -> None:
    (listener,) = bind(("127.0.0.1", 0), tls=False)
    with listener:
        host, port = listener.getsockname()
        assert (host, port > 0) == ("127.0.0.1", True)
        assert not listener.getblocking()
        with pytest.raises(SetupError, match=f"127.0.0.1:{port}.*in use.*--http"):
            bind(("127.0.0.1", port), tls=False)


def test_localhost_is_loopback() -> None:
    for listener in bind(("localhost", 0), tls=False):
        listener.close()


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_without_tls_only_loopback(host: str) -> None:
    with pytest.raises(SetupError, match=r"no TLS.*http\.tls_cert"):
        bind((host, 0), tls=False)


@pytest.mark.parametrize(
    ("host", "admitted"),
    [
        ("localhost", True), ("LocalHost:8470", True), ("127.0.0.1", True), ("[::1]", True),
        ("[::1]:8470", True), ("kv.example", True), ("KV.EXAMPLE:1", True), ("10.0.0.5:8470", True),
        ("10.0.0.6", False), ("evil.example", False), ("kv.example.evil", False), ("", False),
        ("localhost:evil", False), ("localhost:80:80", False), ("[::1", False), ("::1", False),
        ("localhost.", False), ("user@localhost", False),
    ],
)  # fmt: skip
def test_names_of_one_address(host: str, admitted: bool) -> None:
    assert Names("10.0.0.5", ["kv.example"]).admit(host) is admitted


@pytest.mark.parametrize("bound", ["0.0.0.0", "::"])
def test_where_every_address_is_ours_every_address_is_a_name(bound: str) -> None:
    names = Names(bound, [])
    assert names.admit("10.0.0.6:1")
    assert names.admit("[fe80::1]:1")
    assert not names.admit("evil.example")

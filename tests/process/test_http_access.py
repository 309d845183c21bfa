"""Who may do what over HTTP, by which name, and doors that cannot be opened as asked."""

from __future__ import annotations

import hashlib
import os
import select
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from blobstore.units import MIB
from tests.support.daemon import daemon, refused
from tests.support.http_daemon import (
    HttpDaemon,
    http_daemon,
    key,
    pattern,
    put,
)
from tests.support.polling import poll_until


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpDaemon]:
    """One daemon for all tests that leave it as it was."""
    with http_daemon(tmp_path_factory.mktemp("http")) as running:
        yield running
        assert running.nothing_is_lent()
        assert "Traceback" not in running.run.said


VERBS = (
    "match", "exists", "stat", "explain", "prefetch", "pin", "drop", "forget", "texts", "supersede",
)  # fmt: skip
DATA_ROUTES = [
    ("POST", "/v1/namespaces"), ("GET", "/v1/namespaces"), ("GET", "/v1/stats"),
    ("POST", "/v1/verify"), ("POST", "/v1/prefetch"), ("GET", "{ns}/blobs"),
    ("PUT", "{ns}/blobs/{key}"),
    ("GET", "{ns}/blobs/{key}"), ("HEAD", "{ns}/blobs/{key}"), ("DELETE", "{ns}/blobs/{key}"),
    *(("POST", f"{{ns}}/{verb}") for verb in VERBS),
]  # fmt: skip


@pytest.mark.parametrize("header", [None, "Bearer", "Bearer wrong-token-0123456789", "Basic x"])
def test_without_a_good_token_nothing_is_told(door: HttpDaemon, header: str | None) -> None:
    ns = door.declare(8, "secret")
    put(door, f"{ns}/blobs/{key(1)}", bytes(8))
    given = {"Authorization": header} if header is not None else {}
    unknown = f"/v1/namespaces/{'0' * 64}"
    for method, path in DATA_ROUTES:
        told = set()
        for there, one in ((ns, key(1)), (ns, key(2)), (unknown, key(1)), (ns, "odd")):
            url = path.format(ns=there, key=one)
            answer = door.ask(method, url, None, given, token=None)
            assert answer.status == 401, (method, url)
            assert answer.headers["www-authenticate"] == "Bearer"
            told.add(answer.body)
        assert len(told) == 1


TOKENS = """
[[token]]
name = "reader of a"
sha256 = "{reader}"
rights = "read"
namespaces = ["a/*"]
[[token]]
name = "writer of a"
sha256 = "{writer}"
rights = "write"
namespaces = ["a/*"]
[[token]]
name = "admin of b"
sha256 = "{admin}"
rights = "admin"
namespaces = ["b"]
[[token]]
name = "expired"
sha256 = "{expired}"
rights = "admin"
namespaces = ["*"]
expires = "2001-01-01T00:00:00Z"
"""
NAMES = ("reader", "writer", "admin", "expired")
SECRETS = {name: f"{name}-of-sixteen-characters-and-more" for name in NAMES}


@pytest.fixture(scope="module")
def shared_door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpDaemon]:
    """A daemon with several tokens."""
    home = tmp_path_factory.mktemp("tokens")
    digests = {name: hashlib.sha256(s.encode()).hexdigest() for name, s in SECRETS.items()}
    (home / "tokens.toml").write_text(TOKENS.format(**digests))
    environ = {"BLOBSTORE__HTTP__TOKENS": os.fspath(home / "tokens.toml")}
    with http_daemon(home, environ=environ) as running:
        yield running


def test_rights_and_namespaces(shared_door: HttpDaemon) -> None:
    door = shared_door
    ns_a, ns_b = door.declare(8, "a/x"), door.declare(8, "b")
    blob = f"{ns_a}/blobs/{key(1)}"
    reader, writer, admin = (SECRETS[name] for name in ("reader", "writer", "admin"))
    assert door.ask("PUT", blob, bytes(8), token=writer).status == 201
    assert door.ask("GET", blob, token=reader).status == 200
    for absent_or_not in (blob, f"{ns_a}/blobs/{key(2)}", f"{ns_a}/blobs/odd"):
        assert door.ask("PUT", absent_or_not, bytes(8), token=reader).error == "forbidden"
        assert door.ask("DELETE", absent_or_not, token=writer).error == "forbidden"
    for verb in ("pin", "drop", "forget", "texts", "supersede"):
        assert door.post(f"{ns_a}/{verb}", {"keys": [key(1)]}, token=reader).status == 403
    assert door.post("/v1/verify", {}, token=writer).status == 403
    assert door.post("/v1/verify", {}, token=admin).status == 403  # not for all namespaces
    assert door.ask("GET", "/v1/stats", token=reader).status == 200
    models = {
        token: [
            n["model"] for n in door.ask("GET", "/v1/namespaces", token=token).json["namespaces"]
        ]
        for token in (reader, admin)
    }
    assert models == {reader: ["a/x"], admin: ["b"]}
    assert door.ask("DELETE", f"{ns_b}/blobs/{key(1)}", token=admin).json == {"count": 0}
    declared = {"model": "c", "opaque_bytes": 8}
    assert door.post("/v1/namespaces", declared, token=reader).status == 403
    assert door.post("/v1/namespaces", declared | {"model": "a/y"}, token=reader).status == 200
    told = declared | {"model": "a/y", "terms": {"text": "off"}}
    assert door.post("/v1/namespaces", told, token=reader).status == 403
    assert door.post("/v1/namespaces", told, token=writer).status == 200


def test_a_session_of_others_is_as_good_as_none(shared_door: HttpDaemon) -> None:
    door = shared_door
    ns = door.declare(8, "b")
    put(door, f"{ns}/blobs/{key('session')}", bytes(8), X_Blobstore_Session="of b")

    def is_cold() -> bool:
        door.post(f"{ns}/drop", {"keys": [key("session")], "tier": "dram"})
        (facts,) = door.post(f"{ns}/stat", {"keys": [key("session")]}).json["blobs"]
        return bool(facts["tiers"] == ["ssd"])

    poll_until(is_cold, 20.0, "it is on SSD alone")
    for token, count in ((SECRETS["reader"], 0), (SECRETS["admin"], 1)):
        answer = door.post("/v1/prefetch", {"session": "of b"}, token=token)
        assert (answer.status, answer.json) == (200, {"count": count})


def test_explain_names_no_blobs_of_namespaces_that_a_token_may_not_see(
    shared_door: HttpDaemon,
) -> None:
    door = shared_door
    ns = door.declare(8, "a/x")
    put(door, f"{ns}/blobs/{key('explained')}", bytes(8))
    asked = {"keys": [key("explained")]}
    (seen,) = door.post(f"{ns}/explain", asked, token=SECRETS["reader"]).json["blobs"]
    assert seen["known"]
    assert "next" not in seen
    (seen,) = door.post(f"{ns}/explain", asked).json["blobs"]
    assert "next" in seen


def _models(door: HttpDaemon, token: str) -> list[str]:
    listed = door.ask("GET", "/v1/namespaces", token=token).json["namespaces"]
    return [entry["model"] for entry in listed]


def test_a_hidden_namespace_is_an_unknown_one(shared_door: HttpDaemon) -> None:
    door = shared_door
    hidden = door.declare(8, "hidden")
    assert door.ask("PUT", f"{hidden}/blobs/{key(1)}", bytes(8)).status in (200, 201)
    unknown = hidden[:-1] + (
        "0" if hidden[-1] != "0" else "1"
    )  # ids are told by their first digits
    for token in (SECRETS["reader"], SECRETS["writer"], SECRETS["admin"]):
        for method, path in DATA_ROUTES:
            if "{ns}" not in path:
                continue
            body = bytes(8) if method == "PUT" else None
            answers = set()
            for there in (hidden, unknown):
                for one in (key(1), key(2), "odd"):
                    answer = door.ask(method, path.format(ns=there, key=one), body, token=token)
                    answer.headers.pop("date")
                    answers.add((answer.status, str(answer.headers), answer.body))
            assert len(answers) == 1, (method, path, answers)
            assert {status for status, _, _ in answers} == {404}


def test_an_expired_token_is_an_unknown_one(shared_door: HttpDaemon) -> None:
    answers = [
        shared_door.ask("GET", "/v1/stats", token=token)
        for token in (SECRETS["expired"], "never-given-to-anyone-0123")
    ]
    assert [answer.status for answer in answers] == [401, 401]
    assert answers[0].body == answers[1].body


def test_no_secret_is_ever_logged(shared_door: HttpDaemon) -> None:
    shared_door.ask("GET", "/v1/stats", token=SECRETS["reader"])
    assert not [s for s in (*SECRETS.values(), shared_door.token) if s in shared_door.run.said]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.example", 421), ("evil.example:80", 421), ("127.0.0.1.evil.example", 421),
        ("localhost", 200), ("LOCALHOST:1", 200), ("127.0.0.1:99", 200), ("[::1]:80", 200),
        ("10.0.0.1", 421), ("", 421), ("localhost@evil.example", 421),
    ],
)  # fmt: skip
def test_only_known_hosts_are_served(door: HttpDaemon, host: str, status: int) -> None:
    assert door.ask("GET", "/v1/stats", headers={"Host": host}).status == status
    assert door.ask("GET", "/healthz", headers={"Host": host}, token=None).status == 200


def test_more_hosts_may_be_named(tmp_path: Path) -> None:
    with http_daemon(tmp_path, environ={"BLOBSTORE__HTTP__HOSTS": "kv.example, other"}) as door:
        for host, status in (("KV.example:8470", 200), ("other", 200), ("third", 421)):
            assert door.ask("GET", "/v1/stats", headers={"Host": host}).status == status


@pytest.mark.parametrize(
    ("listen", "environ", "code", "words"),
    [
        ("0.0.0.0:0", {}, 1, "no TLS"),
        ("[::]:0", {}, 1, "no TLS"),
        ("nonsense", {}, 2, "HOST:PORT"),
        ("127.0.0.1:99999", {}, 2, "0 to 65535"),
        ("127.0.0.1:0", {"TLS_CERT": "/nowhere.pem"}, 1, "/nowhere.pem"),
        ("127.0.0.1:0", {"TLS_KEY": "/nowhere.pem"}, 1, "tls_cert"),
        ("127.0.0.1:0", {"TOKENS": "/nowhere.toml"}, 1, "/nowhere.toml"),
        ("no.such.host.invalid:1", {}, 1, "no.such.host.invalid"),
    ],
)
def test_a_door_that_cannot_be_opened_is_one_line(
    tmp_path: Path, listen: str, environ: dict[str, str], code: int, words: str
) -> None:
    named = {f"BLOBSTORE__HTTP__{name}": value for name, value in environ.items()}
    found, said = refused(tmp_path, "--http", listen, environ=named)
    assert (found, words in said) == (code, True), said
    assert not (tmp_path / "b.sock").exists()


def test_an_address_in_use_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found, said = refused(tmp_path, "--http", f"127.0.0.1:{port}")
        assert (found, f"127.0.0.1:{port}" in said) == (1, True)
        assert "in use" in said


def test_without_the_option_nothing_listens_and_no_token_is_made(tmp_path: Path) -> None:
    with daemon(tmp_path) as run:
        assert "ready: http" not in run.said
        assert not (run.data / "http.token").exists()


# TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with cert.pem for 127.0.0.1, its key.pem, and the key of another, other.pem."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs openssl")
    home = tmp_path_factory.mktemp("tls")
    made = ("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "30", "-subj", "/CN=kv")
    for names in (("cert", "key"), ("other-cert", "other")):
        files = ("-out", home / f"{names[0]}.pem", "-keyout", home / f"{names[1]}.pem")
        subprocess.run(
            [openssl, *made, "-addext", "subjectAltName=IP:127.0.0.1", *files],
            check=True,
            capture_output=True,
        )
    encrypt = ("rsa", "-aes128", "-passout", "pass:secret", "-in", home / "key.pem")
    subprocess.run(
        [openssl, *encrypt, "-out", home / "encrypted.pem"], check=True, capture_output=True
    )
    return home


def test_over_tls_blobs_come_back_as_they_were_put(tmp_path: Path, certificate: Path) -> None:
    nbytes = 5 * MIB + 3
    environ = {
        "BLOBSTORE__HTTP__TLS_CERT": os.fspath(certificate / "cert.pem"),
        "BLOBSTORE__HTTP__TLS_KEY": os.fspath(certificate / "key.pem"),
        "BLOBSTORE__HTTP__IO_TIMEOUT_S": "1",
    }
    with http_daemon(tmp_path, environ=environ) as door:
        assert door.url.startswith("https://127.0.0.1:")
        door.tls = ssl.create_default_context(cafile=certificate / "cert.pem")
        path = f"{door.declare(nbytes)}/blobs/{key(1)}"
        data = pattern(nbytes)
        assert put(door, path, data).status == 201
        assert door.ask("GET", path).body == data
        assert door.ask("GET", path, headers={"Range": "bytes=5-9"}).body == data[5:10]
        with door.connect(receive_bytes=4096) as peer:  # a reader that stops
            encrypted = door.tls.wrap_socket(peer, server_hostname="127.0.0.1")
            with encrypted:
                encrypted.sendall(door.head_of("GET", path))
                assert encrypted.recv(1024).startswith(b"HTTP/1.1 200")
                poll_until(door.nothing_is_lent, 10.0)
        with door.connect() as peer:  # not TLS
            peer.sendall(door.head_of("GET", path))
            peer.settimeout(10.0)
            assert not peer.recv(100).startswith(b"HTTP/1.1 2")
        assert "Traceback" not in door.run.said


@pytest.mark.parametrize(
    ("cert", "own_key", "words"),
    [
        ("cert.pem", "other.pem", "belong together"),
        ("key.pem", "key.pem", "PEM"),
        ("cert.pem", "", "PEM"),
        ("cert.pem", "encrypted.pem", "passphrase"),
        (".", "key.pem", "directory"),
    ],
)
def test_tls_that_cannot_work_is_one_line(
    tmp_path: Path, certificate: Path, cert: str, own_key: str, words: str
) -> None:
    environ = {"BLOBSTORE__HTTP__TLS_CERT": os.fspath(certificate / cert)}
    if own_key:
        environ["BLOBSTORE__HTTP__TLS_KEY"] = os.fspath(certificate / own_key)
    code, said = refused(tmp_path, "--http", "127.0.0.1:0", environ=environ)
    assert (code, words in said) == (1, True), said


def test_handshakes_that_stall_count_as_connections(tmp_path: Path, certificate: Path) -> None:
    environ = {
        "BLOBSTORE__HTTP__TLS_CERT": os.fspath(certificate / "cert.pem"),
        "BLOBSTORE__HTTP__TLS_KEY": os.fspath(certificate / "key.pem"),
        "BLOBSTORE__HTTP__MAX_CONNECTIONS": "20",
    }
    with http_daemon(tmp_path, environ=environ) as door, ExitStack() as stack:
        door.tls = ssl.create_default_context(cafile=certificate / "cert.pem")
        descriptors = Path(f"/proc/{door.run.process.pid}/fd")
        before = len(os.listdir(descriptors))
        peers = [stack.enter_context(door.connect()) for _ in range(100)]
        poll_until(lambda: len(select.select(peers, [], [], 0)[0]) == 80)  # hung up on
        assert len(os.listdir(descriptors)) <= before + 21
        stack.close()
        poll_until(lambda: _answers(door))


def _answers(door: HttpDaemon) -> bool:
    try:
        return door.ask("GET", "/v1/stats").status == 200
    except OSError:
        return False


def test_with_tls_it_may_listen_on_every_address(tmp_path: Path, certificate: Path) -> None:
    environ = {
        "BLOBSTORE__HTTP__TLS_CERT": os.fspath(certificate / "cert.pem"),
        "BLOBSTORE__HTTP__TLS_KEY": os.fspath(certificate / "key.pem"),
    }
    with http_daemon(tmp_path, "--http", "0.0.0.0:0", environ=environ) as door:
        door.host, door.tls = "127.0.0.1", ssl.create_default_context()
        door.tls.load_verify_locations(certificate / "cert.pem")
        for host, status in (("127.0.0.1", 200), ("10.1.2.3:99", 200), ("evil.example", 421)):
            assert door.ask("GET", "/v1/stats", headers={"Host": host}).status == status


def test_health_is_told_to_whoever_names_no_host(door: HttpDaemon) -> None:
    with door.connect() as peer:
        peer.sendall(b"GET /readyz HTTP/1.0\r\n\r\n")
        assert peer.recv(65536).startswith(b"HTTP/1.0 200 ")


def test_a_target_with_a_host_is_for_that_host(door: HttpDaemon) -> None:
    for host, status in (("evil.example", b"421"), (f"127.0.0.1:{door.port}", b"200")):
        with door.connect() as peer:
            peer.sendall(door.head_of("GET", f"http://{host}/v1/stats"))
            assert peer.recv(65536).startswith(b"HTTP/1.1 %s " % status)


def test_verify_needs_no_body(door: HttpDaemon) -> None:
    answer = door.ask("POST", "/v1/verify")
    assert (answer.status, answer.json["complete"]) == (200, True)


def test_a_token_that_was_taken_away_opens_nothing_more(tmp_path: Path) -> None:
    secret = SECRETS["reader"]
    entry = TOKENS.partition('[[token]]\nname = "writer')[0].format(
        reader=hashlib.sha256(secret.encode()).hexdigest()
    )
    file = tmp_path / "tokens.toml"
    file.write_text(entry)
    with http_daemon(tmp_path, environ={"BLOBSTORE__HTTP__TOKENS": os.fspath(file)}) as door:
        assert door.ask("GET", "/v1/stats", token=secret).status == 200
        file.write_text("")
        poll_until(lambda: door.ask("GET", "/v1/stats", token=secret).status == 401)
        assert door.ask("GET", "/v1/stats").status == 200


def test_every_answer_tells_which_run_it_is_of(door: HttpDaemon) -> None:
    boot = str(door.stats()["boot_id"])
    path = f"{door.declare(8, 'boot')}/blobs/{key(1)}"
    put(door, path, bytes(8))
    for method, where in (("GET", path), ("HEAD", path), ("GET", "/healthz"), ("GET", "/nothing")):
        assert door.ask(method, where).headers["x-blobstore-boot"] == boot

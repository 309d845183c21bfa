"""The commands that put, find, list and drop blobs, against a store in this process."""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blobstore.cli import main, transfer
from blobstore.clients import Client, KVLayout, Namespace
from blobstore.config import ENV_PREFIX
from blobstore.index import NamespaceState
from blobstore.store import Store
from blobstore.units import KIB, MIB
from tests.support.polling import poll_until
from tests.support.served_store import ServedStore, served_store

Output = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


@pytest.fixture
def served(tmp_path: Path, monkeypatch: Patch) -> Iterator[ServedStore]:
    for name in list(os.environ):
        if name.startswith(ENV_PREFIX) or name == "BLOBSTORE_CONFIG":
            monkeypatch.delenv(name)
    with served_store(tmp_path / "b.sock") as found:
        monkeypatch.setenv("BLOBSTORE__LOCAL__SOCKET", os.fspath(found.path))
        yield found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file that can be put."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(100 * KIB))
    return path


def said(capsys: Output, *arguments: object) -> str:
    """Standard output of a command that succeeds."""
    assert main([str(argument) for argument in arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def told(capsys: Output, *arguments: object) -> Any:
    """The same as JSON."""
    return json.loads(said(capsys, *arguments, "--json"))


def refused(capsys: Output, *arguments: object) -> tuple[int, str]:
    """Exit code of a command that fails, and its one line on standard error."""
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return code, err


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def chain(
    served: ServedStore, n: int, nbytes: int = KIB, model: str = "m"
) -> tuple[str, list[str]]:
    """A chain of blobs that is held; the namespace's id and the keys, in hex."""
    ns = Namespace(model, KVLayout.opaque(nbytes), tokens_per_blob=16)
    keys = ns.keys(range(16 * n))
    with Client(served.address, timeout_s=20.0) as kv:
        results = kv.put_from(kv.namespace(ns), keys, bytes(n * nbytes), retention="durable")
    assert results == ["stored"] * n
    return ns.id.hex(), [key.hex() for key in keys]


def branch(served: ServedStore, n: int, *, shared: int) -> list[str]:
    """A chain as of `chain` of which only the first blobs are the same; its keys."""
    ns = Namespace("m", KVLayout.opaque(KIB), tokens_per_blob=16)
    keys = ns.keys([*range(16 * shared), *range(5000, 5000 + 16 * (n - shared))])
    with Client(served.address, timeout_s=20.0) as kv:
        kv.put_from(kv.namespace(ns), keys, bytes(n * KIB))
    return [key.hex() for key in keys]


class TestPutAndGet:
    def test_a_file_comes_back(
        self, served: ServedStore, file: Path, tmp_path: Path, capsys: Output
    ) -> None:
        put = told(capsys, "put", file, "--model", "m")
        assert put["result"] == "stored"
        assert put["nbytes"] == 100 * KIB
        assert put["key"] == sha256(file.read_bytes())
        copy = tmp_path / "copy"
        got = told(capsys, "get", put["namespace"], put["key"], "-o", copy)
        assert copy.read_bytes() == file.read_bytes()
        assert got["tier"] == "dram"
        assert (got["nbytes"], got["output"]) == (100 * KIB, str(copy))

    def test_people_read_names_sizes_and_rates(
        self, served: ServedStore, file: Path, tmp_path: Path, capsys: Output
    ) -> None:
        out = said(capsys, "put", file, "--model", "m")
        key = sha256(file.read_bytes())
        assert out.splitlines()[0].startswith("stored")
        assert "100 KiB in" in out
        assert "iB/s)" in out
        assert f"key        {key}" in out
        assert "the same bytes were held before" in said(capsys, "put", file, "--model", "m")
        line = said(capsys, "get", "--model", "m", key, "-o", tmp_path / "copy")
        assert "100 KiB in" in line
        assert "from dram" in line

    def test_bytes_go_to_standard_output(
        self, served: ServedStore, file: Path, capsysbinary: pytest.CaptureFixture[bytes]
    ) -> None:
        assert main(["put", str(file), "--model", "m"]) == 0
        capsysbinary.readouterr()
        assert main(["get", "--model", "m", sha256(file.read_bytes())]) == 0
        assert capsysbinary.readouterr().out == file.read_bytes()

    def test_the_namespace_is_that_of_any_client(
        self, served: ServedStore, file: Path, capsys: Output
    ) -> None:
        put = told(capsys, "put", file, "--model", "m", "--revision", "r")
        assert put["namespace"] == Namespace("m", KVLayout.opaque(100 * KIB), "r").id.hex()

    def test_an_empty_file_is_a_blob_too(
        self, served: ServedStore, tmp_path: Path, capsys: Output
    ) -> None:
        empty, copy = tmp_path / "empty", tmp_path / "copy"
        empty.touch()
        assert told(capsys, "put", empty, "--model", "m")["result"] == "stored"
        assert told(capsys, "get", "--model", "m", sha256(b""), "-o", copy)["nbytes"] == 0
        assert copy.read_bytes() == b""

    def test_a_key_is_not_given_other_bytes(
        self, served: ServedStore, file: Path, capsys: Output
    ) -> None:
        arguments = ("put", file, "--model", "m", "--key", "ab" * 8)
        assert told(capsys, *arguments)["result"] == "stored"
        assert told(capsys, *arguments)["result"] == "exists"
        file.write_bytes(os.urandom(100 * KIB))
        code, line = refused(capsys, *arguments)
        assert code == 1
        assert "other bytes are held" in line

    def test_blobs_of_a_chain_name_their_parent(
        self, served: ServedStore, file: Path, capsys: Output
    ) -> None:
        first = told(capsys, "put", file, "--model", "m")
        ns, parent = first["namespace"], first["key"]
        again = told(capsys, "put", file, "-n", ns[:8], "--parent", parent)
        assert again["key"] == sha256(bytes.fromhex(parent) + file.read_bytes())
        assert told(capsys, "stat", ns, again["key"])["parent"] == parent
        code, line = refused(capsys, "put", file, "-n", ns, "--parent", "cd" * 32)
        assert (code, "that it continues is not held" in line) == (1, True)

    def test_a_parent_of_another_length_is_refused_at_once(
        self, served: ServedStore, file: Path, capsys: Output
    ) -> None:
        code, line = refused(capsys, "put", file, "--model", "m", "--parent", "ab" * 8)
        assert code == 2
        assert "one length" in line

    def test_durable_means_on_disk(self, served: ServedStore, file: Path, capsys: Output) -> None:
        put = told(capsys, "put", file, "--model", "m", "--retention", "durable")
        facts = told(capsys, "stat", put["namespace"], put["key"])
        assert facts["retention"] == "durable"
        assert "ssd" in facts["tiers"]

    def test_a_size_that_is_not_the_namespace_s_is_refused_with_both(
        self, served: ServedStore, file: Path, capsys: Output
    ) -> None:
        ns, _ = chain(served, 1)
        code, line = refused(capsys, "put", file, "-n", ns)
        assert code == 2
        assert "102400" in line
        assert "1024" in line

    @pytest.mark.parametrize("where", [(), ("--model", "m", "-n", "ab" * 32)])
    def test_put_wants_one_place(
        self, served: ServedStore, file: Path, capsys: Output, where: tuple[str, ...]
    ) -> None:
        code, line = refused(capsys, "put", file, *where)
        assert code == 2
        assert "--model" in line

    def test_what_is_too_large_is_refused_before_it_is_read(
        self, served: ServedStore, tmp_path: Path, capsys: Output
    ) -> None:
        large = tmp_path / "large"
        with large.open("wb") as opened:
            opened.truncate(1 << 40)
        for path in (large, "/dev/zero"):
            code, line = refused(capsys, "put", path, "--model", "m")
            assert code == 1
            assert f"{8 * MIB:,} bytes" in line

    def test_a_refusal_is_told_in_words(
        self, served: ServedStore, file: Path, capsys: Output, monkeypatch: Patch
    ) -> None:
        def answers(result: str, reason: str) -> None:
            answer = result, reason, 0.1
            monkeypatch.setattr("blobstore.cli.put._write", lambda *_, **__: answer)

        for reason, code, words in (
            ("no_room", 3, "no room"),
            ("full", 3, "no room"),
            ("deadline", 3, "--timeout"),
            ("unavailable", 3, "went away"),
            ("too_large", 1, "dram.size"),
            ("a_new_reason", 1, "a_new_reason"),
        ):
            answers("refused", reason)
            found, line = refused(capsys, "put", file, "--model", "m")
            assert (found, words in line) == (code, True)
            assert main(["put", str(file), "--model", "m", "--json"]) == code
            assert json.loads(capsys.readouterr().out)["reason"] == reason

    def test_what_cannot_be_read_fails(
        self, served: ServedStore, tmp_path: Path, capsys: Output
    ) -> None:
        for path in (tmp_path / "none", tmp_path):
            code, line = refused(capsys, "put", path, "--model", "m")
            assert code == 1
            assert f"cannot read {path}" in line

    def test_a_file_that_shrinks_meanwhile_is_not_stored(
        self, served: ServedStore, file: Path, capsys: Output, monkeypatch: Patch
    ) -> None:
        def shrink(*_: object) -> bytes:
            os.truncate(file, KIB)
            return bytes(32)

        monkeypatch.setattr("blobstore.cli.put.sha256", shrink)
        code, line = refused(capsys, "put", file, "--model", "m")
        assert code != 0
        assert "shorter" in line
        assert served.call(Store.stats)["blobs"] == 0

    def test_a_miss_exits_1_with_one_line_and_leaves_the_file_alone(
        self, served: ServedStore, tmp_path: Path, capsys: Output
    ) -> None:
        ns, _ = chain(served, 1)
        copy = tmp_path / "copy"
        copy.write_text("before")
        code, line = refused(capsys, "get", ns, "cd" * 32, "-o", copy)
        assert code == 1
        assert "miss" in line
        assert "absent" in line
        assert copy.read_text() == "before"
        assert {path.name for path in tmp_path.iterdir()} <= {
            "copy",
            "data",
            "b.sock",
            "b.sock.pid",
        }

    def test_a_file_that_is_replaced_keeps_its_mode(
        self, served: ServedStore, tmp_path: Path, capsys: Output
    ) -> None:
        ns, (key,) = chain(served, 1)
        copy, link = tmp_path / "copy", tmp_path / "link"
        copy.touch(0o600)
        link.symlink_to(copy)
        said(capsys, "get", ns, key, "-o", link)
        assert link.is_symlink()
        assert copy.read_bytes() == bytes(KIB)
        assert stat.S_IMODE(copy.stat().st_mode) == 0o600

    def test_a_file_that_cannot_be_written_fails(
        self, served: ServedStore, tmp_path: Path, capsys: Output
    ) -> None:
        ns, (key,) = chain(served, 1)
        code, line = refused(capsys, "get", ns, key, "-o", tmp_path / "no" / "copy")
        assert code == 1
        assert "cannot write" in line
        said(capsys, "get", ns, key, "-o", os.devnull)

    def test_bytes_do_not_go_to_a_terminal_or_between_json(
        self, served: ServedStore, capsys: Output, monkeypatch: Patch
    ) -> None:
        ns, (key,) = chain(served, 1)
        code, line = refused(capsys, "get", ns, key, "--json")
        assert (code, "--output" in line) == (2, True)
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)
        code, line = refused(capsys, "get", ns, key)
        assert (code, "--output" in line) == (2, True)

    def test_get_takes_one_key(self, served: ServedStore, capsys: Output) -> None:
        assert refused(capsys, "get", "ab" * 32, "cd" * 8, "cd" * 8)[0] == 2
        assert refused(capsys, "get", "ab" * 32)[0] == 2

    def test_large_payloads_show_a_bar_where_there_is_a_terminal(
        self, served: ServedStore, file: Path, capsys: Output, monkeypatch: Patch
    ) -> None:
        monkeypatch.setattr(transfer, "BAR_BYTES", KIB)
        assert "hashing" not in said(capsys, "put", file, "--model", "a")
        monkeypatch.setattr("sys.stderr.isatty", lambda: True)
        monkeypatch.setenv("TERM", "xterm")
        assert main(["put", str(file), "--model", "b"]) == 0
        out, err = capsys.readouterr()
        assert "writing" in err
        assert "writing" not in out

    def test_one_line_is_all_that_is_said_of_a_daemon_that_is_not_there(
        self, tmp_path: Path, file: Path, capsys: Output
    ) -> None:
        for arguments in (
            ("put", file, "--model", "m"),
            ("get", "ab" * 32, "cd" * 32, "-o", tmp_path / "copy"),
            ("match", "ab" * 32, "cd" * 32),
            ("ls",),
            ("rm", "ab" * 32, "cd" * 32),
            ("pin", "ab" * 32, "cd" * 32),
            ("top", "--once"),
        ):
            code, line = refused(capsys, *arguments, "--socket", tmp_path / "none.sock")
            assert code == 3
            assert "blobstore serve" in line


class TestNames:
    def test_the_start_of_an_id_is_enough(self, served: ServedStore, capsys: Output) -> None:
        ns, keys = chain(served, 1)
        for digits in (8, 9, 31, 63, 64):
            assert told(capsys, "match", ns[:digits].upper(), *keys)["namespace"] == ns

    @pytest.mark.parametrize("text", ["abcdef0", "", "xyzxyzxyz", "ab" * 33, "\u0661" * 8])
    def test_what_is_no_start_of_an_id_is_refused(
        self, served: ServedStore, capsys: Output, text: str
    ) -> None:
        code, line = refused(capsys, "match", text, "cd" * 32)
        assert code == 2
        assert "hex digits" in line

    def test_a_start_that_several_have_is_refused_with_their_names(
        self, served: ServedStore, capsys: Output
    ) -> None:
        ids = [bytes.fromhex("ab" * 4 + end * 28) for end in ("00", "77", "ff")]

        def declare(store: Store) -> None:
            for number, ns_id in enumerate(ids):
                state = NamespaceState(Namespace(f"m{number}", KVLayout.opaque(1)))
                state.id = ns_id
                store.index.namespaces[ns_id] = state
                store.index.order.add(ns_id)

        served.call(declare)
        code, line = refused(capsys, "ls", "ab" * 4)
        assert code == 2
        assert "several" in line
        assert "abababab7777" in line
        assert told(capsys, "ls", "ababABab7")["namespace"]["id"] == ids[1].hex()
        assert told(capsys, "ls", ids[0].hex())["namespace"]["id"] == ids[0].hex()

    def test_a_name_that_none_has_is_refused(self, served: ServedStore, capsys: Output) -> None:
        chain(served, 1)
        for named in (("ab" * 4,), ("--model", "other"), ("--model", "m", "--revision", "x")):
            code, line = refused(capsys, "ls", *named)
            assert code == 2
            assert "blobstore ls" in line

    def test_a_model_names_its_only_namespace(self, served: ServedStore, capsys: Output) -> None:
        ns, keys = chain(served, 2)
        chain(served, 1, model="other")
        assert told(capsys, "match", "--model", "m", *keys)["blobs"] == 2
        assert told(capsys, "ls", "--model", "m", "--revision", "")["namespace"]["id"] == ns

    def test_of_several_with_the_model_it_is_the_one_that_holds_the_key(
        self, served: ServedStore, capsys: Output
    ) -> None:
        small, (small_key,) = chain(served, 1)
        large, (large_key,) = chain(served, 1, nbytes=2 * KIB)
        assert told(capsys, "match", "--model", "m", small_key)["namespace"] == small
        assert told(capsys, "match", "--model", "m", large_key)["namespace"] == large
        assert refused(capsys, "ls", "--model", "m")[0] == 2
        code, line = refused(capsys, "rm", "--model", "m", "ab" * 32)
        assert (code, "held in none of 2" in line) == (1, True)

    @pytest.mark.parametrize(
        "arguments",
        [
            ["match", "ab" * 32],
            ["match", "--model", "m"],
            ["match", "ab" * 32, "cd" * 7],
            ["match", "ab" * 32, "cd" * 8, "cd" * 9],
            ["match", "--model", "m", "ab" * 32, "zz" * 32],
            ["ls", "ab" * 32, "--model", "m"],
            ["ls", "--revision", "r"],
            ["ls", "--limit", "0"],
            ["ls", "--after", "xyz"],
            ["rm", "ab" * 32, "cd" * 32, "--tier", "hbm"],
            ["pin", "ab" * 32, "cd" * 32, "--ttl", "soon"],
            ["pin", "ab" * 32, "cd" * 32, "--ttl", "31d"],
            ["stat", "ab" * 32, "cd" * 8, "cd" * 8],
        ],
    )
    def test_mistakes_exit_2(
        self, served: ServedStore, capsys: Output, arguments: list[str]
    ) -> None:
        assert refused(capsys, *arguments)[0] == 2

    def test_a_key_without_its_namespace_is_asked_for_it(
        self, served: ServedStore, capsys: Output
    ) -> None:
        _, said = refused(capsys, "get", "ab" * 32)
        assert "name a namespace (its id, or --model) and then a key" in said

    def test_an_address_of_http_is_no_socket(self, served: ServedStore, capsys: Output) -> None:
        code, said = refused(capsys, "stats", "--socket", "http://127.0.0.1:8470")
        assert code == 2
        assert "over HTTP use curl" in said

    def test_keys_may_come_from_standard_input(
        self, served: ServedStore, capsys: Output, monkeypatch: Patch
    ) -> None:
        ns, keys = chain(served, 3)
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(keys[1:]) + "\n\n"))
        assert told(capsys, "match", ns, keys[0], "-")["blobs"] == 3


class TestMatchPinAndRm:
    def test_match_counts_leading_blobs_by_tier(self, served: ServedStore, capsys: Output) -> None:
        ns, keys = chain(served, 4)
        assert told(capsys, "rm", ns, keys[3], "--tier", "dram")["count"] == 1
        found = told(capsys, "match", ns, *keys, "ab" * 32)
        assert (found["keys"], found["blobs"], found["tokens"]) == (5, 4, 64)
        assert found["tiers"] == {"dram": 3, "ssd": 1}
        out = said(capsys, "match", ns, *keys, "ab" * 32)
        assert "4 of 5 blobs are held: 64 tokens" in out
        assert "3 in dram, 1 on ssd alone" in out
        assert "0 of 1 blobs are held" in said(capsys, "match", ns, "ab" * 32)

    def test_rm_says_what_went_along(self, served: ServedStore, capsys: Output) -> None:
        ns, keys = chain(served, 5)
        out = said(capsys, "rm", ns, keys[4], keys[2], "ab" * 32)
        assert "dropped 3 blobs: 2 named, 1 that continued them" in out
        assert "1 of the keys were not held" in out
        dropped = told(capsys, "rm", ns, keys[0])
        assert (dropped["count"], dropped["held"], dropped["tier"]) == (2, 1, None)
        code, line = refused(capsys, "rm", ns, *keys)
        assert (code, "none of 5 keys is held" in line) == (1, True)
        assert main(["rm", ns, *keys, "--json"]) == 1
        assert json.loads(capsys.readouterr().out)["count"] == 0

    def test_rm_may_forget_as_well(self, served: ServedStore, capsys: Output) -> None:
        ns, keys = chain(served, 5)
        assert "forgot 3 blobs, and their tokens" in said(capsys, "rm", ns, keys[2], "--forget")
        body = told(capsys, "rm", ns, keys[0], "--forget")
        assert (body["count"], body["held"], body["forget"]) == (2, 1, True)
        code, line = refused(capsys, "rm", ns, keys[0], "--forget")
        assert (code, "it is not held" in line) == (1, True)
        code, line = refused(capsys, "rm", ns, keys[0], "--forget", "--tier", "dram")
        assert (code, "without --tier" in line) == (2, True)

    def test_rm_of_a_tier_keeps_the_blobs(self, served: ServedStore, capsys: Output) -> None:
        ns, keys = chain(served, 2)
        assert "freed 2 of 2 in dram" in said(capsys, "rm", ns, *keys, "--tier", "dram")
        code, line = refused(capsys, "rm", ns, *keys, "--tier", "dram")
        assert (code, "nothing was freed" in line) == (1, True)
        assert told(capsys, "match", ns, *keys)["tiers"] == {"dram": 0, "ssd": 2}

    def test_pin_holds_until_it_is_ended(self, served: ServedStore, capsys: Output) -> None:
        ns, keys = chain(served, 2)
        assert "1 of 1 pinned for 2 h 0 min" in said(capsys, "pin", ns, keys[1], "--ttl", "2h")
        poll_until(lambda: told(capsys, "stat", ns, keys[1])["pins"] == 1)
        body = told(capsys, "pin", ns, keys[1], "--ttl", "0")
        assert (body["count"], body["ttl_s"]) == (1, 0.0)
        assert told(capsys, "stat", ns, keys[1])["pins"] == 0
        code, line = refused(capsys, "pin", ns, "ab" * 32)
        assert (code, "nothing was pinned" in line) == (1, True)
        assert told(capsys, "pin", ns, keys[0], "--ttl", "1.5m")["ttl_s"] == 90.0


class TestSupersede:
    def test_what_only_the_old_context_has_leaves_first(
        self, served: ServedStore, capsys: Output
    ) -> None:
        ns, old = chain(served, 3)
        new = branch(served, 3, shared=1)
        line = said(capsys, "supersede", ns, old[-1], new[-1])
        assert line == "2 blobs of the old context leave first from now on\n"
        assert served.call(lambda store: store.stats()["superseded"]["blobs"]) == 2
        body = told(capsys, "supersede", ns, old[-1], new[-1])
        assert (body["old_leaf"], body["new_leaf"], body["count"]) == (old[-1], new[-1], 2)
        assert told(capsys, "match", ns, *old)["blobs"] == 3

    def test_what_cannot_be_is_refused_in_words(self, served: ServedStore, capsys: Output) -> None:
        ns, old = chain(served, 2)
        missing = "ab" * 32
        for keys, word in (
            ((missing, old[1]), "old context's last blob is not held"),
            ((old[1], missing), "new context's last blob is not held"),
            ((old[0], old[1]), "others go on"),
        ):
            code, line = refused(capsys, "supersede", ns, *keys)
            assert (code, word in line) == (1, True)
        code, line = refused(capsys, "supersede", ns, old[0])
        assert (code, "name two keys" in line) == (2, True)


class TestLs:
    def test_namespaces_with_what_they_take(self, served: ServedStore, capsys: Output) -> None:
        ns, keys = chain(served, 3)
        other, _ = chain(served, 1, nbytes=2 * KIB, model="other")
        said(capsys, "rm", ns, keys[2], "--tier", "dram")
        body = told(capsys, "ls")
        assert body["next"] is None
        found = {facts["id"]: facts for facts in body["namespaces"]}
        assert list(found) == sorted((ns, other))
        assert (found[ns]["blobs"], found[ns]["dram_bytes"], found[ns]["ssd_bytes"]) == (
            3, 2 * KIB, 3 * KIB,
        )  # fmt: skip
        lines = said(capsys, "ls").splitlines()
        assert lines[0].split() == [
            *("namespace", "model", "revision", "blobs", "of", "in", "dram", "on", "ssd")
        ]
        (row,) = (line for line in lines if line.startswith(ns))
        assert row.split() == [ns, "m", "3", "1", "KiB", "2", "KiB", "3", "KiB"]

    def test_blobs_of_one_with_their_facts(self, served: ServedStore, capsys: Output) -> None:
        ns, keys = chain(served, 3)
        body = told(capsys, "ls", ns)
        assert [blob["key"] for blob in body["blobs"]] == sorted(keys)
        assert body["namespace"]["id"] == ns
        assert "encoding" not in body["namespace"]
        assert body["next"] is None
        title, head, *rows = said(capsys, "ls", ns).splitlines()
        assert title.split() == [ns, "m"]
        assert head.split() == ["key", "tokens", "size", "tiers", "retention", "idle", "pins"]
        assert [row.split()[0] for row in rows] == sorted(keys)
        assert rows[0].split()[1:6] == ["16", "1", "KiB", "dram+ssd", "durable"]

    def test_pages_go_on_where_the_last_one_ended(
        self, served: ServedStore, capsys: Output, monkeypatch: Patch
    ) -> None:
        ns, keys = chain(served, 7)
        monkeypatch.setattr("blobstore.cli.ls.PAGE", 2)
        seen: list[str] = []
        after: list[str] = []
        while True:
            body = told(capsys, "ls", ns, "--limit", 3, *after)
            seen += [blob["key"] for blob in body["blobs"]]
            if body["next"] is None:
                break
            after = ["--after", body["next"]]
        assert seen == sorted(keys)
        assert said(capsys, "ls", ns, "--limit", 3).endswith(f"more: --after {seen[2]}\n")
        assert "more" not in said(capsys, "ls", ns, "--limit", 7)

    def test_pages_of_namespaces(self, served: ServedStore, capsys: Output) -> None:
        ids = sorted(chain(served, 1, model=f"m{number}")[0] for number in range(3))
        first = told(capsys, "ls", "--limit", 2)
        assert [facts["id"] for facts in first["namespaces"]] == ids[:2]
        rest = told(capsys, "ls", "--after", first["next"])
        assert [facts["id"] for facts in rest["namespaces"]] == ids[2:]

    def test_names_cannot_move_the_cursor(self, served: ServedStore, capsys: Output) -> None:
        chain(served, 1, model="a\x1b[2J\nb")
        assert "a\ufffd[2J\ufffdb" in said(capsys, "ls")

    def test_names_too_long_for_one_answer_come_in_several(
        self, served: ServedStore, capsys: Output, monkeypatch: Patch
    ) -> None:
        ids = sorted(chain(served, 1, model=f"{number}" + "m" * 4000)[0] for number in range(5))
        monkeypatch.setattr("blobstore.transports.framing.MAX_BODY_BYTES", 10_000)
        assert [facts["id"] for facts in told(capsys, "ls")["namespaces"]] == ids

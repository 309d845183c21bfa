from __future__ import annotations

import os
from pathlib import Path

import pytest

from blobstore import config
from blobstore.config import Config, load
from blobstore.config_values import SOCKET_PATH_MAX
from blobstore.errors import InvalidRequest
from blobstore.units import GIB, MIB


def written(folder: Path, text: str) -> Path:
    path = folder / "blobstore.toml"
    path.write_text(text, encoding="utf-8")
    return path


def source_of(tree: Config, dotted: str) -> str:
    return next(e.source for e in tree.entries() if f"{e.section}.{e.key}" == dotted)


def test_without_sources_every_value_is_a_default() -> None:
    tree = load(environ={})
    assert tree.dram.size == "auto"
    assert {entry.source for entry in tree.entries()} == {"default"}


def test_later_sources_win_key_by_key_and_are_named(tmp_path: Path) -> None:
    path = written(tmp_path, '[dram]\nsize = "1GiB"\nstaging = "64MiB"\nhuge_pages = "auto"\n')
    environ = {"BLOBSTORE__DRAM__SIZE": "2GiB", "BLOBSTORE__DRAM__STAGING": "96MiB", "HOME": "/"}
    tree = load(path, flags={"dram.size": "3GiB", "ssd.size": None}, environ=environ)
    assert (tree.dram.size, tree.dram.staging, tree.dram.huge_pages) == (3 * GIB, 96 * MIB, "auto")
    assert source_of(tree, "dram.size") == "command line"
    assert source_of(tree, "dram.staging") == "environment BLOBSTORE__DRAM__STAGING"
    assert source_of(tree, "dram.huge_pages") == f"file {path}"
    assert source_of(tree, "ssd.size") == "default"


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("4GiB", 4 * GIB), ("4GB", 4_000_000_000), ("4096", 4096), ("1.5 MiB", 3 * MIB // 2)],
)
def test_sizes_in_human_units(text: str, nbytes: int) -> None:
    assert load(environ={"BLOBSTORE__DRAM__SIZE": text}).dram.size == nbytes


def test_off_is_no_ssd_and_auto_stays_auto() -> None:
    assert load(environ={"BLOBSTORE__SSD__SIZE": "off"}).ssd.size == 0
    assert load(environ={"BLOBSTORE__SSD__SIZE": "auto"}).ssd.size == "auto"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("BLOBSTORE__DRAM__SIEZ", "did you mean dram.size?"),
        ("BLOBSTORE__MEMORY__STAGING", "did you mean dram.staging?"),
        ("BLOBSTORE__NOTHING__LIKE_IT", "config show"),
        ("BLOBSTORE__DRAM", "unknown key dram "),
        ("BLOBSTORE__DRAM__SIZE__MAX", "did you mean dram.size?"),
    ],
)
def test_an_unknown_key_is_an_error_that_names_its_source_and_the_nearest(
    name: str, hint: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        load(environ={name: "1GiB"})
    assert hint in str(caught.value)
    assert name in str(caught.value)


@pytest.mark.parametrize(
    "text", ["[drm]\nsize = 1\n", "size = 1\n", "[drm]\n", "[dram.x]\ny = 1\n"]
)
def test_an_unknown_key_in_a_file_is_an_error_that_names_the_file(
    tmp_path: Path, text: str
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(InvalidRequest, match="unknown key") as caught:
        load(path, environ={})
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("dotted", "value", "message"),
    [
        ("dram.size", "4 parsecs", "unknown unit"),
        ("dram.size", "much", "not a size"),
        ("dram.size", "", "not a size"),
        ("dram.size", -1, "not a size"),
        ("dram.size", 1.5, "not a size"),
        ("dram.size", True, "not a size"),
        ("dram.size", "off", "not a size"),
        ("dram.huge_pages", "maybe", "off, auto, require"),
        ("local.max_clients", "0", "above 0"),
        ("local.max_clients", "many", "above 0"),
        ("local.max_clients", True, "above 0"),
        ("local.uids", "1000,root", "user ids"),
        ("local.uids", [-1], "user ids"),
        ("local.uids", 7, "user ids"),
        ("local.socket", "/" + "x" * SOCKET_PATH_MAX, f"{SOCKET_PATH_MAX} bytes"),
        ("local.socket", "", "not a path"),
        ("store.data", "a\0b", "not a path"),
        ("store.data", 7, "not a path"),
        ("times.drain_s", "soon", "seconds"),
        ("times.drain_s", "inf", "seconds"),
        ("times.drain_s", "nan", "seconds"),
        ("times.drain_s", -1, "seconds"),
        ("times.reservation_s", 0, "above 0"),
        ("log.level", "loud", "debug, info, warning, error"),
        ("tiering.policy", "best", "ours, lru, fifo"),
        ("tiering.objective", "fame", "tokens, cost"),
        ("tiering.dram_low", "1", "from 0 to below 1"),
        ("tiering.dram_low", "nan", "from 0 to below 1"),
        ("tiering.ssd_spare", -0.1, "from 0 to below 1"),
        ("tiering.ssd_spare", True, "from 0 to below 1"),
        ("tiering.ssd_spare", "some", "from 0 to below 1"),
        ("tiering.demote_rate", "fast", "not a size"),
        ("tiering.demote_rate", -1, "not a size"),
    ],
)
def test_a_bad_value_is_an_error_that_names_key_and_source(
    dotted: str, value: object, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        load(flags={dotted: value}, environ={})
    assert dotted in str(caught.value)
    assert "command line" in str(caught.value)


def test_a_missing_or_broken_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"none\.toml: No such file"):
        load(tmp_path / "none.toml", environ={})
    path = written(tmp_path, "[dram\n")
    with pytest.raises(InvalidRequest, match=r"blobstore\.toml is not TOML.*line 1"):
        load(path, environ={})
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidRequest, match="not TOML"):
        load(path, environ={})


def test_the_longest_socket_path_is_accepted_with_and_without_scheme() -> None:
    path = "/" + "x" * (SOCKET_PATH_MAX - 1)
    assert load(flags={"local.socket": f"unix:{path}"}, environ={}).local.socket == Path(path)
    assert load(flags={"local.socket": path}, environ={}).local.socket == Path(path)


def test_lists_come_from_toml_and_from_text(tmp_path: Path) -> None:
    path = written(tmp_path, "[local]\nuids = [1000, 1001]\n")
    assert load(path, environ={}).local.uids == (1000, 1001)
    assert load(environ={"BLOBSTORE__LOCAL__UIDS": "1000, 1001"}).local.uids == (
        1000,
        1001,
    )
    assert load(environ={"BLOBSTORE__LOCAL__UIDS": ""}).local.uids == ()


def test_an_empty_path_means_no_directory_where_that_is_allowed() -> None:
    assert load(environ={"BLOBSTORE__DRAM__DIRECTORY": ""}).dram.directory is None


def test_relative_paths_are_taken_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load(flags={"store.data": "here"}, environ={}).store.data == tmp_path / "here"


def test_defaults_of_an_ordinary_user_are_in_its_own_folders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_DATA_HOME", "/home/ann/data")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
    tree = load(environ={})
    assert tree.store.data == Path("/home/ann/data/blobstore")
    assert tree.local.socket == Path("/run/user/1000/blobstore.sock")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert load(environ={}).local.socket == Path("/home/ann/data/blobstore/blobstore.sock")


def test_every_entry_is_plain_enough_for_toml_and_json_and_can_be_read_again() -> None:
    tree = load(environ={})
    flags = {f"{entry.section}.{entry.key}": entry.plain for entry in tree.entries()}
    again = load(flags=flags, environ={})
    assert [entry.value for entry in again.entries()] == [entry.value for entry in tree.entries()]
    assert all(entry.comment for entry in tree.entries())


@pytest.mark.parametrize(
    "value", ['"x"', "1", "1.5", "true", "[1]", "[[1]]", '["x"]', "1979-05-27", "{a = 1}"]
)
def test_toml_of_any_type_is_read_or_refused_by_name(tmp_path: Path, value: str) -> None:
    for dotted in config.KEYS:
        section, _, key = dotted.partition(".")
        complaint = ""
        try:
            load(written(tmp_path, f"[{section}]\n{key} = {value}\n"), environ={})
        except InvalidRequest as error:
            complaint = str(error)
        assert not complaint or dotted in complaint


def test_limits_of_moves_are_sizes_and_none_by_default() -> None:
    tree = load(flags={"tiering.ssd_writes_per_day": "1TB"}, environ={})
    assert tree.tiering.ssd_writes_per_day == 10**12
    assert tree.tiering.demote_rate == tree.tiering.promote_rate == 0

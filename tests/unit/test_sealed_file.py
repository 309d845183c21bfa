"""Files that are whole, or known not to be."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from blobstore.tiering.sealed_file import Unusable, read_sealed, write_sealed

KIND = b"a kind.."


def _written(tmp_path: Path, body: bytes = b"body", version: int = 3) -> Path:
    path = tmp_path / "file"
    write_sealed(path, KIND, version, body)
    return path


def _why(path: Path, kind: bytes = KIND, version: int = 3) -> str:
    with pytest.raises(Unusable) as raised:
        read_sealed(path, kind, version)
    return str(raised.value)


@pytest.mark.parametrize("body", [b"", b"x", bytes(100_000)])
def test_what_was_written_is_read(tmp_path: Path, body: bytes) -> None:
    assert read_sealed(_written(tmp_path, body), KIND, 3) == body


def test_a_new_body_replaces_the_old_one_and_nothing_else_stays(tmp_path: Path) -> None:
    path = _written(tmp_path, b"old")
    write_sealed(path, KIND, 3, b"new")
    assert read_sealed(path, KIND, 3) == b"new"
    assert [found.name for found in tmp_path.iterdir()] == ["file"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    path = _written(tmp_path)
    whole = path.read_bytes()
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 0x10
        path.write_bytes(damaged)
        assert "damaged" in _why(path)


def test_every_cut_is_found(tmp_path: Path) -> None:
    path = _written(tmp_path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert "damaged" in _why(path)
    path.write_bytes(whole + b"x")
    assert "length" in _why(path)


def test_another_version_is_not_read_and_both_are_named(tmp_path: Path) -> None:
    why = _why(_written(tmp_path, version=2))
    assert "version 2" in why
    assert "3" in why


def test_another_kind_is_not_read(tmp_path: Path) -> None:
    assert "kind" in _why(_written(tmp_path), kind=b"another.")


def test_a_file_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    assert "no file" in _why(tmp_path / "nothing")
    (tmp_path / "directory").mkdir()
    assert "cannot be read" in _why(tmp_path / "directory")


def test_the_old_file_stays_when_the_disk_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _written(tmp_path, b"old")

    def refuse(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space"):
        write_sealed(path, KIND, 3, b"new")
    assert read_sealed(path, KIND, 3) == b"old"
    assert [found.name for found in tmp_path.iterdir()] == ["file"]


def test_what_a_crash_left_beside_is_written_over(tmp_path: Path) -> None:
    path = _written(tmp_path, b"old")
    (tmp_path / "file.new").write_bytes(b"half a f")
    assert read_sealed(path, KIND, 3) == b"old"
    write_sealed(path, KIND, 3, b"new")
    assert read_sealed(path, KIND, 3) == b"new"

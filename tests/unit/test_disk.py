"""The real disk where the operating system is awkward."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blobstore.errors import StorageFailed
from blobstore.tiering.disk import PosixDisk, storage_failed


def _without_direct_io(path: Any, flags: int, mode: int = 0o777) -> int:
    if flags & os.O_DIRECT:
        raise OSError(errno.EINVAL, "Invalid argument")
    return _os_open(path, flags, mode)


_os_open = os.open


def test_a_file_system_without_direct_io_is_used_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = PosixDisk()
    monkeypatch.setattr(os, "open", _without_direct_io)
    handle = disk.open(tmp_path / "f", create=True, direct=True)
    assert not handle.direct
    disk.pwritev(handle, [memoryview(b"odd")], 1)
    into = bytearray(3)
    disk.preadv(handle, [memoryview(into)], 1)
    assert into == b"odd"
    disk.close(handle)


@pytest.mark.parametrize(("call", "code"), [("pwritev", errno.ENOSPC), ("preadv", errno.EIO)])
def test_a_short_transfer_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    disk = PosixDisk()
    handle = disk.open(tmp_path / "f", create=True, direct=False)
    disk.pwritev(handle, [memoryview(bytes(100))], 0)
    monkeypatch.setattr(os, call, lambda fd, views, offset: 99)
    move: Callable[..., None] = getattr(disk, call)
    with pytest.raises(OSError, match="99 of 100") as caught:
        move(handle, [memoryview(bytearray(100))], 0)
    assert caught.value.errno == code
    disk.close(handle)


def test_new_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    disk = PosixDisk()
    disk.mkdir(tmp_path / "d")
    disk.close(disk.open(tmp_path / "d" / "f", create=True, direct=True))
    assert (tmp_path / "d").stat().st_mode & 0o077 == 0
    assert (tmp_path / "d" / "f").stat().st_mode & 0o077 == 0


def test_what_the_kernel_refuses_keeps_its_number(tmp_path: Path) -> None:
    disk = PosixDisk()
    handle = disk.open(tmp_path / "f", create=True, direct=False)
    with pytest.raises(OSError, match="Invalid argument") as caught:
        disk.punch(handle, 0, 0)
    assert caught.value.errno == errno.EINVAL
    disk.close(handle)
    with pytest.raises(OSError, match="statfs"):
        disk.fs_type(tmp_path / "missing")


def test_the_typed_error_names_the_file_and_keeps_the_number() -> None:
    error = storage_failed(OSError(errno.EIO, "Input/output error"), "read", Path("/x/1.seg"))
    assert isinstance(error, StorageFailed)
    assert error.errno == errno.EIO
    assert "cannot read /x/1.seg: Input/output error" in str(error)
    assert storage_failed(error, "again", Path("/y")) is error

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from blobstore.errors import DirectoryInUse, SetupError
from blobstore.tiering.directory import OwnedDirectory
from blobstore.tiering.disk import PosixDisk

_HOLD = """
import sys, time
from pathlib import Path
from blobstore.tiering.directory import OwnedDirectory
from blobstore.tiering.disk import PosixDisk
owned = OwnedDirectory(Path(sys.argv[1]), PosixDisk())
print("owned", flush=True)
time.sleep(60)
"""


class _DiskOf(PosixDisk):
    def __init__(self, magic: int) -> None:
        self._magic = magic

    def fs_type(self, path: Path) -> int:
        return self._magic


def test_a_second_owner_is_refused_and_told_who_the_first_is(tmp_path: Path) -> None:
    with (
        closing(OwnedDirectory(tmp_path / "d", PosixDisk())),
        pytest.raises(DirectoryInUse, match=f"in use by process {os.getpid()}"),
    ):
        OwnedDirectory(tmp_path / "d", PosixDisk())
    OwnedDirectory(tmp_path / "d", PosixDisk()).close()


def test_the_directory_of_a_killed_process_is_free_at_once(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(tmp_path)], stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"owned\n"
        with pytest.raises(DirectoryInUse, match=f"process {holder.pid}"):
            OwnedDirectory(tmp_path, PosixDisk())
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        OwnedDirectory(tmp_path, PosixDisk()).close()


def test_closing_again_is_harmless(tmp_path: Path) -> None:
    owned = OwnedDirectory(tmp_path, PosixDisk())
    owned.close()
    owned.close()


@pytest.mark.parametrize(("magic", "name"), [(0x6969, "NFS"), (0xFE534D42, "SMB2")])
def test_file_systems_of_other_machines_are_refused(tmp_path: Path, magic: int, name: str) -> None:
    with pytest.raises(SetupError, match=f"is on {name}.*use a local file system"):
        OwnedDirectory(tmp_path, _DiskOf(magic))


def test_a_path_that_cannot_be_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match=r"cannot be used.*make it writable"):
        OwnedDirectory(tmp_path / "file", PosixDisk())

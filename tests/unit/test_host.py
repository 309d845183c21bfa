from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from blobstore import host
from blobstore.units import GIB, KIB, MIB

MEMINFO = "MemTotal: 16777216 kB\nMemFree: 1024 kB\nMemAvailable: 8388608 kB\n"


def put(root: Path, path: str, text: str) -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    put(tmp_path, "proc/meminfo", MEMINFO + "SwapTotal: 2048 kB\nSwapFree: 1024 kB\n")
    return tmp_path


def test_without_limits_the_room_is_what_is_available(root: Path) -> None:
    memory = host.memory(root)
    assert (memory.total_bytes, memory.available_bytes) == (16 * GIB, 8 * GIB)
    assert (memory.swap_bytes, memory.swap_free_bytes) == (2 * MIB, MIB)
    assert memory.limit is None
    assert memory.room_bytes == 8 * GIB


def test_cgroup_2_limit_of_a_container_is_at_the_mount(root: Path) -> None:
    put(root, "proc/self/cgroup", "0::/\n")
    put(root, "sys/fs/cgroup/memory.max", f"{512 * MIB}\n")
    put(root, "sys/fs/cgroup/memory.current", f"{100 * MIB}\n")
    put(root, "sys/fs/cgroup/memory.stat", f"anon 1\ninactive_file {40 * MIB}\n")
    memory = host.memory(root)
    assert memory.limit is not None
    assert (memory.limit.nbytes, memory.limit.used_bytes) == (512 * MIB, 60 * MIB)
    assert memory.limit.where.endswith("memory.max")
    assert memory.room_bytes == 452 * MIB


def test_the_tightest_limit_may_be_set_above(root: Path) -> None:
    put(root, "proc/self/cgroup", "0::/a/b\n")
    put(root, "sys/fs/cgroup/a/b/memory.max", "max\n")
    put(root, "sys/fs/cgroup/a/b/memory.high", f"{GIB}\n")
    put(root, "sys/fs/cgroup/a/memory.max", f"{512 * MIB}\n")
    limit = host.memory(root).limit
    assert limit is not None
    assert limit.nbytes == 512 * MIB


def test_room_counts_a_wider_limit_that_others_have_used_up(root: Path) -> None:
    put(root, "proc/self/cgroup", "0::/a/b\n")
    put(root, "sys/fs/cgroup/a/b/memory.max", f"{GIB}\n")
    put(root, "sys/fs/cgroup/a/memory.max", f"{4 * GIB}\n")
    put(root, "sys/fs/cgroup/a/memory.current", f"{4 * GIB - 10 * MIB}\n")
    memory = host.memory(root)
    assert memory.limit is not None
    assert memory.limit.nbytes == GIB
    assert memory.room_bytes == 10 * MIB


def test_a_cgroup_2_path_of_the_host_is_not_there_in_a_container(root: Path) -> None:
    put(root, "proc/self/cgroup", "0::/../../kubepods/pod1/c1\n")
    put(root, "sys/fs/cgroup/memory.max", f"{GIB}\n")
    limit = host.memory(root).limit
    assert limit is not None
    assert limit.nbytes == GIB


def test_cgroup_1_limit_beside_a_unified_mount_without_memory(root: Path) -> None:
    put(root, "proc/self/cgroup", "8:cpu,cpuacct:/x\n4:memory:/jobs/7\n0::/\n")
    put(root, "sys/fs/cgroup/unified/cgroup.procs", "")
    put(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    put(root, "sys/fs/cgroup/memory/jobs/7/memory.limit_in_bytes", f"{GIB}\n")
    put(root, "sys/fs/cgroup/memory/jobs/7/memory.usage_in_bytes", f"{64 * MIB}\n")
    put(root, "sys/fs/cgroup/memory/jobs/7/memory.stat", "cache 1\ntotal_inactive_file 0\n")
    memory = host.memory(root)
    assert memory.limit is not None
    assert memory.limit.nbytes == GIB
    assert memory.room_bytes == GIB - 64 * MIB


def test_a_machine_without_any_of_these_files_still_has_memory(tmp_path: Path) -> None:
    memory = host.memory(tmp_path)
    assert memory.total_bytes == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert memory.limit is None
    assert host.huge_pages(tmp_path) == host.HugePages("", 0, 0, 0)


def test_garbage_in_proc_is_passed_over(root: Path) -> None:
    put(root, "proc/meminfo", "nonsense\nMemTotal:\nMemAvailable: many kB\n")
    put(root, "proc/self/cgroup", "\nnonsense\n0::/a\n")
    put(root, "sys/fs/cgroup/memory.max", "\n")
    put(root, "sys/fs/cgroup/memory.stat", "\nlonely\n")
    assert host.memory(root).limit is None


def test_huge_pages_as_the_kernel_writes_them(root: Path) -> None:
    pool = "HugePages_Total:    8\nHugePages_Free:     3\nHugepagesize:    2048 kB\n"
    put(root, "proc/meminfo", MEMINFO + pool)
    put(
        root,
        "sys/kernel/mm/transparent_hugepage/shmem_enabled",
        "always within_size [advise] never deny force\n",
    )
    assert host.huge_pages(root) == host.HugePages("advise", 2048 * KIB, 8, 3)


def test_a_disk_is_that_of_the_nearest_existing_directory(root: Path) -> None:
    put(root, "proc/self/mounts", f"/dev/a / ext4 rw 0 0\nhost:/x {root.resolve()} nfs4 rw 0 0\n")
    disk = host.disk(root / "not" / "there", root)
    assert disk.existing == root
    assert disk.filesystem == "nfs4"
    assert disk.networked
    assert disk.writable
    assert 0 < disk.free_bytes <= disk.total_bytes
    assert not list(root.glob(".probe-*"))


def test_the_last_of_several_mounts_on_one_place_counts(root: Path) -> None:
    put(root, "proc/self/mounts", "/dev/a / ext4 rw 0 0\ncow / overlay rw 0 0\n\nshort\n")
    assert host.disk(root, root).filesystem == "overlay"


def test_a_refused_direct_open_is_reported_and_leaves_no_file(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_open = os.open

    def refuse(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        return really_open(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    assert host.disk(root, root).direct == "Invalid argument"
    assert not list(root.glob(".probe-*"))


def test_used_bytes_are_allocated_blocks_not_lengths(tmp_path: Path) -> None:
    assert host.used_bytes(tmp_path / "none") == 0
    (tmp_path / "deep").mkdir()
    with (tmp_path / "deep" / "sparse").open("wb") as file:
        file.truncate(GIB)
    (tmp_path / "full").write_bytes(b"x" * MIB)
    os.sync()
    assert MIB <= host.used_bytes(tmp_path) < 2 * MIB


def test_devices_are_named_by_what_driver_and_kernel_list(root: Path) -> None:
    put(root, "proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: \t NVIDIA X9\nIRQ: 1\n")
    put(root, "sys/class/infiniband/mlx5_0/node_type", "1\n")
    assert host.gpu(root).hardware == "NVIDIA X9"
    assert host.ucx(root).hardware == "mlx5_0"


def test_absent_devices_and_libraries_are_empty(root: Path) -> None:
    assert host.gpu(root).hardware == host.ucx(root).hardware == ""
    assert host.library("no_such_module") == ""
    assert host.library("msgspec").startswith("msgspec ")

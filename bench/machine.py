"""What a benchmark ran on: the facts without which its figures mean nothing."""

from __future__ import annotations

import os
import platform
import re
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from blobstore.units import MIB, parse_size

_MOUNT = re.compile(r"\S+ \S+ \S+ \S+ (?P<at>\S+) .* - (?P<kind>\S+) ")


def machine_facts(data_dir: Path) -> dict[str, Any]:
    """Facts about this machine, and about the disk that holds `data_dir`."""
    memory = _meminfo()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "blobstore": version("kv-blobstore"),
        "cpu": _cpu_model(),
        "cpus": len(os.sched_getaffinity(0)),
        "last_level_cache_bytes": last_level_cache_bytes(),
        "memory_bytes": memory["MemTotal"],
        "memory_available_bytes": memory["MemAvailable"],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "file_system": file_system(data_dir),
        "load_average": os.getloadavg()[0],
    }


def last_level_cache_bytes() -> int:
    """The size of the largest CPU cache; 32 MiB where the kernel does not tell."""
    caches = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    sizes = (path.read_text().strip().replace("K", "KiB").replace("M", "MiB") for path in caches)
    return max(map(parse_size, sizes), default=32 * MIB)


def beyond_caches_bytes() -> int:
    """A working set that no cache can hold: twice the largest, and at least 1 GiB."""
    return max(2 * last_level_cache_bytes(), 1024 * MIB)


def memory_available_bytes() -> int:
    """What the kernel would give out without swapping."""
    return _meminfo()["MemAvailable"]


def file_system(path: Path) -> str:
    """The kind of file system that holds `path`."""
    mounts = [
        (match["at"], match["kind"])
        for line in Path("/proc/self/mountinfo").read_text().splitlines()
        if (match := _MOUNT.match(line))
    ]
    holding = [mount for mount in mounts if path.resolve().is_relative_to(mount[0])]
    return max(holding, key=lambda mount: len(mount[0]), default=("", "unknown"))[1]


def _meminfo() -> dict[str, int]:
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) == 3}


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()

"""What this machine offers: memory and its limits, pages, disks, devices.

Only looks; sizing.py and `blobstore doctor` judge. Every fact is read below an
injectable root, so that tests can describe machines that they do not run on.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import mmap
import os
import re
import resource
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
_UNLIMITED = 1 << 62
"""cgroup v1 writes "no limit" as the largest multiple of a page that fits a signed 64-bit."""
_NETWORKED = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "glusterfs", "lustre")
_PROBE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Limit:
    """A memory limit of a cgroup that this process is in."""

    nbytes: int
    used_bytes: int
    """Charged to that cgroup now, less the page cache that the kernel would give back."""
    where: str


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of the machine, and the limits that hold for this process."""

    total_bytes: int
    available_bytes: int
    swap_bytes: int
    swap_free_bytes: int
    limits: tuple[Limit, ...]

    @property
    def limit(self) -> Limit | None:
        """The tightest limit, None if there is none."""
        return min(self.limits, key=lambda limit: limit.nbytes, default=None)

    @property
    def room_bytes(self) -> int:
        """What this process could still take without swapping or being killed."""
        rooms = [limit.nbytes - limit.used_bytes for limit in self.limits]
        return max(0, min([self.available_bytes, *rooms]))


@dataclass(frozen=True, slots=True)
class HugePages:
    """Huge pages as the kernel offers them now."""

    shmem: str
    """What transparent huge pages do for shared memory: never, advise, always, …; "" unknown."""
    page_bytes: int
    reserved: int
    free: int


@dataclass(frozen=True, slots=True)
class Disk:
    """The file system that holds (or would hold) a directory."""

    path: Path
    existing: Path
    """The directory itself, or the nearest one above it that exists."""
    filesystem: str
    total_bytes: int
    free_bytes: int
    writable: bool
    direct: str
    """"" if O_DIRECT works there, otherwise why it does not."""

    @property
    def networked(self) -> bool:
        """A network file system, where locks and mappings cannot be trusted."""
        return self.filesystem in _NETWORKED or self.filesystem.startswith("fuse.sshfs")


@dataclass(frozen=True, slots=True)
class Device:
    """An optional device with its Python library: either can be absent."""

    hardware: str
    """What was found, "" if nothing."""
    library: str
    """Name and version of the library, "" if it is not installed."""


def memory(root: Path = ROOT) -> Memory:
    """Memory now, and the cgroup limits (v1 and v2) over this process."""
    info = _meminfo(root)
    total = info.get("MemTotal", 0) or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Memory(
        total_bytes=total,
        available_bytes=info.get("MemAvailable", info.get("MemFree", total)),
        swap_bytes=info.get("SwapTotal", 0),
        swap_free_bytes=info.get("SwapFree", 0),
        limits=tuple(_limits(root)),
    )


def _meminfo(root: Path) -> dict[str, int]:
    facts = {}
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            facts[name] = int(words[0]) * (1024 if words[-1] == "kB" else 1)
    return facts


def _limits(root: Path) -> Iterator[Limit]:
    """Limits of this process' cgroups and all above them, as far as they are mounted here."""
    base = root / "sys/fs/cgroup"
    own = {"": "/", "memory": "/"}
    for line in _read(root / "proc/self/cgroup").splitlines():
        words = line.split(":", 2)
        if len(words) == 3:
            own.update(dict.fromkeys(words[1].split(","), words[2]))
    for mount in (base, base / "unified"):
        for folder in _upwards(mount, own[""]):
            for name in ("memory.max", "memory.high"):
                yield from _limit(folder, name, "memory.current", "inactive_file")
    for folder in _upwards(base / "memory", own["memory"]):
        yield from _limit(
            folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        )


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """The folder of a cgroup and those above it, up to the mount.

    In a container the path may be the host's, of which only the mount is to be
    seen: folders that do not exist are then passed over.
    """
    parts = [part for part in path.split("/") if part not in ("", ".", "..")]
    for depth in range(len(parts), -1, -1):
        folder = mount.joinpath(*parts[:depth])
        if folder.is_dir():
            yield folder


def _limit(folder: Path, limit: str, usage: str, reclaimable: str) -> Iterator[Limit]:
    nbytes = _number(folder / limit)
    if nbytes is None or nbytes >= _UNLIMITED:
        return
    stat = re.search(rf"^{reclaimable} (\d+)$", _read(folder / "memory.stat"), re.MULTILINE)
    used = (_number(folder / usage) or 0) - (int(stat[1]) if stat else 0)
    yield Limit(nbytes, max(0, used), str(folder / limit))


def huge_pages(root: Path = ROOT) -> HugePages:
    """Transparent huge pages for shared memory, and the reserved pool."""
    info = _meminfo(root)
    choices = _read(root / "sys/kernel/mm/transparent_hugepage/shmem_enabled")
    chosen = [word.strip("[]") for word in choices.split() if word.startswith("[")]
    return HugePages(
        shmem=chosen[0] if chosen else "",
        page_bytes=info.get("Hugepagesize", 0),
        reserved=info.get("HugePages_Total", 0),
        free=info.get("HugePages_Free", 0),
    )


def memlock_bytes() -> int | None:
    """How much this process may lock into memory; None: without limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def disk(path: Path, root: Path = ROOT) -> Disk:
    """The file system below `path`, which need not exist yet; tries O_DIRECT with a small file."""
    existing = _nearest(path)
    facts = os.statvfs(existing)
    writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    return Disk(
        path=path,
        existing=existing,
        filesystem=_filesystem(existing, root),
        total_bytes=facts.f_frsize * facts.f_blocks,
        free_bytes=facts.f_frsize * facts.f_bavail,
        writable=writable,
        direct=_why_not_direct(existing) if writable else "the directory is not writable",
    )


def free_bytes(path: Path) -> int:
    """Free space of the file system below `path`, which need not exist yet."""
    facts = os.statvfs(_nearest(path))
    return facts.f_frsize * facts.f_bavail


def _nearest(path: Path) -> Path:
    """`path`, or the nearest directory above it that exists."""
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def _filesystem(path: Path, root: Path) -> str:
    """Type of the file system at `path`, "" if the mount table does not say."""
    real = path.resolve()
    best, kind = -1, ""
    for line in _read(root / "proc/self/mounts").splitlines():
        words = line.split()
        if len(words) < 3:
            continue
        mount = Path(words[1].replace("\\040", " "))
        if real.is_relative_to(mount) and len(mount.parts) >= best:
            best, kind = len(mount.parts), words[2]
    return kind


def _why_not_direct(directory: Path) -> str:
    """Write and read one aligned block with O_DIRECT; "" if that works."""
    try:
        handle, name = tempfile.mkstemp(prefix=".probe-", dir=directory)
    except OSError as error:
        return error.strerror or str(error)
    try:
        os.close(handle)
        handle = os.open(name, os.O_RDWR | os.O_DIRECT)
        try:
            with mmap.mmap(-1, _PROBE_BYTES) as block:  # page-aligned, as O_DIRECT wants it
                os.pwrite(handle, block, 0)
                os.preadv(handle, [block], 0)
        finally:
            os.close(handle)
    except OSError as error:
        return error.strerror or str(error)
    finally:
        Path(name).unlink(missing_ok=True)
    return ""


def used_bytes(directory: Path) -> int:
    """Disk blocks allocated to the files below `directory`; 0 if it does not exist."""
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.lstat().st_blocks * 512  # st_blocks counts 512 bytes on every file system
        except FileNotFoundError:
            continue
    return total


def gpu(root: Path = ROOT) -> Device:
    """NVIDIA devices by what their driver lists; the library is cupy."""
    models = []
    for information in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        for line in _read(information).splitlines():
            name, _, value = line.partition(":")
            if name == "Model":
                models.append(value.strip())
    return Device(", ".join(models), library("cupy"))


def ucx(root: Path = ROOT) -> Device:
    """RDMA devices by what the kernel lists; the library is ucxx. UCX also works without them."""
    nics = sorted(path.name for path in (root / "sys/class/infiniband").glob("*"))
    return Device(", ".join(nics), library("ucxx"))


def library(module: str) -> str:
    """Distribution and version that provide `module`, "" if it is not installed."""
    if importlib.util.find_spec(module) is None:
        return ""
    for distribution in importlib.metadata.packages_distributions().get(module, []):
        return f"{distribution} {importlib.metadata.version(distribution)}"
    return module


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None

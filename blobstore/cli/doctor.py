"""`blobstore doctor`: what this machine offers, what would be used of it, what to change."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

import typer
from rich.text import Text

from blobstore import host
from blobstore.cli.options import ConfigFile, DataDir, Dram, Http, Json, Socket, Ssd, configured
from blobstore.cli.output import console, print_json, print_table
from blobstore.config import Config
from blobstore.errors import BlobStoreError
from blobstore.http import listen, tokens
from blobstore.sizing import dram_bytes, settings_for, ssd_bytes
from blobstore.units import format_size

DESCRIPTORS_SPARE = 256
"""Beside one per client and per connection: the arena, segments, the catalogue, the log."""


class Verdict(StrEnum):
    """Whether the daemon would start, and run as well as this machine allows."""

    OK = "ok"
    BETTER = "better"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact: what is there, what the daemon would do with it, what to change."""

    subject: str
    verdict: Verdict
    found: str
    used: str
    change: str = ""


def doctor(
    data: DataDir = None,
    socket: Socket = None,
    http: Http = None,
    dram: Dram = None,
    ssd: Ssd = None,
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Say what this machine offers, what the daemon would use, and what to change.

    Takes the options of `serve`; exits 1 if a daemon with them would not start.
    """
    tree = configured(config, data=data, socket=socket, http=http, dram=dram, ssd=ssd)
    findings = list(examine(tree))
    stopped = [finding for finding in findings if finding.verdict is Verdict.STOP]
    if as_json:
        print_json({"ok": not stopped, "findings": [asdict(finding) for finding in findings]})
    else:
        _show(findings)
    raise typer.Exit(1 if stopped else 0)


def examine(config: Config) -> Iterator[Finding]:
    """Every finding, in the order in which they matter."""
    memory = host.memory(config.host.root)
    yield _memory(config, memory)
    yield _limit(memory)
    yield _swap(memory)
    yield _memlock()
    yield _huge_pages(config)
    yield from _disks(config)
    yield _socket(config.local.socket)
    if config.http.listen:
        yield _http(config)
    yield _descriptors(config)
    yield _gpu(config)
    yield _ucx(config)
    yield from _contradiction(config)


def _memory(config: Config, memory: host.Memory) -> Finding:
    found = f"{format_size(memory.room_bytes)} free of {format_size(memory.total_bytes)}"
    try:
        nbytes = dram_bytes(config, memory)
    except BlobStoreError as error:
        return Finding("memory", Verdict.STOP, found, "nothing", str(error))
    kind = "auto" if config.dram.size == "auto" else "as asked"
    return Finding("memory", Verdict.OK, found, f"{format_size(nbytes)} for the arena ({kind})")


def _limit(memory: host.Memory) -> Finding:
    limit = memory.limit
    if limit is None:
        return Finding("memory limit", Verdict.OK, "none (no cgroup sets one)", "the machine's")
    found = f"{format_size(limit.nbytes)}, {format_size(limit.used_bytes)} in use ({limit.where})"
    return Finding("memory limit", Verdict.OK, found, "it bounds the arena")


def _swap(memory: host.Memory) -> Finding:
    if not memory.swap_bytes:
        return Finding("swap", Verdict.OK, "none", "")
    free, size = format_size(memory.swap_free_bytes), format_size(memory.swap_bytes)
    return Finding(
        "swap",
        Verdict.BETTER,
        f"{free} free of {size}",
        "the kernel may swap the arena out",
        "swapoff -a, or memory.swap.max = 0 in the daemon's cgroup: a blob read from swap is "
        "slower than one read from the store's own disk tier",
    )


def _memlock() -> Finding:
    limit = host.memlock_bytes()
    found = "unlimited" if limit is None else format_size(limit)
    return Finding("memlock", Verdict.OK, found, "nothing: the arena is not locked")


def _huge_pages(config: Config) -> Finding:
    pages = host.huge_pages(config.host.root)
    offered = pages.shmem in ("always", "within_size", "advise", "force")
    found = f"transparent for shared memory: {pages.shmem or 'unknown'}"
    if pages.reserved:
        found += f"; {pages.free} of {pages.reserved} reserved are free"
    wanted = config.dram.huge_pages
    how = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"
    if wanted == "require" and not offered and not pages.free:
        return Finding("huge pages", Verdict.STOP, found, "required by dram.huge_pages", how)
    if wanted == "off":
        change = "set dram.huge_pages = auto" if offered else f"{how}, and dram.huge_pages = auto"
        return Finding(
            "huge pages", Verdict.OK, found, "none: dram.huge_pages is off", f"optional: {change}"
        )
    change = "" if offered or pages.free else how
    verdict = Verdict.BETTER if change else Verdict.OK
    return Finding("huge pages", verdict, found, f"dram.huge_pages is {wanted}", change)


def _disks(config: Config) -> Iterator[Finding]:
    if config.ssd.size == 0:
        yield Finding("disk", Verdict.OK, "not looked at", "none: ssd.size is off")
        return
    disk = host.disk(config.store.data, config.host.root)
    yield _disk(config, disk)
    used = "O_DIRECT, past the page cache" if not disk.direct else "buffered I/O"
    verdict = Verdict.BETTER if disk.direct else Verdict.OK
    change = "use a file system that allows it (ext4, XFS): writes are several times faster"
    yield Finding(
        "O_DIRECT",
        verdict,
        f"refused: {disk.direct}" if disk.direct else "works",
        used,
        change if disk.direct else "",
    )


def _disk(config: Config, disk: host.Disk) -> Finding:
    found = (
        f"{disk.filesystem or 'unknown file system'} at {disk.path}, "
        f"{format_size(disk.free_bytes)} free of {format_size(disk.total_bytes)}"
    )
    if disk.networked:
        change = "give --data a directory on a local disk: locks and mappings are not safe here"
        return Finding("disk", Verdict.STOP, found, "refused", change)
    if not disk.writable:
        change = f"make {disk.existing} writable for user {os.geteuid()}, or give another --data"
        return Finding("disk", Verdict.STOP, found, "nothing: not writable", change)
    try:
        nbytes = ssd_bytes(config)
    except BlobStoreError as error:
        return Finding("disk", Verdict.STOP, found, "nothing", str(error))
    kind = "auto" if config.ssd.size == "auto" else "as asked"
    used = f"{format_size(nbytes)} ({kind})"
    if nbytes > disk.free_bytes + host.used_bytes(config.store.data):
        change = "lower --ssd: the disk is full before that, and then evicts at what it holds"
        return Finding("disk", Verdict.BETTER, found, used, change)
    return Finding("disk", Verdict.OK, found, used)


def _socket(path: Path) -> Finding:
    folder = path.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        what = "is not writable" if folder.is_dir() else "does not exist"
        return Finding(
            "socket", Verdict.STOP, f"{folder} {what}", "nothing", "give --socket a path"
        )
    found = "a socket is there (of a daemon, or left behind)" if path.is_socket() else "free"
    return Finding("socket", Verdict.OK, found, str(path))


def _http(config: Config) -> Finding:
    """Whether the door could be opened; its port is not taken, a daemon may serve there."""
    http = config.http
    try:
        tokens.check(config.store.data, http.tokens)
        tls = listen.tls_context(http.tls_cert, http.tls_key) is not None
        places = listen.resolved(listen.split_address(http.listen), tls=tls)
    except BlobStoreError as error:
        return Finding("http", Verdict.STOP, http.listen, "nothing", str(error))
    scheme = "https" if tls else "http"
    found = ", ".join(sorted({str(place[0]) for _, place in places}))
    return Finding("http", Verdict.OK, found, f"{scheme}://{http.listen}")


def _descriptors(config: Config) -> Finding:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    clients, connections = config.local.max_clients, config.local.max_connections
    if config.http.listen:
        connections += config.http.max_connections
    needed = clients + connections + DESCRIPTORS_SPARE
    found = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    used = f"up to {needed}: {clients} clients, {connections} connections, files"
    if hard != resource.RLIM_INFINITY and hard < needed:
        change = f"raise the hard limit (ulimit -Hn, LimitNOFILE=) to {needed}"
        return Finding("open files", Verdict.BETTER, found, used, change)
    return Finding("open files", Verdict.OK, found, used)


def _gpu(config: Config) -> Finding:
    gpu = host.gpu(config.host.root)
    library = gpu.library or "cupy is not installed"
    found = f"{gpu.hardware}; {library}" if gpu.hardware else "none"
    return Finding("GPU", Verdict.OK, found, "none: this version has no HBM tier")


def _ucx(config: Config) -> Finding:
    ucx = host.ucx(config.host.root)
    nics = f"RDMA: {ucx.hardware}" if ucx.hardware else "no RDMA device"
    found = f"{ucx.library or 'ucxx is not installed'}; {nics}"
    return Finding("UCX", Verdict.OK, found, "none: this version serves one node")


def _contradiction(config: Config) -> Iterator[Finding]:
    """Sizes that are each possible and do not go together."""
    try:
        settings_for(config)
    except ValueError as error:
        yield Finding("sizes", Verdict.STOP, "they contradict each other", "nothing", str(error))
    except BlobStoreError:
        return  # too little memory or disk: said above


_MARKS = {
    Verdict.OK: Text("ok", style="green"),
    Verdict.BETTER: Text("better", style="yellow"),
    Verdict.STOP: Text("STOP", style="bold red"),
}


def _show(findings: list[Finding]) -> None:
    rows = [(_MARKS[f.verdict], f.subject, f.found, f.used) for f in findings]
    out = console()
    print_table("", ("", "what", "found", "would be used"), rows)
    changes = [(_MARKS[f.verdict], f.subject, f.change) for f in findings if f.change]
    if changes:
        out.print()
        print_table("What to change", ("", "what", "how"), changes)
    stopped = any(finding.verdict is Verdict.STOP for finding in findings)
    out.print()
    out.print("A daemon would not start here." if stopped else "A daemon can start here.")

"""Configuration: defaults ← TOML file ← `BLOBSTORE__SECTION__KEY` ← flags.

Everything an operator can set, as one frozen tree that remembers where each
value came from. Nothing here looks at the machine: `auto` stays `auto` until
sizing.py turns the tree into numbers.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from blobstore import config_values as values
from blobstore.config_values import AUTO, Size
from blobstore.errors import InvalidRequest
from blobstore.settings import (
    HUGE_PAGES,
    OBJECTIVES,
    POLICIES,
    RebuildSettings,
    TieringSettings,
)
from blobstore.terms import DIVERGENCE, RECALL, TEXT

ENV_PREFIX = "BLOBSTORE__"
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class Key:
    """How a key is read, and what it means, in a line."""

    parse: Callable[[object], object]
    comment: str


def _default_data_dir() -> Path:
    if os.geteuid() == 0:
        return Path("/var/lib/blobstore")
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "blobstore"


def _default_socket() -> Path:
    if os.geteuid() == 0:
        return Path("/run/blobstore.sock")
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return (Path(runtime) if runtime else _default_data_dir()) / "blobstore.sock"


@dataclass(frozen=True, slots=True)
class StoreSection:
    """What the daemon keeps across restarts."""

    data: Annotated[Path, Key(values.path, "directory of the tier on disk; one daemon owns it")] = (
        field(default_factory=_default_data_dir)
    )


@dataclass(frozen=True, slots=True)
class DramSection:
    """The arena in shared memory."""

    size: Annotated[
        Size, Key(values.auto_size, "allocated in full at start; auto: 0.6 of what is free")
    ] = AUTO
    staging: Annotated[
        Size, Key(values.auto_size, "kept free for loads; auto: 1/16 of the size")
    ] = AUTO
    directory: Annotated[
        Path | None, Key(values.optional_path, 'of its (unlinked) file; "" is a memfd, in no place')
    ] = None
    huge_pages: Annotated[
        str, Key(values.one_of(*HUGE_PAGES), "off, auto (where offered) or require")
    ] = "off"


@dataclass(frozen=True, slots=True)
class SsdSection:
    """The tier on disk."""

    size: Annotated[
        Size, Key(values.auto_or_off, "bound of disk use; auto: half of what is free; or off")
    ] = AUTO
    io_threads: Annotated[int, Key(values.count, "workers between the arena and the disk")] = 4


_TIERING = TieringSettings()


@dataclass(frozen=True, slots=True)
class TieringSection:
    """Where blobs are kept, and how fast they move."""

    policy: Annotated[
        str, Key(values.one_of(*POLICIES), "who leaves first: ours (learned), or a reference")
    ] = _TIERING.policy
    objective: Annotated[
        str, Key(values.one_of(*OBJECTIVES), "what a hit is worth: its tokens, or their cost")
    ] = _TIERING.objective
    dram_low: Annotated[
        float, Key(values.share, "blobs move out below this share of DRAM free or free to go")
    ] = _TIERING.dram_low
    dram_high: Annotated[float, Key(values.share, "and until there is this much")] = (
        _TIERING.dram_high
    )
    ssd_spare: Annotated[
        float, Key(values.share, "share of SSD that only blobs worth it may take")
    ] = _TIERING.ssd_spare
    ssd_writes_per_day: Annotated[
        int, Key(values.size, "bytes SSD may take in a day; 0: no limit")
    ] = _TIERING.ssd_writes_per_day
    demote_rate: Annotated[
        int, Key(values.size, "bytes per second from DRAM to SSD; 0: no limit")
    ] = _TIERING.demote_rate
    promote_rate: Annotated[
        int, Key(values.size, "bytes per second loaded ahead of use; 0: no limit")
    ] = _TIERING.promote_rate
    fetch_rate: Annotated[
        int, Key(values.size, "bytes per second read from SSD, for a get as well; 0: no limit")
    ] = _TIERING.fetch_rate
    supersede_grace_s: Annotated[
        float, Key(values.seconds, "a replaced context is kept like others for so long")
    ] = _TIERING.supersede_grace_s


_REBUILD = RebuildSettings()


@dataclass(frozen=True, slots=True)
class RebuildSection:
    """What is kept of tokens, and how blobs come back from them."""

    text: Annotated[
        str,
        Key(values.one_of(*TEXT), "what is kept of a blob's tokens, if its namespace says none"),
    ] = _REBUILD.text
    recall: Annotated[
        str, Key(values.one_of(*RECALL), "how blobs that are not in DRAM come back, likewise")
    ] = _REBUILD.recall
    divergence: Annotated[
        str, Key(values.one_of(*DIVERGENCE), "what becomes of rebuilt blobs that differ, likewise")
    ] = _REBUILD.divergence
    text_quota: Annotated[
        int, Key(values.positive_size, "bound of all texts; the oldest go for new ones")
    ] = _REBUILD.text_quota
    text_retention_days: Annotated[
        float, Key(values.days, "a text that is not noted again for so long goes")
    ] = _REBUILD.text_retention_days
    jobs_max: Annotated[int, Key(values.count, "rebuilds that wait or run")] = _REBUILD.jobs_max


@dataclass(frozen=True, slots=True)
class LocalSection:
    """The Unix socket, and what one client may hold."""

    socket: Annotated[Path, Key(values.socket_path, "where clients connect")] = field(
        default_factory=_default_socket
    )
    uids: Annotated[
        tuple[int, ...], Key(values.user_ids, "users let in beside the daemon's own")
    ] = ()
    max_clients: Annotated[int, Key(values.count, "processes connected at a time")] = 1024
    max_connections: Annotated[int, Key(values.count, "connections of all of them")] = 4096
    max_leases_per_client: Annotated[int, Key(values.count, "leases one client may hold")] = 4096
    lent_max: Annotated[
        Size, Key(values.auto_size, "bytes lent to one client for writing; auto: half of dram.size")
    ] = AUTO


@dataclass(frozen=True, slots=True)
class HttpSection:
    """The HTTP door; off unless it has an address."""

    listen: Annotated[str, Key(values.host_port, 'HOST:PORT; "" is off')] = ""
    tokens: Annotated[
        Path | None, Key(values.optional_path, "TOML file of tokens beside <data>/http.token")
    ] = None
    hosts: Annotated[
        tuple[str, ...], Key(values.names, "Host headers served beside the address and localhost")
    ] = ()
    tls_cert: Annotated[
        Path | None, Key(values.optional_path, "PEM; needed where others can reach the address")
    ] = None
    tls_key: Annotated[
        Path | None, Key(values.optional_path, 'PEM, without a passphrase; "": in tls_cert')
    ] = None
    max_connections: Annotated[int, Key(values.count, "open at a time")] = 4096
    io_timeout_s: Annotated[
        float, Key(values.duration, "a peer that takes longer for a piece of a body is cut off")
    ] = 30.0


@dataclass(frozen=True, slots=True)
class TimesSection:
    """How long things may last."""

    reservation_s: Annotated[
        float, Key(values.duration, "a reservation not sealed by then expires")
    ] = 60.0
    drain_s: Annotated[float, Key(values.seconds, "what SIGTERM grants to requests in flight")] = (
        10.0
    )


@dataclass(frozen=True, slots=True)
class LogSection:
    """What the daemon says on its standard error."""

    level: Annotated[str, Key(values.one_of(*LOG_LEVELS), ", ".join(LOG_LEVELS))] = "info"


@dataclass(frozen=True, slots=True)
class HostSection:
    """Where the facts about the machine are read."""

    root: Annotated[
        Path, Key(values.path, "holds the /proc and /sys to read; another one serves tests")
    ] = Path("/")


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of the tree, its value, and where that came from."""

    section: str
    key: str
    value: object
    source: str
    comment: str

    @property
    def plain(self) -> object:
        """The value as JSON and TOML can hold it."""
        if self.value is None:
            return ""
        if isinstance(self.value, Path):
            return str(self.value)
        return list(self.value) if isinstance(self.value, tuple) else self.value


@dataclass(frozen=True, slots=True)
class Config:
    """The effective tree. `sources` says where each "section.key" was set."""

    store: StoreSection = field(default_factory=StoreSection)
    dram: DramSection = field(default_factory=DramSection)
    ssd: SsdSection = field(default_factory=SsdSection)
    tiering: TieringSection = field(default_factory=TieringSection)
    rebuild: RebuildSection = field(default_factory=RebuildSection)
    local: LocalSection = field(default_factory=LocalSection)
    http: HttpSection = field(default_factory=HttpSection)
    times: TimesSection = field(default_factory=TimesSection)
    log: LogSection = field(default_factory=LogSection)
    host: HostSection = field(default_factory=HostSection)
    sources: Mapping[str, str] = field(default_factory=dict)

    def entries(self) -> Iterator[Entry]:
        """Every key, in the order of the tree."""
        for dotted, key in KEYS.items():
            section, _, name = dotted.partition(".")
            yield Entry(
                section=section,
                key=name,
                value=getattr(getattr(self, section), name),
                source=self.sources.get(dotted, "default"),
                comment=key.comment,
            )


_SECTIONS: Mapping[str, Any] = {
    name: kind for name, kind in get_type_hints(Config).items() if name != "sources"
}


def _keys() -> Iterator[tuple[str, Key]]:
    for name, section in _SECTIONS.items():
        hints = get_type_hints(section, include_extras=True)
        for spec in fields(section):
            yield f"{name}.{spec.name}", hints[spec.name].__metadata__[0]


KEYS: Mapping[str, Key] = dict(_keys())
"""Every key there is, as "section.key"."""


@dataclass(frozen=True, slots=True)
class _Setting:
    """One value as somebody wrote it."""

    dotted: str
    value: object
    source: str


def load(
    path: Path | None = None,
    *,
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Config:
    """The effective configuration; later sources win, key by key.

    `flags` maps "section.key" to what was given on the command line (None: not
    given). Raises InvalidRequest for an unreadable file, an unknown key (with
    the nearest known one) or a bad value, and names the source.
    """
    parsed: dict[str, dict[str, object]] = {name: {} for name in _SECTIONS}
    sources: dict[str, str] = {}
    for setting in _settings(path, flags or {}, environ):
        key = KEYS.get(setting.dotted)
        if key is None:
            raise InvalidRequest(_unknown(setting))
        section, _, name = setting.dotted.partition(".")
        try:
            parsed[section][name] = key.parse(setting.value)
        except InvalidRequest as error:
            raise InvalidRequest(f"{setting.dotted} ({setting.source}): {error}") from None
        sources[setting.dotted] = setting.source
    sections = {name: kind(**parsed[name]) for name, kind in _SECTIONS.items()}
    return Config(**sections, sources=sources)


def _settings(
    path: Path | None, flags: Mapping[str, object], environ: Mapping[str, str]
) -> Iterator[_Setting]:
    if path is not None:
        yield from _from_file(path)
    for name, text in sorted(environ.items()):
        if name.startswith(ENV_PREFIX):
            dotted = name.removeprefix(ENV_PREFIX).lower().replace("__", ".")
            yield _Setting(dotted, text, f"environment {name}")
    for dotted, value in flags.items():
        if value is not None:
            yield _Setting(dotted, value, "command line")


def _from_file(path: Path) -> Iterator[_Setting]:
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidRequest(f"cannot read the configuration {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the configuration {path} is not TOML: {error}") from None
    for section, body in tree.items():
        if not isinstance(body, dict):
            yield _Setting(section, body, f"file {path}")
            continue
        if section not in _SECTIONS and not body:
            yield _Setting(section, body, f"file {path}")
        for key, value in body.items():
            yield _Setting(f"{section}.{key}", value, f"file {path}")


def _unknown(setting: _Setting) -> str:
    """The message for a key that does not exist, with the nearest that does."""
    near = difflib.get_close_matches(setting.dotted, KEYS, n=1, cutoff=0.6)
    if not near:
        last = setting.dotted.rpartition(".")[2]
        near = [name for name in KEYS if name.rpartition(".")[2] == last]
    hint = f"did you mean {' or '.join(near)}?" if near else "`blobstore config show` lists all"
    return f"unknown key {setting.dotted} ({setting.source}): {hint}"

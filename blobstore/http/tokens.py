"""Who may do what: bearer tokens with rights on namespaces.

Only SHA-256 digests of secrets are kept in memory and in the file of extra tokens. One
token with all rights lies in a file of mode 0600 beside the data; the daemon makes it at
its first start, and the tools of the same user find it there.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import stat
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import IntEnum
from fnmatch import fnmatchcase
from functools import partial
from hashlib import sha256
from pathlib import Path

from blobstore.errors import SetupError

FILE_NAME = "http.token"
SECRET_BYTES = 32
SECRET_CHARACTERS_MIN = 16
ANY = "*"

log = logging.getLogger(__name__)

_BEARER = re.compile(r"[Bb][Ee][Aa][Rr][Ee][Rr] +([A-Za-z0-9._~+/-]+=*) *")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_KEYS = {"name", "sha256", "rights", "namespaces", "expires"}


class Right(IntEnum):
    """What a token allows; each right includes those below it."""

    READ = 1
    WRITE = 2
    ADMIN = 3


@dataclass(frozen=True, slots=True)
class Token:
    """One token: its rights on the namespaces whose model's name matches a pattern."""

    name: str
    right: Right
    namespaces: tuple[str, ...] = (ANY,)
    expires_s: float | None = None
    """Seconds since 1970; None: never."""

    def sees(self, model: str) -> bool:
        """Namespaces of this model exist for its bearer."""
        return any(fnmatchcase(model, pattern) for pattern in self.namespaces)

    @property
    def sees_all(self) -> bool:
        """No namespace is hidden from its bearer."""
        return ANY in self.namespaces


class Tokens:
    """All tokens of a daemon, by the digest of their secret."""

    def __init__(
        self,
        read: Callable[[], Mapping[bytes, Token]],
        files: Sequence[Path],
        wall_clock: Callable[[], float],
    ) -> None:
        """Those that `read` finds in `files`."""
        self._read = read
        self._files = files
        self._wall_clock = wall_clock
        self._stamps: list[tuple[int, ...]] | None = None
        self._said = ""
        self._by_digest = read()

    def refresh(self) -> None:
        """Read the files again if they have changed; what cannot be used changes nothing."""
        stamps = self._stamped()
        if stamps == self._stamps:
            return
        self._stamps = stamps
        try:
            found = self._read()
        except SetupError as error:
            self._stamps = None  # until it can be used
            if str(error) != self._said:
                self._said = str(error)
                log.error("%s; the tokens stay as they were", error)
            return
        self._said = ""
        if found != self._by_digest:
            self._by_digest = found
            log.info("read the tokens again: %d", len(found))

    def _stamped(self) -> list[tuple[int, ...]]:
        """Another list once one of the files has been written, replaced or removed."""
        found: list[tuple[int, ...]] = []
        for path in self._files:
            try:
                status = path.stat()
            except OSError:
                found.append(())
                continue
            kept = (status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size)
            found.append((*kept, status.st_mode))
        return found

    def find(self, authorizations: Iterable[str]) -> Token | None:
        """The token that the Authorization headers of a request present, if it is good."""
        presented = list(authorizations)
        found = _BEARER.fullmatch(presented[0]) if len(presented) == 1 else None
        if found is None:
            return None
        # Looked up by digest: how long it takes tells nothing about any secret.
        token = self._by_digest.get(sha256(found[1].encode()).digest())
        if token is None or (token.expires_s is not None and token.expires_s <= self._wall_clock()):
            return None
        return token


def load(
    data_dir: Path,
    extra: Path | None,
    wall_clock: Callable[[], float] = lambda: datetime.now(UTC).timestamp(),
) -> Tokens:
    """The default token, made if there is none, and those of the file `extra`.

    Raises SetupError for a file that others could read or that makes no sense.
    """
    files = [data_dir / FILE_NAME] + ([extra] if extra is not None else [])
    return Tokens(partial(_all, data_dir, extra), files, wall_clock)


def _all(data_dir: Path, extra: Path | None) -> dict[bytes, Token]:
    by_digest = {
        sha256(_secret(data_dir / FILE_NAME).encode()).digest(): Token("default", Right.ADMIN)
    }
    if extra is not None:
        for digest, token in _extra(extra):
            if digest in by_digest:
                raise SetupError(f"{extra}: the secret of token {token.name!r} is another's too")
            by_digest[digest] = token
    return by_digest


def check(data_dir: Path, extra: Path | None) -> None:
    """Raises what `load` would raise; makes nothing."""
    if (data_dir / FILE_NAME).exists():
        _secret(data_dir / FILE_NAME)
    if extra is not None:
        list(_extra(extra))


def _secret(path: Path) -> str:
    try:
        if not path.exists():
            _make(path)
        status = path.stat()
        text = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a token"
        raise SetupError(f"cannot use the token file {path}: {reason}") from error
    if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077:
        raise SetupError(f"{path} must be a file that its owner alone may read: chmod 600 {path}")
    if len(text) < SECRET_CHARACTERS_MIN or not _BEARER.fullmatch(f"Bearer {text}"):
        raise SetupError(f"{path} holds no token: remove it, and the next start makes another")
    return text


def _make(path: Path) -> None:
    """Write a new secret, whole or not at all."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:  # noqa: PTH123
            file.write(secrets.token_urlsafe(SECRET_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def _extra(path: Path) -> Iterable[tuple[bytes, Token]]:
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SetupError(f"cannot read the tokens in {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SetupError(f"the tokens in {path} are not TOML: {error}") from error
    entries = tree.get("token", [])
    if set(tree) - {"token"} or not isinstance(entries, list):
        raise SetupError(f"{path}: wanted [[token]] tables and nothing else")
    for number, entry in enumerate(entries, 1):
        try:
            yield _token(entry)
        except ValueError as error:
            raise SetupError(f"{path}: token number {number}: {error}") from error


def _token(entry: object) -> tuple[bytes, Token]:
    if not isinstance(entry, dict):
        raise ValueError("not a table")
    if unknown := set(entry) - _KEYS:
        raise ValueError(f"unknown key {min(unknown)}: known are {', '.join(sorted(_KEYS))}")
    name, digest = entry.get("name"), entry.get("sha256")
    if not isinstance(name, str) or not name:
        raise ValueError("name is missing")
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise ValueError(
            "sha256 must be the SHA-256 of the secret in 64 digits of lower-case hex "
            "(printf %s SECRET | sha256sum)"
        )
    right = {right.name.lower(): right for right in Right}.get(str(entry.get("rights")))
    if right is None:
        raise ValueError(f"rights must be read, write or admin, found {entry.get('rights')!r}")
    patterns = entry.get("namespaces")
    if not isinstance(patterns, list) or not all(isinstance(p, str) and p for p in patterns):
        raise ValueError(
            'namespaces must be a list of patterns on the model\'s name, such as ["*"]'
        )
    token = Token(name, right, tuple(patterns), _expiry(entry.get("expires")))
    return bytes.fromhex(digest), token


def _expiry(value: object) -> float | None:
    if value is None:
        return None
    try:
        moment = value if isinstance(value, datetime) else datetime.fromisoformat(str(value))
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise ValueError(
            f"expires must be a time with its zone, such as 2027-01-31T12:00:00Z, found {value!r}"
        )
    return moment.timestamp()

"""Every error the store raises.

    BlobStoreError
    ├── InvalidRequest (ValueError)      the caller's fault: repeating it cannot help
    │   ├── SizeMismatch                 buffers or payloads contradict the declared layout
    │   ├── UnknownNamespace (KeyError)  declare it first
    │   ├── FrameTooLarge                a message over the limit
    │   └── StaleBoot                    the daemon restarted: its old leases are void
    ├── Retryable                        may succeed later: see retry_after_s
    │   ├── Full                         no room, and nothing may be evicted
    │   ├── Busy                         a queue or a cap is at its bound
    │   ├── Unavailable                  no daemon answers
    │   └── DeadlineExceeded (TimeoutError)
    ├── StorageFailed (OSError)          a disk refused to read, write or sync
    ├── Corrupt                          bytes that fail their digest
    ├── ProtocolError                    a peer broke the protocol; the connection is closed
    ├── WrongProcess                     a handle was taken across a fork
    └── SetupError                       the daemon cannot start as asked
        ├── DirectoryInUse               another daemon owns the data directory
        ├── NewerFormat                  the directory was written by a newer version
        └── NotEnough                    too little memory or disk

A miss is never an error. `code` is the stable name used on the wire and in JSON.
"""

from __future__ import annotations


class BlobStoreError(Exception):
    """Root of all errors of this package."""

    code = "error"
    exit_code = 1


class InvalidRequest(BlobStoreError, ValueError):
    """The request itself is wrong; repeating it cannot help."""

    code = "invalid_request"
    exit_code = 2


class SizeMismatch(InvalidRequest):
    """Sizes that contradict the declared layout; the message states both."""

    code = "size_mismatch"


class UnknownNamespace(InvalidRequest, KeyError):
    """The namespace id has not been declared to this daemon."""

    code = "unknown_namespace"

    def __str__(self) -> str:  # KeyError would print the repr
        return str(self.args[0]) if self.args else ""


class FrameTooLarge(InvalidRequest):
    """A message exceeds the frame limit; nothing was allocated for it."""

    code = "frame_too_large"


class StaleBoot(InvalidRequest):
    """The request names a daemon that has since restarted; its leases are void."""

    code = "stale_boot"


class Retryable(BlobStoreError):
    """May succeed if tried again after `retry_after_s` seconds."""

    code = "retryable"
    exit_code = 3

    def __init__(self, message: str = "", *, retry_after_s: float = 0.05) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Full(Retryable):
    """No room in a tier, and nothing there may be evicted now."""

    code = "full"


class Busy(Retryable):
    """A queue, a connection count or a per-client cap is at its bound."""

    code = "busy"


class Unavailable(Retryable):
    """No daemon answers at the address."""

    code = "unavailable"


class DeadlineExceeded(Retryable, TimeoutError):
    """The deadline passed first."""

    code = "deadline"


class StorageFailed(BlobStoreError, OSError):
    """The disk refused to read, write or sync; the message names the file and the errno."""

    code = "storage_failed"


class Corrupt(BlobStoreError):
    """Bytes that fail their digest; they were quarantined, not returned."""

    code = "corrupt"


class ProtocolError(BlobStoreError):
    """The other side broke the protocol; the connection is closed."""

    code = "protocol"


class WrongProcess(BlobStoreError):
    """A lease or a writer was taken across a fork; it belongs to the parent."""

    code = "wrong_process"


class SetupError(BlobStoreError):
    """The daemon cannot start as asked; the message says what was wanted and found."""

    code = "setup"


class DirectoryInUse(SetupError):
    """Another daemon owns the data directory; the message names its pid."""

    code = "directory_in_use"


class NewerFormat(SetupError):
    """The directory was written by a newer version of the store."""

    code = "newer_format"


class NotEnough(SetupError):
    """Too little memory or disk for the sizes asked for."""

    code = "not_enough"


def _tree(root: type[BlobStoreError]) -> dict[str, type[BlobStoreError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


BY_CODE: dict[str, type[BlobStoreError]] = _tree(BlobStoreError)


def from_code(code: str, message: str, retry_after_s: float = 0.0) -> BlobStoreError:
    """Rebuild the error that a daemon reported; an unknown code gives the root class.

    `retry_after_s` is dropped by errors that no repetition helps.
    """
    error = BY_CODE.get(code, BlobStoreError)(message)
    if isinstance(error, Retryable):
        error.retry_after_s = retry_after_s
    return error

"""What `kv_connector_extra_config` may say, checked when the engine starts."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from blobstore.clients.handshake import socket_path
from blobstore.clients.vllm.request_params import check_retention
from blobstore.errors import InvalidRequest
from blobstore.hint import Hint


@dataclass(frozen=True, slots=True)
class Options:
    """How an engine uses the store.

    Args:
        address: of the daemon on this machine.
        tokens_per_blob: a multiple of the engine's block size.
        retention: of what is saved, where a request does not say.
        revision: of the model, where the engine does not know it.
        weights_digest: stands for the weights, instead of reading their files.
        salt: keeps what this engine stores apart from others'.
        kind: of requests, where they do not say; a hint.
        timeout_s: how long a load or a save may take, for each window of it.
        lookup_timeout_s: after that a request is computed from its beginning.
        prefetch_wait_s: how long a request may wait until its prefix has come from SSD to DRAM.
        layerwise: save every layer as soon as it is computed.
    """

    address: str = "unix:/run/blobstore.sock"
    tokens_per_blob: int = 256
    retention: str = "standard"
    revision: str = ""
    weights_digest: str = ""
    salt: str = ""
    kind: str = ""
    timeout_s: float = 2.0
    lookup_timeout_s: float = 0.5
    prefetch_wait_s: float = 2.0
    layerwise: bool = False

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """The options in `given`; InvalidRequest for an unknown name or a value out of bounds."""
        options = cls(**checked(given, cls))
        socket_path(options.address)
        check_retention(options.retention)
        Hint(kind=options.kind)
        if options.tokens_per_blob < 1:
            raise InvalidRequest(f"tokens_per_blob is 1 or more, found {options.tokens_per_blob}")
        for name in ("timeout_s", "lookup_timeout_s", "prefetch_wait_s"):
            if not 0 <= getattr(options, name) <= _SECONDS_MAX:
                raise InvalidRequest(
                    f"{name} is from 0 to {_SECONDS_MAX:.0f} s, found {getattr(options, name)}"
                )
        return options


_SECONDS_MAX = 600.0
"""Ten minutes: who asks an engine has given up by then, so more is a mistake in the unit."""


def checked(given: Mapping[str, Any], known: type) -> dict[str, Any]:
    """`given`, as values of the fields of the dataclass `known`.

    InvalidRequest names what it does not know, and the field that may have been meant, or
    the value that is of another type.
    """
    types = get_type_hints(known)
    names = [field.name for field in fields(known)]
    return {name: _typed(name, value, types, names) for name, value in given.items()}


def _typed(name: str, value: Any, types: Mapping[str, type], names: Collection[str]) -> Any:
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
        meant = f": did you mean {near[0]}?" if near else f"; there are {', '.join(names)}"
        raise InvalidRequest(f"unknown option {name!r}{meant}")
    wanted = types[name]
    if wanted is float and type(value) is int:
        return float(value)
    if type(value) is not wanted:
        raise InvalidRequest(f"{name} is of type {wanted.__name__}, found {value!r}")
    return value

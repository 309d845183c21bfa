"""What one request asks of the store: its `kv_transfer_params`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from blobstore.clients.writer import RETENTIONS
from blobstore.errors import InvalidRequest
from blobstore.hint import Hint

TTL_MAX_S = 30 * 86400.0
"""A month: a daemon pins for no longer."""

_SESSIONS_MAX = 1 << 16
"""Whose turns are counted: more than are in use at once, some MB."""


def check_retention(retention: object) -> None:
    """InvalidRequest unless it is one that the store knows."""
    if retention not in RETENTIONS:
        raise InvalidRequest(f"retention is one of {', '.join(RETENTIONS)}, found {retention!r}")


@dataclass(frozen=True, slots=True)
class RequestParams:
    """How a request's blobs are kept, and what the store is told of it.

    `ttl_s` keeps what it saves from eviction for so long (0: no longer than usual). With
    `no_store` nothing of it is saved, with `no_load` nothing is read for it.
    """

    retention: str = "standard"
    ttl_s: float = 0.0
    no_store: bool = False
    no_load: bool = False
    hint: Hint = field(default=Hint())

    @classmethod
    def of(
        cls, params: Mapping[str, Any] | None, *, retention: str, kind: str, session: str = ""
    ) -> RequestParams:
        """Those in `params`; `retention`, `kind` and `session` hold where they say nothing.

        Other names are other connectors'. Raises InvalidRequest for values out of bounds.
        """
        params = params or {}
        if not isinstance(params, Mapping):
            raise InvalidRequest(f"they are names with values, found {params!r}")
        retention = params.get("retention", retention)
        check_retention(retention)
        ttl_s = params.get("ttl_s", params.get("ttl", 0.0))
        if type(ttl_s) not in (int, float) or not 0 <= ttl_s <= TTL_MAX_S:
            raise InvalidRequest(f"ttl_s is from 0 to {TTL_MAX_S:.0f} s, found {ttl_s!r}")
        flags = {name: params.get(name, False) for name in ("no_store", "no_load")}
        for name, value in flags.items():
            if type(value) is not bool:
                raise InvalidRequest(f"{name} is true or false, found {value!r}")
        told = {name: params[name] for name in ("session", "turn", "kind") if name in params}
        under = {"kind": kind, "session": session}
        return cls(retention, float(ttl_s), **flags, hint=Hint.from_dict({**under, **told}))


class Turns:
    """Numbers the requests of each session, for those that do not say their turn."""

    def __init__(self) -> None:
        self._next: OrderedDict[str, int] = OrderedDict()

    def numbered(self, hint: Hint) -> Hint:
        """`hint`, with the number of the turn that begins if it names a session."""
        if not hint.session:
            return hint
        turn = hint.turn if hint.turn is not None else self._next.get(hint.session, 0)
        self._next[hint.session] = turn + 1
        self._next.move_to_end(hint.session)
        if len(self._next) > _SESSIONS_MAX:
            self._next.popitem(last=False)
        return Hint(turn=turn).over(hint)

"""What a caller knows about a call's future, for whoever decides what stays where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from blobstore.fields import check_number, check_text

MAX_TEXT_BYTES = 256
"""A hint travels with every call, so it stays small."""

_NAMES = ("session", "turn", "kind", "finish")


@dataclass(frozen=True, slots=True)
class Hint:
    """What is known of the request behind a call; every field may be left out.

    Args:
        session: conversation or agent run that it belongs to.
        turn: its number in the session.
        kind: of request, such as "main" or "subagent".
        finish: why the model stopped, such as "tool_use" or "end_turn".

    Hints never change what a call returns. Raises InvalidRequest for values out of bounds.
    """

    session: str = ""
    turn: int | None = None
    kind: str = ""
    finish: str = ""

    def __post_init__(self) -> None:
        for name in ("session", "kind", "finish"):
            check_text(name, getattr(self, name), max_bytes=MAX_TEXT_BYTES)
        if self.turn is not None:
            check_number("turn", self.turn, 0, (1 << 63) - 1)

    def as_dict(self) -> dict[str, str | int]:
        """The fields that are set: what travels in a message."""
        fields = {name: getattr(self, name) for name in _NAMES}
        return {name: value for name, value in fields.items() if value not in ("", None)}

    def over(self, under: Hint) -> Hint:
        """This hint, with what `under` has for the fields that are not set."""
        return Hint(**{**under.as_dict(), **self.as_dict()})  # type: ignore[arg-type]

    @classmethod
    def from_dict(cls, fields: Mapping[str, object]) -> Hint:
        """The hint in `fields` of a message; InvalidRequest for wrong values.

        Unknown names are ignored: they are a newer client's.
        """
        known = {name: fields[name] for name in _NAMES if name in fields}
        return cls(**known)  # type: ignore[arg-type]  # __post_init__ checks them

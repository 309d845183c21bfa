"""How a namespace's blobs are remembered and brought back: not identity, and may change.

The daemon's configuration says what holds for all; a client may tell otherwise for a
namespace, and what was told last stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from blobstore.errors import InvalidRequest

TEXT = ("off", "tokens", "text")
RECALL = ("fetch", "rebuild", "fastest", "both", "never")
DIVERGENCE = ("accept", "report", "reject")


@dataclass(frozen=True, slots=True)
class Terms:
    """What is told of a namespace; None keeps what holds.

    Args:
        text: what is kept of a blob that was put with its token ids: nothing ("off"), the
            ids ("tokens"), or the caller's text as well ("text").
        recall: how blobs that are not in DRAM come back for a get: from SSD ("fetch"), by a
            model runner where one can ("rebuild"), as is estimated to be faster ("fastest"),
            from both ends at once ("both"), or not at all ("never").
        divergence: what becomes of a rebuilt blob that differs from the one before: it is
            taken ("accept"), and told of ("report"), or refused ("reject").

    Raises InvalidRequest for other words.
    """

    text: str | None = None
    recall: str | None = None
    divergence: str | None = None

    def __post_init__(self) -> None:
        for name, known in (("text", TEXT), ("recall", RECALL), ("divergence", DIVERGENCE)):
            told = getattr(self, name)
            if told is not None and told not in known:
                raise InvalidRequest(f"{name} must be one of {', '.join(known)}, found {told!r}")

    def over(self, base: Terms) -> Terms:
        """These, and those of `base` where nothing is told."""
        return Terms(
            self.text if self.text is not None else base.text,
            self.recall if self.recall is not None else base.recall,
            self.divergence if self.divergence is not None else base.divergence,
        )

    def as_dict(self) -> dict[str, str]:
        """What is told, by name."""
        told = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: word for name, word in told.items() if word is not None}

    @classmethod
    def from_dict(cls, told: Mapping[str, str]) -> Terms:
        """Undo `as_dict`. Raises InvalidRequest for a name that is unknown."""
        unknown = sorted(told.keys() - {field.name for field in fields(cls)})
        if unknown:
            raise InvalidRequest(f"unknown terms: {', '.join(map(repr, unknown))}")
        return cls(**told)

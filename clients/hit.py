"""What a match found."""

from __future__ import annotations

import msgspec


class Hit(msgspec.Struct, frozen=True):  # made on every match: quicker than a dataclass
    """How far a chain of keys is held: `blobs` leading blobs, which are `tokens` tokens.

    The first `warm` are in DRAM. `eta_s` estimates how long a get of all takes. `rebuildable`
    further blobs are not held, and a model runner could make them again from their text, in
    `rebuild_eta_s` (0: not known yet); a get does so. After a fault nothing is held, and
    `reason` is the error's code.
    """

    blobs: int
    tokens: int
    warm: int = 0
    eta_s: float = 0.0
    reason: str = ""
    rebuildable: int = 0
    rebuild_eta_s: float = 0.0

    @property
    def tiers(self) -> tuple[str, ...]:
        """The tier that each blob would come from."""
        return ("dram",) * self.warm + ("ssd",) * (self.blobs - self.warm)

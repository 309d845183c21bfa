"""The cache layer of sliding-window attention that remembers what left its window.

transformers forgets a token's keys and values once the window has passed it, and a
prompt may pass it before anybody could store them. This layer gives attention the
same tensors, and keeps what is new beside them until it has been stored.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from blobstore.clients.transformers import libraries
from blobstore.clients.transformers.libraries import Tensor


@cache
def remembering_window() -> Any:
    """The class, made once transformers is there to derive it from."""
    base: Any = libraries.cache_utils().DynamicSlidingWindowLayer

    class RememberingWindow(base):  # type: ignore[misc]  # a base that type checkers do not see
        """A DynamicSlidingWindowLayer, and the keys and values of all positions from `first` on."""

        def __init__(self, sliding_window: int) -> None:
            super().__init__(sliding_window=sliding_window)
            self.first = 0
            self.pieces: list[tuple[Tensor, Tensor]] = []

        def update(
            self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
        ) -> tuple[Tensor, Tensor]:
            seen: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
            self.pieces.append((_own(key_states), _own(value_states)))
            return seen

        def forget(self, end: int) -> None:
            """Remember no position before `end` any more; pieces are kept or dropped whole."""
            while self.pieces and self.first + self.pieces[0][0].shape[-2] <= end:
                self.first += self.pieces.pop(0)[0].shape[-2]

        def crop(self, tokens_to_remove: int) -> None:
            super().crop(tokens_to_remove)
            self._truncate(self.get_seq_length())

        def reset(self) -> None:
            super().reset()
            self._truncate(0)

        def reorder_cache(self, beam_idx: Tensor) -> None:
            super().reorder_cache(beam_idx)
            self._start_anew()

        def batch_repeat_interleave(self, repeats: int) -> None:
            super().batch_repeat_interleave(repeats)
            self._start_anew()

        def batch_select_indices(self, indices: Tensor) -> None:
            super().batch_select_indices(indices)
            self._start_anew()

        def _start_anew(self) -> None:
            """After the batch changed: what was remembered is of other sequences."""
            self.pieces, self.first = [], self.get_seq_length()

        def _truncate(self, end: int) -> None:
            self.first = min(self.first, end)
            at, kept = self.first, []
            for keys, values in self.pieces:
                length = min(keys.shape[-2], end - at)
                if length > 0:
                    kept.append((keys[:, :, :length], values[:, :, :length]))
                at += keys.shape[-2]
            self.pieces = kept

    return RememberingWindow


def _own(states: Tensor) -> Tensor:
    """`states`, copied if they are a view that keeps a larger tensor alive."""
    states = states.detach()
    compact = states.untyped_storage().nbytes() == states.nbytes
    return states if compact else states.clone()

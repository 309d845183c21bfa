"""What is known of each item, in columns: of those held, and of the latest that left.

An item has a slot from its first use on. One that is forgotten keeps its slot as a
ghost, found again by identity, until the ghosts outnumber what is held (and a floor).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Generic

import numpy as np
import numpy.typing as npt

from blobstore.tiering.policy import T
from blobstore.tiering.reuse_features import N_ITEM

IntArray = npt.NDArray[np.int64]

_GHOSTS_MIN = 65_536
_GHOSTS_PER_ITEM = 2
_NEVER = float("-inf")

UNKNOWN = 0
"""The slot of what is not known: no item has it."""


class ItemTable(Generic[T]):
    """Slots of items, and their columns, which others read and write by slot.

    Columns: `last_s` and `first_s` of use, `uses`, `gap_s` before the last use,
    `children` ever seen, `parent` slot or -1, serial of the last `request`, `features`
    of the item's part as of that use, `sample` watching it (-1: none), `position_tokens`
    in its chain; and by the fit that is numbered in `judged` (-1: by none since the last
    use) its `item_class`, and how much its `level` of hazards is above that of the class.
    """

    def __init__(self, identity: Callable[[T], int]) -> None:
        self._identity = identity
        self._slots: dict[T, int] = {}
        self._ghosts: OrderedDict[int, int] = OrderedDict()
        self._free: list[int] = []
        self._n_slots = UNKNOWN + 1
        self.last_s = np.full(1024, _NEVER)
        self.first_s = np.zeros(1024)
        self.uses = np.zeros(1024, np.int32)
        self.gap_s = np.full(1024, np.nan)
        self.children = np.zeros(1024, np.int32)
        self.parent = np.full(1024, -1, np.int64)
        self.request = np.full(1024, -1, np.int64)
        self.features = np.zeros((1024, N_ITEM), np.float32)
        self.sample = np.full(1024, -1, np.int64)
        self.item_class = np.zeros(1024, np.int32)
        self.level = np.ones(1024, np.float32)
        self.judged = np.full(1024, -1, np.int64)
        self.position_tokens = np.zeros(1024)
        self.view = _View(self)

    def __len__(self) -> int:
        """Items and ghosts."""
        return len(self._slots) + len(self._ghosts)

    @property
    def n_ghosts(self) -> int:
        """Of items that are in no tier."""
        return len(self._ghosts)

    def slot(self, item: T) -> int:
        """The slot of an item that is known; -1 otherwise."""
        return self._slots.get(item, -1)

    def slots(self, items: Sequence[T]) -> IntArray:
        """The slots of items, -1 where none is known."""
        get = self._slots.get
        return np.fromiter((get(item, -1) for item in items), np.int64, len(items))

    def find(self, item: T) -> int:
        """The slot of an item or of its ghost; UNKNOWN if there is neither."""
        slot = self._slots.get(item)
        return self._ghosts.get(self._identity(item), UNKNOWN) if slot is None else slot

    def admit(self, items: Sequence[T]) -> IntArray:
        """The slots of items, made where there is none; ghosts come back with what is known."""
        get = self._slots.get
        found: list[Any] = list(map(get, items))  # most are known: no loop for them
        if None in found:
            for at in range(found.index(None), len(found)):
                slot = get(items[at])
                found[at] = self._add(items[at]) if slot is None else slot
        return np.array(found, np.int64)

    def forget(self, item: T) -> None:
        """`item` is held no more; what is known of it stays for a while."""
        slot = self._slots.pop(item, None)
        if slot is None:
            return
        identity = self._identity(item)
        twin = self._ghosts.pop(identity, None)
        if twin is not None:
            self._release(twin)
        self._ghosts[identity] = slot
        while len(self._ghosts) > max(_GHOSTS_MIN, _GHOSTS_PER_ITEM * len(self._slots)):
            self._release(self._ghosts.popitem(last=False)[1])

    def _add(self, item: T) -> int:
        slot = self._ghosts.pop(self._identity(item), None) if self._ghosts else None
        if slot is None:
            slot = self._free.pop() if self._free else self._new_slot()
        self._slots[item] = slot
        return slot

    def _new_slot(self) -> int:
        slot = self._n_slots
        self._n_slots += 1
        if slot == len(self.last_s):
            self._grow()
        return slot

    def _grow(self) -> None:
        """Twice as many slots, the new ones as those of `_release`."""
        old = len(self.last_s)
        for name, column in vars(self).items():
            if isinstance(column, np.ndarray):
                grown = np.zeros((2 * old, *column.shape[1:]), column.dtype)
                grown[:old] = column
                setattr(self, name, grown)
        self._clear(slice(old, 2 * old))
        self.view = _View(self)

    def _release(self, slot: int) -> None:
        self._clear(slot)
        self._free.append(slot)

    def _clear(self, at: Any) -> None:
        self.last_s[at] = _NEVER
        self.uses[at] = 0
        self.gap_s[at] = np.nan
        self.children[at] = 0
        self.parent[at] = self.request[at] = self.sample[at] = self.judged[at] = -1
        self.item_class[at] = 0
        self.level[at] = 1.0


class _View:
    """Some of the columns, to be read at one slot at a time: a third of NumPy's price."""

    def __init__(self, table: ItemTable[Any]) -> None:
        self.last_s = table.last_s.data
        self.uses = table.uses.data
        self.parent = table.parent.data
        self.item_class = table.item_class.data
        self.level = table.level.data
        self.judged = table.judged.data
        self.position_tokens = table.position_tokens.data

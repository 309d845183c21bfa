"""What is owed to a daemon: in order, in bounded messages, and never twice."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from blobstore.clients.returns import IDS_PER_FRAME, Returns
from blobstore.protocol import Abort, Leased, Release, Reserved


class Sender:
    """Notes that it was told."""

    def __init__(self) -> None:
        self.told = 0

    def flush(self) -> None:
        self.told += 1


class Lease:
    disowned = False

    def disown(self) -> None:
        self.disowned = True


def all_owed(returns: Returns) -> list[Any]:
    taken = []
    while returns.owed:
        taken.append(returns.take().request)
    return taken


def test_leases_and_extents_share_a_message_and_keep_their_order() -> None:
    returns = Returns()
    returns.end_lease(1)
    returns.hand_back(4096)
    returns.end_lease(2)
    assert all_owed(returns) == [Release([1, 2], [4096])]


def test_an_abort_goes_before_the_extents_that_it_names() -> None:
    returns = Returns()
    returns.hand_back(0)
    returns.give_up(7, [1])
    returns.hand_back(4096)
    assert all_owed(returns) == [Release([], [0]), Abort(7, [1]), Release([], [4096])]


def test_a_message_is_bounded() -> None:
    returns = Returns()
    for lease_id in range(IDS_PER_FRAME + 1):
        returns.end_lease(lease_id)
    assert [len(m.lease_ids) for m in all_owed(returns)] == [IDS_PER_FRAME, 1]


def test_what_could_not_be_sent_is_owed_still_and_first() -> None:
    returns = Returns()
    returns.end_lease(1)
    returns.hand_back(4096)
    unsent = returns.take()
    returns.end_lease(2)
    returns.take_back(unsent)
    assert all_owed(returns) == [Release([1, 2], [4096])]


def test_the_sender_is_told_at_once() -> None:
    returns = Returns()
    sender = returns.sender = Sender()
    returns.end_lease(1)
    returns.hand_back(0)
    returns.give_up(3)
    assert sender.told == 3


def test_a_lease_is_held_until_its_exporter_dies() -> None:
    returns = Returns()
    exporter = np.zeros(10, np.uint8)
    returns.hold(exporter, 5, Lease())
    assert returns.holding
    assert returns.holds(5)
    view = exporter.data[3:]
    del exporter
    assert returns.holding
    assert not returns.owed
    del view
    assert not returns.holding
    assert all_owed(returns) == [Release([5])]


def test_an_extent_is_handed_back_when_its_exporter_dies_or_at_once() -> None:
    returns = Returns()
    alive, dead = np.zeros(1, np.uint8), np.zeros(1, np.uint8)
    refs = [weakref.ref(alive), weakref.ref(dead)]
    del dead
    returns.hand_back_after(refs[0], 0)
    returns.hand_back_after(refs[1], 4096)
    assert returns.holding
    assert all_owed(returns) == [Release([], [4096])]
    del alive
    assert not returns.holding
    assert all_owed(returns) == [Release([], [0])]


def test_another_daemon_is_owed_nothing() -> None:
    returns = Returns()
    exporter = np.zeros(1, np.uint8)
    returns.hold(exporter, 1, Lease())
    returns.end_lease(2)
    returns.write_off()
    returns.give_up(3)
    returns.hand_back(0)
    del exporter
    assert not returns.owed
    assert not returns.holding


def test_a_child_owes_nothing_and_its_leases_and_writers_are_disowned() -> None:
    returns = Returns()
    lease, writer, exporter = Lease(), Lease(), np.zeros(1, np.uint8)
    returns.hold(exporter, 1, lease)
    returns.open_writer(writer, 9)
    returns.end_lease(4)
    returns.leave_parent()
    assert lease.disowned
    assert writer.disowned
    del exporter
    assert not returns.owed
    assert not returns.holding


def test_what_is_held_is_named_when_connections_broke() -> None:
    returns = Returns()
    lease, writer = Lease(), Lease()
    exporter, viewed = np.zeros(1), np.zeros(1)
    for lease_id in range(1, 5):
        returns.arrive(Leased(lease_id, b"", "", {}))
    returns.arrive(Leased(0, b"", "absent", {}))
    for reservation_id in range(5, 9):
        returns.arrive(Reserved(reservation_id, b"", [], 60.0))
    returns.hold(exporter, 1, lease)
    returns.end_lease(2)
    returns.open_writer(writer, 5)
    returns.give_up(6)
    returns.hand_back_after(weakref.ref(viewed), 4096)
    returns.take()  # the end of lease 2
    returns.open_writer(writer, 7)
    returns.close_writer(7)
    returns.reclaim([9, 10])
    abort, holding = all_owed(returns)
    assert abort == Abort(6)
    assert holding.connection_ids == [9, 10]
    assert sorted(holding.lease_ids) == [1, 3, 4]
    assert sorted(holding.reservation_ids) == [5, 6, 8]
    assert holding.extents == [4096]

"""What is remembered of items that left, and that it stays bounded."""

from __future__ import annotations

from blobstore.tiering.ghosts import GhostQueue, Ghosts


def test_the_latest_note_is_taken_once() -> None:
    ghosts: Ghosts[float] = Ghosts()
    ghosts.note(7, 1.0, 10)
    ghosts.note(7, 2.0, 10)
    assert len(ghosts) == 1
    assert ghosts.take(7) == 2.0
    assert ghosts.take(7) is None


def test_a_note_from_before_the_change_of_generation_is_replaced() -> None:
    ghosts: Ghosts[float] = Ghosts()
    for identity in range(3):
        ghosts.note(identity, 1.0, 3)
    ghosts.note(0, 2.0, 3)
    assert ghosts.take(0) == 2.0
    assert ghosts.take(0) is None


def test_the_latest_are_known_and_no_more_than_twice_as_many_kept() -> None:
    ghosts: Ghosts[int] = Ghosts()
    for identity in range(1000):
        ghosts.note(identity, identity, 50)
        assert len(ghosts) <= 100
    assert [ghosts.take(identity) for identity in range(950, 1000)] == list(range(950, 1000))
    assert ghosts.take(800) is None


def test_a_queue_forgets_the_oldest_beyond_its_bytes() -> None:
    queue = GhostQueue()
    for identity, nbytes in ((1, 10), (2, 20), (3, 30), (1, 15)):
        queue.add(identity, nbytes)
    assert queue.nbytes == 65
    queue.cut(45)
    assert [identity in queue for identity in (1, 2, 3)] == [True, False, True]
    assert queue.nbytes == 45
    assert queue.size_of(1) == 15
    assert queue.size_of(2) is None
    queue.cut(0)
    assert len(queue) == queue.nbytes == 0


def test_removing_says_whether_it_was_there() -> None:
    queue = GhostQueue()
    queue.add(1, 10)
    assert queue.remove(1)
    assert not queue.remove(1)
    assert queue.nbytes == 0

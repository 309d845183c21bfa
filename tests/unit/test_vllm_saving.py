"""One save: its writer goes to who takes it, and what was not copied stays uncopied for good."""

from __future__ import annotations

from typing import Any

import pytest

from blobstore.clients.vllm.metadata import Save
from blobstore.clients.vllm.room import Room
from blobstore.clients.vllm.saving import Refusal, Saving


class FakeWriter:
    def __init__(self) -> None:
        self.aborted = 0

    def abort(self) -> None:
        self.aborted += 1


def saving() -> Saving:
    return Saving(Save("r", b"", b"k" * 96, 32, b"", 0, (), "standard", 0.0, {}))


def given(save: Saving) -> FakeWriter:
    writer: Any = FakeWriter()
    save.put(writer, None)
    return writer  # type: ignore[no-any-return]


def lost() -> None:
    raise RuntimeError("the device was lost")


def test_a_writer_is_taken_once_it_is_there() -> None:
    save = saving()
    assert not save.wait(0.0)
    writer = given(save)
    assert save.wait(0.0)
    taken: Any = save.take()
    assert taken is writer
    assert writer.aborted == 0


def test_a_writer_that_nobody_takes_any_more_is_aborted() -> None:
    save = saving()
    assert save.take() is None
    assert given(save).aborted == 1
    assert save.writer is None


def test_nothing_of_it_is_all_blobs() -> None:
    assert saving().whole("late") == Refusal("late", 0, 3)


def test_a_copy_that_failed_is_never_forgotten() -> None:
    """It is gone from those that are to be made: the next who asks must not find all done."""
    save, done = saving(), list[int]()
    save.add(lambda: done.append(1))
    save.add(lost)
    save.add(lambda: done.append(2))
    with pytest.raises(RuntimeError, match="the device was lost"):
        save.bring()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="before: RuntimeError: the device was lost"):
            save.bring()
    assert done == [1]


def test_what_was_given_up_is_neither_brought_nor_sealed() -> None:
    save, done = saving(), list[int]()
    writer = given(save)
    save.add(lambda: done.append(1))
    save.give_up()
    assert writer.aborted == 1
    with pytest.raises(RuntimeError, match="given up"):
        save.bring()
    assert done == []


def test_the_fault_is_kept_when_it_is_given_up_for_it() -> None:
    save = saving()
    save.add(lost)
    with pytest.raises(RuntimeError):
        save.bring()
    save.give_up()
    with pytest.raises(RuntimeError, match="the device was lost"):
        save.bring()


def test_a_room_counts_what_is_held() -> None:
    room = Room(10)
    room.hold(7)
    assert room.fits(3)
    assert not room.fits(4)
    room.hold(4)  # whoever holds decides
    room.give_back(7)
    assert room.held == 4
    assert room.fits(6)

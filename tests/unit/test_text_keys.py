from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from blobstore.errors import NewerFormat, SetupError
from blobstore.text_keys import KeyFile, MemoryKeys, TextKeys


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "text.keys"


@pytest.fixture(params=["disk", "memory"])
def keys(request: pytest.FixtureRequest, path: Path) -> Iterator[TextKeys]:
    made: TextKeys = KeyFile(path) if request.param == "disk" else MemoryKeys()
    yield made
    made.close()


def test_a_key_is_found_in_its_slot_until_it_is_wiped(keys: TextKeys) -> None:
    taken = dict(keys.take() for _ in range(5))
    keys.sync()
    assert len(set(taken.values())) == 5
    assert {slot: keys.get(slot) for slot in taken} == taken
    wiped = sorted(taken)[1:3]
    keys.wipe(wiped)
    assert [keys.get(slot) for slot in wiped] == [None, None]
    assert all(keys.get(slot) == taken[slot] for slot in taken if slot not in wiped)
    assert keys.get(1000) is None


def test_what_no_text_uses_is_wiped(keys: TextKeys) -> None:
    taken = dict(keys.take() for _ in range(5))
    kept = sorted(taken)[::2]
    keys.keep_only(kept)
    assert {slot for slot in taken if keys.get(slot)} == set(kept)
    slot, key = keys.take()
    assert slot not in kept
    assert key not in taken.values()


class TestOnDisk:
    def test_keys_outlast_the_process(self, path: Path) -> None:
        keys = KeyFile(path)
        taken = dict(keys.take() for _ in range(3))
        keys.sync()
        keys.close()
        again = KeyFile(path)
        assert {slot: again.get(slot) for slot in taken} == taken
        slot, _ = again.take()
        assert slot not in taken
        again.close()
        assert path.stat().st_mode & 0o777 == 0o600

    def test_the_bytes_of_a_wiped_key_are_overwritten(self, path: Path) -> None:
        keys = KeyFile(path)
        taken = dict(keys.take() for _ in range(3))
        before = path.stat()
        keys.wipe(taken)
        assert not any(key in path.read_bytes() for key in taken.values())
        assert (path.stat().st_ino, path.stat().st_size) == (before.st_ino, before.st_size)
        keys.close()

    def test_slots_are_used_again(self, path: Path) -> None:
        keys = KeyFile(path)
        for _ in range(10):
            slots = [keys.take()[0] for _ in range(4)]
            assert sorted(slots) == [0, 1, 2, 3]
            keys.wipe(slots)
        keys.close()

    def test_a_file_of_another_kind_is_refused(self, path: Path) -> None:
        path.write_bytes(os.urandom(5000))
        with pytest.raises(SetupError, match="does not hold the keys of texts"):
            KeyFile(path)

    def test_a_newer_file_is_refused(self, path: Path) -> None:
        KeyFile(path).close()
        body = bytearray(path.read_bytes())
        body[8] = 2
        path.write_bytes(body)
        with pytest.raises(NewerFormat, match="version 2"):
            KeyFile(path)

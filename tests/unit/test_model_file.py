"""Models on disk: arrays and values, and nothing that runs."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from blobstore.tiering.model_file import load_model, save_model
from blobstore.tiering.sealed_file import Unusable, read_sealed, write_sealed

ARRAYS: dict[str, npt.NDArray[np.generic]] = {
    "table": np.arange(12, dtype=np.float64).reshape(3, 4),
    "empty": np.zeros((0, 7), np.int32),
    "scalar": np.array(2.5),
    "flags": np.array([True, False]),
    "big_end": np.arange(5, dtype=">i4"),
    "turned": np.arange(6, dtype=np.float32).reshape(2, 3).T,
}
VALUES: dict[str, str | int | float] = {"objective": "tokens", "n": 12, "rate": 0.25}


def _saved(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    save_model(path, 7, ARRAYS, VALUES)
    return path


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    arrays, values = load_model(_saved(tmp_path), 7)
    assert values == VALUES
    assert list(arrays) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert arrays[name].shape == array.shape
        np.testing.assert_array_equal(arrays[name], array)
        assert arrays[name].flags.writeable


def test_a_model_of_another_version_is_not_loaded(tmp_path: Path) -> None:
    with pytest.raises(Unusable, match=r"version 7.*8"):
        load_model(_saved(tmp_path), 8)


def test_a_damaged_file_is_not_loaded(tmp_path: Path) -> None:
    path = _saved(tmp_path)
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(Unusable, match="damaged"):
        load_model(path, 7)


@pytest.mark.parametrize(
    "array",
    [
        ["a", "<f8", [100]],
        ["a", "<f8", [1]],
        ["a", "|O", [2]],
        ["a", "<f8", [-1, -2]],
        ["a", "<f8", [1 << 40, 1 << 40]],
        ["a", "nonsense", [2]],
        ["a", "<f8", "shape"],
        "array",
    ],
)
def test_a_whole_file_whose_head_lies_is_not_loaded(tmp_path: Path, array: object) -> None:
    path = _saved(tmp_path)
    head = msgspec.msgpack.encode([7, {}, [array]])
    write_sealed(path, b"tiering\0", 1, len(head).to_bytes(4, "little") + head + bytes(16))
    with pytest.raises(Unusable, match="cannot be read"):
        load_model(path, 7)


def test_a_body_cut_within_its_head_is_not_loaded(tmp_path: Path) -> None:
    path = _saved(tmp_path)
    body = read_sealed(path, b"tiering\0", 1)
    for length in (0, 3, 4, 10):
        write_sealed(path, b"tiering\0", 1, body[:length])
        with pytest.raises(Unusable, match="cannot be read"):
            load_model(path, 7)

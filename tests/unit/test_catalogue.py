from __future__ import annotations

import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import lmdb
import pytest

from blobstore.errors import Full, InvalidRequest, NewerFormat, StorageFailed, UnknownNamespace
from blobstore.tiering.catalogue import Catalogue
from blobstore.tiering.disk import PosixDisk
from blobstore.tiering.row import Row
from blobstore.tiering.tier import Extent
from blobstore.units import KIB
from tests.support.ssd_blobs import CANONICAL, NAMESPACE, row_of

NOW_S = 100.0


class _Disk(PosixDisk):
    """Commits can fail, before or after they have reached the disk."""

    def __init__(self) -> None:
        self.fail_before = self.fail_after = False

    def before_commit(self) -> None:
        if self.fail_before:
            raise OSError(5, "Input/output error")

    def after_commit(self) -> None:
        if self.fail_after:
            raise OSError(5, "Input/output error")


@pytest.fixture
def disk() -> _Disk:
    return _Disk()


@pytest.fixture
def catalogue(tmp_path: Path, disk: _Disk) -> Iterator[Catalogue]:
    with closing(_open(tmp_path, disk)) as catalogue:
        catalogue.declare(NAMESPACE, CANONICAL)
        yield catalogue


def _open(path: Path, disk: PosixDisk | None = None) -> Catalogue:
    return Catalogue(path, disk or PosixDisk(), 256 * KIB)


def _key(n: int) -> bytes:
    return b"%032d" % n


def _row(n: int, nbytes: int = 100_000) -> Row:
    return row_of(_key(n), bytes(nbytes), Extent(1, 4096 * (1 + 100 * n), nbytes))


def _rows(catalogue: Catalogue) -> dict[bytes, Row]:
    return {row.key: row for row in catalogue.rows(NOW_S)}


def _inline(catalogue: Catalogue, key: bytes, nbytes: int) -> bytes:
    into = bytearray(nbytes)
    catalogue.read_inline(NAMESPACE, key, memoryview(into))
    return bytes(into)


def _full_of_rows(catalogue: Catalogue) -> list[bytes]:
    catalogue.share_room(lambda nbytes: nbytes <= 0, lambda: None)
    keys: list[bytes] = []
    try:
        while True:
            row = _row(len(keys))._replace(pieces=bytes(1600))
            catalogue.apply([(row, None)], [])
            keys.append(row.key)
    except Full:
        return keys


def test_rows_come_back_as_they_were(catalogue: Catalogue) -> None:
    rows = [_row(n) for n in range(10)]
    catalogue.apply([(row, None) for row in rows], [])
    assert _rows(catalogue) == {row.key: row for row in rows}


@pytest.mark.parametrize("nbytes", [0, 1, 5000, 64 * KIB])
def test_small_payloads_lie_in_the_catalogue(catalogue: Catalogue, nbytes: int) -> None:
    payload = bytes([7]) * nbytes
    catalogue.apply([(row_of(_key(1), payload), memoryview(payload))], [])
    assert _inline(catalogue, _key(1), nbytes) == payload
    assert dict(catalogue.inline_sizes()) == {catalogue.row_key(NAMESPACE, _key(1)): nbytes}
    catalogue.apply([], [(NAMESPACE, _key(1))])
    assert list(catalogue.inline_sizes()) == []


def test_a_payload_of_another_size_or_none_is_a_fault(catalogue: Catalogue) -> None:
    catalogue.apply([(row_of(_key(1), b"abc"), memoryview(b"abc"))], [])
    with pytest.raises(StorageFailed, match="wanted 4 bytes in the catalogue, found 3"):
        _inline(catalogue, _key(1), 4)
    with pytest.raises(StorageFailed, match="found none"):
        _inline(catalogue, _key(2), 0)


def test_a_batch_removes_before_it_adds(catalogue: Catalogue) -> None:
    catalogue.apply([(_row(1), None), (_row(2), None)], [])
    again = _row(1)._replace(tokens=7)
    catalogue.apply([(again, None)], [(NAMESPACE, _key(1)), (NAMESPACE, _key(2))])
    assert _rows(catalogue) == {again.key: again}


def test_removing_what_is_not_there_is_harmless(catalogue: Catalogue) -> None:
    catalogue.apply([(_row(1), None)], [(NAMESPACE, _key(9))])
    assert _rows(catalogue).keys() == {_key(1)}


def test_a_use_is_remembered_and_is_never_in_the_future(catalogue: Catalogue) -> None:
    catalogue.apply([(_row(n), None) for n in (1, 2, 3)], [])
    touched = [(NAMESPACE, _key(1), 50.0), (NAMESPACE, _key(2), 1e12), (NAMESPACE, _key(9), 1.0)]
    catalogue.apply([], [], touched)
    used = {key: row.last_used_wall_s for key, row in _rows(catalogue).items()}
    assert used == {_key(1): 50.0, _key(2): NOW_S, _key(3): 5.0}


def test_many_rows_are_read_in_several_short_snapshots(catalogue: Catalogue) -> None:
    rows = [_row(n) for n in range(9000)]
    catalogue.apply([(row, None) for row in rows], [])
    found = []
    for row in catalogue.rows(NOW_S):
        found.append(row.key)
        if len(found) == 4096:  # the last one of a snapshot goes before the next begins
            catalogue.apply([], [(NAMESPACE, found[-1]), (NAMESPACE, _key(8999))])
    assert found == [_key(n) for n in range(8999)]


@pytest.mark.parametrize("n", [4095, 4096, 4097])
def test_scans_end_at_the_last_row(catalogue: Catalogue, n: int) -> None:
    catalogue.apply([(_row(i), None) for i in range(n)], [])
    assert len(list(catalogue.records())) == n


def test_namespaces_survive_and_keep_their_numbers(tmp_path: Path) -> None:
    other = bytes(32)
    with closing(_open(tmp_path)) as catalogue:
        catalogue.declare(NAMESPACE, CANONICAL)
        catalogue.declare(other, b"other")
        catalogue.declare(NAMESPACE, CANONICAL)
        row_key = catalogue.row_key(other, _key(1))
        catalogue.apply([(_row(1)._replace(namespace=other), None)], [])
    with closing(_open(tmp_path)) as catalogue:
        assert catalogue.namespaces() == {NAMESPACE: CANONICAL, other: b"other"}
        assert catalogue.row_key(other, _key(1)) == row_key
        assert catalogue.row_key(NAMESPACE, _key(1)) != row_key
        assert _rows(catalogue)[_key(1)].namespace == other


def test_namespaces_declared_at_once_get_numbers_of_their_own(catalogue: Catalogue) -> None:
    ids = [bytes([n]) * 32 for n in range(64, 96)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda one: catalogue.declare(one, one), ids))
    assert len({catalogue.row_key(one, b"") for one in ids}) == len(ids)


def test_a_number_whose_commit_is_in_doubt_is_not_given_again(
    tmp_path: Path, catalogue: Catalogue, disk: _Disk
) -> None:
    first, second = bytes([1]) * 32, bytes([2]) * 32
    disk.fail_after = True
    with pytest.raises(StorageFailed):
        catalogue.declare(first, b"first")
    disk.fail_after = False
    catalogue.declare(second, b"second")
    catalogue.close()
    with closing(_open(tmp_path)) as again:
        assert again.row_key(first, b"") != again.row_key(second, b"")


def test_an_undeclared_namespace_is_refused_and_nothing_is_written(catalogue: Catalogue) -> None:
    unknown = _row(2)._replace(namespace=bytes(32))
    with pytest.raises(UnknownNamespace, match="not declared"):
        catalogue.apply([(_row(1), None), (unknown, None)], [])
    with pytest.raises(InvalidRequest):
        catalogue.apply([(_row(1), None), (_row(2)._replace(tokens=-1), None)], [])
    assert _rows(catalogue) == {}


def test_a_failed_commit_leaves_none_of_its_additions(catalogue: Catalogue, disk: _Disk) -> None:
    catalogue.apply([(_row(1), None)], [])
    disk.fail_before = True
    with pytest.raises(StorageFailed):
        catalogue.apply([(_row(2), None)], [(NAMESPACE, _key(1))])
    disk.fail_before = False
    assert _rows(catalogue).keys() == {_key(1)}
    catalogue.apply([(_row(3), None)], [])
    assert _rows(catalogue).keys() == {_key(1), _key(3)}


def test_additions_in_doubt_are_taken_back_by_the_next_commit(
    catalogue: Catalogue, disk: _Disk
) -> None:
    disk.fail_after = True
    with pytest.raises(StorageFailed):
        catalogue.apply([(_row(1), None), (_row(2), None)], [])
    disk.fail_after = False
    # One of them was written anew meanwhile: that one stays.
    catalogue.apply([(_row(2)._replace(tokens=7), None)], [])
    assert {key: row.tokens for key, row in _rows(catalogue).items()} == {_key(2): 7}
    catalogue.apply([(_row(3), None)], [])
    assert _rows(catalogue).keys() == {_key(2), _key(3)}


@pytest.mark.parametrize("fault", ["fail_before", "fail_after"])
def test_a_row_that_failed_to_be_written_anew_is_not_lost(
    catalogue: Catalogue, disk: _Disk, fault: str
) -> None:
    row = row_of(_key(1), b"abc")
    catalogue.apply([(row, memoryview(b"abc"))], [])
    setattr(disk, fault, True)
    with pytest.raises(StorageFailed):
        catalogue.apply([(row._replace(retention="durable"), None)], [])
    setattr(disk, fault, False)
    catalogue.apply([(_row(2), None)], [])
    assert _rows(catalogue).keys() == {_key(1), _key(2)}
    assert _inline(catalogue, _key(1), 3) == b"abc"
    catalogue.apply([(row._replace(retention="durable"), None)], [])
    assert _rows(catalogue)[_key(1)].retention == "durable"
    assert _inline(catalogue, _key(1), 3) == b"abc"


def test_a_full_catalogue_removes_all_the_same(catalogue: Catalogue) -> None:
    keys = _full_of_rows(catalogue)
    assert _rows(catalogue).keys() == set(keys)
    doomed = keys[::3]
    catalogue.apply([], [(NAMESPACE, key) for key in doomed], [(NAMESPACE, keys[1], 9.0)])
    assert _rows(catalogue).keys() == set(keys) - set(doomed)


def test_removals_of_a_batch_that_does_not_fit_are_made(catalogue: Catalogue) -> None:
    keys = _full_of_rows(catalogue)
    big = [(_row(n)._replace(pieces=bytes(1600)), None) for n in range(10_000, 11_000)]
    with pytest.raises(Full):
        catalogue.apply(big, [(NAMESPACE, keys[0])])
    assert _rows(catalogue).keys() == set(keys[1:])


def test_times_of_use_are_given_up_where_there_is_no_room(catalogue: Catalogue) -> None:
    keys = _full_of_rows(catalogue)
    catalogue.apply([], [], [(NAMESPACE, key, 9.0) for key in keys])
    assert _rows(catalogue).keys() == set(keys)


def _write_raw(path: Path, table: bytes, key: bytes, value: bytes) -> None:
    with (
        lmdb.open(str(path), max_dbs=4, map_size=1 << 26) as env,
        env.begin(write=True) as txn,
    ):
        txn.put(key, value, db=env.open_db(table, txn=txn))


def test_a_later_format_is_refused_and_left_alone(tmp_path: Path) -> None:
    _open(tmp_path).close()
    _write_raw(tmp_path, b"meta", b"format", struct.pack("<Q", 2))
    before = (tmp_path / "data.mdb").read_bytes()
    with pytest.raises(NewerFormat, match="format 2, this program knows up to 1"):
        _open(tmp_path)
    assert (tmp_path / "data.mdb").read_bytes() == before


def test_a_damaged_namespace_is_counted_and_its_rows_are_not_believed(tmp_path: Path) -> None:
    with closing(_open(tmp_path)) as catalogue:
        catalogue.declare(NAMESPACE, CANONICAL)
        catalogue.apply([(_row(1), None)], [])
    _write_raw(tmp_path, b"namespaces", NAMESPACE, b"12345678" + bytes(20))
    with closing(_open(tmp_path)) as catalogue:
        assert catalogue.damaged_namespaces == 1
        assert catalogue.namespaces() == {}
        assert _rows(catalogue) == {}
        # Its number may be in use by rows, and goes to nobody else.
        catalogue.declare(bytes(32), b"other")
        assert _rows(catalogue) == {}


def test_openings_are_counted_and_the_store_keeps_its_name(tmp_path: Path) -> None:
    with closing(_open(tmp_path)) as first:
        name = first.store_id
        assert first.boots == 1
    with closing(_open(tmp_path)) as second:
        assert (second.store_id, second.boots) == (name, 2)
    assert len(name) == 16

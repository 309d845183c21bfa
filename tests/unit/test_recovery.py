from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import lmdb
import pytest

from blobstore.tiering.catalogue import Added, Catalogue
from blobstore.tiering.disk import PosixDisk
from blobstore.tiering.placement import HEADER_BYTES
from blobstore.tiering.recovery import Findings, survey
from blobstore.tiering.row import HOLE
from blobstore.tiering.tier import Extent
from blobstore.units import KIB, MIB
from tests.support.ssd_blobs import CANONICAL, NAMESPACE, row_of

SIZES = {1: 2 * MIB, 2: MIB}
NBYTES = 70_000
STEP = 18 * 4096


@pytest.fixture
def catalogue(tmp_path: Path) -> Iterator[Catalogue]:
    with closing(Catalogue(tmp_path, PosixDisk(), 256 * KIB)) as catalogue:
        catalogue.declare(NAMESPACE, CANONICAL)
        yield catalogue


def _key(n: int) -> bytes:
    return b"%032d" % n


def _placed(n: int, parent: int | None = None, *, place: int = 1, at: int | None = None) -> Added:
    offset = HEADER_BYTES + n * STEP if at is None else at
    parent_key = b"" if parent is None else _key(parent)
    return row_of(_key(n), bytes(NBYTES), Extent(place, offset, NBYTES), parent=parent_key), None


def _inline(n: int, parent: int | None = None) -> Added:
    parent_key = b"" if parent is None else _key(parent)
    return row_of(_key(n), b"abc", parent=parent_key), memoryview(b"abc")


def _dropped(catalogue: Catalogue, findings: Findings) -> set[bytes]:
    assert len(set(findings.dropped)) == len(findings.dropped)
    return {row_key.removeprefix(catalogue.row_key(NAMESPACE, b"")) for row_key in findings.dropped}


def test_a_sound_catalogue_stands(catalogue: Catalogue) -> None:
    catalogue.apply([_placed(2, 1), _placed(1), _placed(3, 2, place=2), _inline(4, 3)], [])
    findings = survey(catalogue, SIZES)
    assert findings.dropped == []
    assert findings.reasons == {}
    first, second = HEADER_BYTES + STEP, HEADER_BYTES + 2 * STEP
    assert findings.spans.tolist() == [
        [1, first, NBYTES],
        [1, second, NBYTES],
        [2, HEADER_BYTES + 3 * STEP, NBYTES],
    ]


def test_an_empty_catalogue_has_nothing_to_drop(catalogue: Catalogue) -> None:
    findings = survey(catalogue, {})
    assert findings.dropped == []
    assert findings.spans.shape == (0, 3)


@pytest.mark.parametrize(
    ("place", "at"),
    [
        (1, 2 * MIB - NBYTES),  # its last block is beyond the end
        (1, 2 * MIB),
        (1, (1 << 63) + 4096),
        (3, HEADER_BYTES),  # no such file
        (1, 0),  # over the header
    ],
)
def test_what_is_not_whole_in_a_segment_is_dropped(
    catalogue: Catalogue, place: int, at: int
) -> None:
    catalogue.apply([_placed(1), _placed(2, place=place, at=at)], [])
    findings = survey(catalogue, SIZES)
    assert _dropped(catalogue, findings) == {_key(2)}
    assert findings.reasons == {"cut": 1}
    assert findings.spans.tolist() == [[1, HEADER_BYTES + STEP, NBYTES]]


def test_both_of_two_that_overlap_are_dropped(catalogue: Catalogue) -> None:
    start = HEADER_BYTES + 10 * STEP
    catalogue.apply(
        [
            _placed(1, at=start),
            _placed(2, at=start + STEP - 4096),  # shares its last block
            _placed(3, at=start + 3 * STEP),
            _placed(4, at=start + STEP, place=2),
        ],
        [],
    )
    findings = survey(catalogue, {1: 4 * MIB, 2: 4 * MIB})
    assert _dropped(catalogue, findings) == {_key(1), _key(2)}
    assert findings.reasons == {"overlapping": 2}


def test_a_lost_ancestor_takes_its_whole_subtree_along(catalogue: Catalogue) -> None:
    lost = [_placed(2, 1, place=9), _placed(3, 2), _inline(4, 3), _placed(5, 3)]
    catalogue.apply([_placed(1), *lost, _placed(6, 1), _inline(7, 6), _inline(9, 8)], [])
    findings = survey(catalogue, SIZES)
    assert _dropped(catalogue, findings) == {_key(n) for n in (2, 3, 4, 5, 9)}
    assert findings.reasons == {"cut": 1, "orphaned": 4}
    assert len(findings.spans) == 2


def test_parents_are_looked_for_in_the_same_namespace(catalogue: Catalogue) -> None:
    other = bytes(32)
    catalogue.declare(other, b"other")
    child = _inline(2, 1)[0]._replace(namespace=other)
    catalogue.apply([_inline(1), (child, memoryview(b"abc"))], [])
    assert survey(catalogue, SIZES).reasons == {"orphaned": 1}


def _hole(n: int, parent: int | None = None) -> Added:
    return _inline(n, parent)[0]._replace(retention=HOLE), None


def test_a_hole_stands_as_long_as_something_continues_it(catalogue: Catalogue) -> None:
    blobs = [_inline(1), _hole(2, 1), _placed(3, 2), _hole(4, 3), _hole(5, 4), _inline(6), _hole(7)]
    catalogue.apply(blobs, [])
    findings = survey(catalogue, SIZES)
    assert _dropped(catalogue, findings) == {_key(n) for n in (4, 5, 7)}
    assert findings.reasons == {"bare_holes": 3}
    assert len(findings.spans) == 1


def test_a_blob_that_becomes_a_hole_leaves_no_payload(catalogue: Catalogue) -> None:
    catalogue.apply([_inline(1), _inline(2, 1)], [])
    catalogue.apply([_hole(1)], [])
    assert not survey(catalogue, SIZES).dropped
    assert dict(catalogue.inline_sizes()) == {catalogue.row_key(NAMESPACE, _key(2)): 3}
    catalogue.apply([_inline(1)], [])
    assert not survey(catalogue, SIZES).dropped


def _edit(path: Path, table: bytes, row_key: bytes, value: bytes | None) -> None:
    with lmdb.open(str(path), max_dbs=4, map_size=1 << 26) as env, env.begin(write=True) as txn:
        db = env.open_db(table, txn=txn)
        if value is None:
            txn.delete(row_key, db=db)
        else:
            txn.put(row_key, value, db=db)


@pytest.mark.parametrize(
    ("table", "value", "reason"),
    [
        (b"inline", None, "cut"),
        (b"inline", b"ab", "cut"),
        (b"blobs", None, "without_row"),
        (b"blobs", bytes(100), "damaged"),
        (b"blobs", b"", "damaged"),
    ],
)
def test_rows_and_payloads_that_do_not_match_are_dropped(
    tmp_path: Path, table: bytes, value: bytes | None, reason: str
) -> None:
    with closing(Catalogue(tmp_path, PosixDisk(), 256 * KIB)) as catalogue:
        catalogue.declare(NAMESPACE, CANONICAL)
        catalogue.apply([_inline(1), _inline(2)], [])
        row_key = catalogue.row_key(NAMESPACE, _key(1))
    _edit(tmp_path, table, row_key, value)
    with closing(Catalogue(tmp_path, PosixDisk(), 256 * KIB)) as catalogue:
        findings = survey(catalogue, SIZES)
        assert _dropped(catalogue, findings) == {_key(1)}
        assert findings.reasons == {reason: 1}
        catalogue.discard(findings.dropped)
        assert survey(catalogue, SIZES).dropped == []
        assert dict(catalogue.inline_sizes()).keys() == {catalogue.row_key(NAMESPACE, _key(2))}


def test_rows_of_an_unknown_namespace_are_dropped(tmp_path: Path) -> None:
    with closing(Catalogue(tmp_path, PosixDisk(), 256 * KIB)) as catalogue:
        catalogue.declare(NAMESPACE, CANONICAL)
        catalogue.apply([_inline(1)], [])
    _edit(tmp_path, b"namespaces", NAMESPACE, None)
    with closing(Catalogue(tmp_path, PosixDisk(), 256 * KIB)) as catalogue:
        assert survey(catalogue, SIZES).reasons == {"damaged": 1}

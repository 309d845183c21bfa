"""Where a chain lies in DRAM, and that a kept answer never outlives its truth."""

from __future__ import annotations

from blobstore.chains import CHAINS_MAX, Chains
from blobstore.index import NamespaceState, Record
from blobstore.layout import KVLayout
from blobstore.namespace import Namespace
from blobstore.tiering.tier import Extent

NS = NamespaceState(Namespace(model="m", layout=KVLayout.opaque(4096)))


def chain(n: int, name: str = "") -> list[Record]:
    """`n` blobs in DRAM, each continuing the one before."""
    records: list[Record] = []
    for number in range(n):
        key = f"{name}{number}".encode().rjust(32, b".")
        record = Record(NS, key, records[-1] if records else None, 4096, 256)
        record.show_in_dram(Extent(0, number * 4096, 4096))
        records.append(record)
    return records


def packed_keys(records: list[Record]) -> bytes:
    return b"".join(record.key for record in records)


class Departures:
    """Stands for the residency's count."""

    def __init__(self) -> None:
        self.count = 0


def test_a_chain_in_dram_is_given_in_the_order_of_its_keys() -> None:
    records = chain(5)
    extents = Chains(lambda: 0).extents(records[-1], packed_keys(records), 5)
    assert extents == b"".join(record.packed for record in records)


def test_a_part_of_a_chain_is_given_without_its_head() -> None:
    records = chain(5)
    extents = Chains(lambda: 0).extents(records[-1], packed_keys(records[2:]), 3)
    assert extents == b"".join(record.packed for record in records[2:])


def test_keys_that_are_not_the_leafs_ancestors_get_nothing_even_after_a_right_answer() -> None:
    records, strangers = chain(5), chain(4, "other")
    chains = Chains(lambda: 0)
    assert chains.extents(records[-1], packed_keys(records), 5)
    wrong = packed_keys([*strangers, records[-1]])
    assert chains.extents(records[-1], wrong, 5) is None
    assert chains.extents(records[-1], packed_keys(records[1:]), 4) != packed_keys(records)


def test_more_keys_than_the_chain_has_get_nothing() -> None:
    records = chain(3)
    keys = bytes(32) + packed_keys(records)
    assert Chains(lambda: 0).extents(records[-1], keys, 4) is None


def test_an_answer_is_forgotten_when_a_blob_has_left_dram() -> None:
    departures, records = Departures(), chain(3)
    chains = Chains(lambda: departures.count)
    assert chains.extents(records[-1], packed_keys(records), 3)
    records[0].packed = b""
    departures.count += 1
    assert chains.extents(records[-1], packed_keys(records), 3) is None
    records[0].show_in_dram(Extent(0, 99 * 4096, 4096))
    extents = chains.extents(records[-1], packed_keys(records), 3)
    assert extents == b"".join(record.packed for record in records)


def test_only_so_many_answers_are_kept() -> None:
    chains = Chains(lambda: 0)
    for number in range(CHAINS_MAX + 10):
        (record,) = chain(1, f"{number}-")
        assert chains.extents(record, record.key, 1) == record.packed
    assert len(chains._answers) == CHAINS_MAX

"""Chunks of a request: which continues which."""

from __future__ import annotations

from blobstore.clients.vllm.tier_chunks import Chunk, Positions, runs


def key(number: int, group: int = 0) -> bytes:
    return bytes([number]) * 32 + group.to_bytes(4, "big")


def ends(count: int, step: int, group: int = 0) -> dict[bytes, int]:
    return {key(n, group): (n + 1) * step for n in range(count)}


def test_chunks_of_a_set_are_put_in_order_and_know_what_they_continue() -> None:
    positions = Positions({0: 256})
    keys = [key(3), key(1), key(2)]
    chunks = positions.chunks(keys, [7, 8, 9], ends(4, 256))
    assert chunks == [
        Chunk(key(1), 8, key(0)),
        Chunk(key(2), 9, key(1)),
        Chunk(key(3), 7, key(2)),
    ]
    assert positions.chunks([key(0)], [1], ends(4, 256)) == [Chunk(key(0), 1, None)]


def test_groups_are_chains_of_their_own() -> None:
    positions = Positions({0: 256, 2: 64})
    both = ends(2, 256) | ends(4, 64, group=2)
    chunks = positions.chunks([key(1, 2), key(1), key(2, 2)], [0, 1, 2], both)
    assert [chunk.parent for chunk in chunks] == [key(0), key(0, 2), key(1, 2)]


def test_keys_that_come_later_are_learned() -> None:
    positions, known = Positions({0: 256}), ends(1, 256)
    assert positions.chunks([key(0)], [0], known)[0].parent is None
    known |= ends(2, 256)
    assert positions.chunks([key(1)], [0], known)[0].parent == key(0)


def test_a_tail_continues_the_last_whole_chunk() -> None:
    known = ends(2, 256) | {key(9): 600}
    assert Positions({0: 256}).chunks([key(9)], [0], known)[0].parent == key(1)


def test_without_positions_every_chunk_is_a_root() -> None:
    chunks = Positions({0: 256}).chunks([key(1), key(2)], [0, 1], {})
    assert [chunk.parent for chunk in chunks] == [None, None]
    assert [chunk.key for chunk in chunks] == [key(1), key(2)]


def test_runs_end_where_a_chunk_is_missing() -> None:
    chain = [Chunk(key(n), n, key(n - 1) if n else None) for n in range(6)]
    assert runs(chain) == [chain]
    assert runs([*chain[:2], *chain[3:]]) == [chain[:2], chain[3:]]
    assert runs([chain[0], Chunk(key(9), 9, None)]) == [[chain[0]], [Chunk(key(9), 9, None)]]
    assert runs([]) == []

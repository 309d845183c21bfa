"""A text that is damaged on the disk is a miss, which is counted; all others are as good."""

from __future__ import annotations

from pathlib import Path

from blobstore.clients import Client
from blobstore.text_rows import name_of, parse
from blobstore.text_shelf import DIRECTORY, Shelf
from tests.support.daemon import Daemon, daemon
from tests.support.rebuild_runner import NAMESPACE, ids_of, payloads_of, put_and_drop, runner

N = 6
BAD = 3
"""Number of the blob whose text is damaged."""
DAMAGED, WHOLE = ids_of(N, seed=1), ids_of(N, seed=2)


def flip_text(run: Daemon, key: bytes) -> None:
    """Flip a bit in the middle of a text, in the file of a daemon that has ended."""
    shelf = Shelf.open(run.data, quota_bytes=1 << 30, retention_s=1e9, wall_clock=lambda: 1.0)
    with shelf._tables.reading() as txn:
        seq = txn.seq_of(name_of(NAMESPACE.id, key))
        assert seq is not None
        stored = txn.row(seq)
    shelf.close()
    assert stored is not None
    sealed = parse(stored).sealed
    middle = len(sealed) // 2
    flipped = sealed[:middle] + bytes([sealed[middle] ^ 4]) + sealed[middle + 1 :]
    path = run.data / DIRECTORY / "data.mdb"
    before = path.read_bytes()
    assert sealed in before
    path.write_bytes(before.replace(sealed, flipped))


def test_a_damaged_text_is_a_counted_miss_and_all_others_are_rebuilt(tmp_path: Path) -> None:
    keys, others = NAMESPACE.keys(DAMAGED), NAMESPACE.keys(WHOLE)
    with daemon(tmp_path) as run, Client(run.address, timeout_s=20.0) as kv:
        ns = kv.namespace(NAMESPACE)
        for ids in (DAMAGED, WHOLE):
            put_and_drop(kv, ns, ids)
        run.process.terminate()
        assert run.wait() == 0
    flip_text(run, keys[BAD])
    with (
        daemon(tmp_path) as run,
        Client(run.address, timeout_s=20.0) as kv,
        runner(run.address),
    ):
        ns = kv.namespace(NAMESPACE)
        assert kv.stats()["texts"]["damaged"] == 0
        with kv.get(ns, keys, timeout_s=10.0) as lease:
            assert [bytes(payload) for payload in lease] == payloads_of(DAMAGED)[:BAD]
            assert lease.reason == "absent"
        assert kv.stats()["texts"]["damaged"] == 1
        with kv.get(ns, others, timeout_s=10.0) as lease:
            assert [bytes(payload) for payload in lease] == payloads_of(WHOLE)
            assert lease.served == {"rebuild": N}
        # Whoever has the blobs may put them, and their texts, anew.
        assert kv.drop(ns, keys) == BAD
        put_and_drop(kv, ns, DAMAGED)
        with kv.get(ns, keys, timeout_s=10.0) as lease:
            assert [bytes(payload) for payload in lease] == payloads_of(DAMAGED)
        assert kv.stats()["texts"]["damaged"] == 1
        assert run.process.poll() is None

"""The life of a conversation beside a real daemon: compacted, paused, and taken up again."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest

from blobstore.clients import BoundNamespace, Client, Hint, Keys, RebuildJob
from blobstore.units import MIB
from tests.support.blobs import TOKENS, chain, count_right, opaque, payload_of, payloads_of, put
from tests.support.daemon import daemon
from tests.support.polling import poll_until

ONE_MIB = opaque(MIB)
AT_ONCE = {
    "BLOBSTORE__TIERING__POLICY": "lru",
    "BLOBSTORE__TIERING__SUPERSEDE_GRACE_S": "0",
}
"""Whatever is flooded has left, and what was replaced has no grace."""

N_SHARED, N_OLD, N_NEW = 2, 10, 4
N_LIVING, N_EACH = 5, 4


def compacted() -> tuple[Keys, Keys]:
    """A context before and after its compaction: they share a head."""
    head = np.r_[1, 1 : TOKENS * N_SHARED]
    old, new = (
        ONE_MIB.keys(np.r_[head, start : start + TOKENS * n])
        for start, n in ((10_000, N_OLD), (20_000, N_NEW))
    )
    return old, new


@pytest.mark.parametrize("ssd", ["off", "96MiB"])
def test_after_a_compaction_the_old_branch_goes_first_and_no_other_context_loses_a_blob(
    tmp_path: Path, ssd: str
) -> None:
    old, new = compacted()
    living = [new, *(chain(ONE_MIB, 100 + at, N_EACH) for at in range(N_LIVING))]
    with (
        daemon(tmp_path, "--dram", "64MiB", "--ssd", ssd, environ=AT_ONCE) as run,
        Client(run.address, timeout_s=20.0) as kv,
    ):
        ns = kv.namespace(ONE_MIB)
        for keys in (*living[1:], new, old):  # the old branch was used last
            assert set(put(kv, ONE_MIB, keys)) <= {"stored", "exists"}
        assert kv.supersede(ns, old[-1], new[-1]) == N_OLD
        for number in range(300):
            if n_left(kv, ns, old) <= 1:
                break
            living.append(chain(ONE_MIB, 1000 + number, 1))
            assert put(kv, ONE_MIB, living[-1]) == ["stored"]
            whole = all(kv.match(ns, keys).blobs == len(keys) for keys in living)
            assert whole or n_left(kv, ns, old) == 0  # several may have left in one go
        assert n_left(kv, ns, old) <= 1
        lost = kv.stats()["counters"]["moved_blobs"]["ssd>none" if ssd != "off" else "dram>none"]
        assert lost["superseded"] == N_OLD - n_left(kv, ns, old)
        assert count_right(kv, ONE_MIB, new) == len(new)


def n_left(kv: Client, ns: BoundNamespace, old: Keys) -> int:
    """Blobs of the old branch alone that are held yet."""
    return kv.match(ns, old).blobs - N_SHARED


def test_a_paused_conversation_is_taken_up_again_after_a_restart(tmp_path: Path) -> None:
    old, new = compacted()
    with daemon(tmp_path) as run, Client(run.address, timeout_s=20.0) as kv:
        ns = kv.namespace(ONE_MIB)
        for keys in (old, new):
            assert set(put(kv, ONE_MIB, keys)) <= {"stored", "exists"}
        session = kv.session("conversation")
        assert session.match(ns, new).blobs == len(new)
        with session.get(ns, new) as lease:
            assert len(lease) == len(new)
        assert kv.supersede(ns, old[-1], new[-1]) == N_OLD
        poll_until(lambda: kv.stats()["uses"]["waiting"] == 0, 10.0)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 0
    with daemon(tmp_path) as run, Client(run.address, timeout_s=20.0) as kv:
        ns = kv.namespace(ONE_MIB)
        assert kv.match(ns, new).warm == 0
        assert kv.stats()["superseded"] == {"blobs": N_OLD, "branches": 1}
        session = kv.session("conversation", turn=1)
        assert session.prefetch() == len(new)
        poll_until(lambda: kv.match(ns, new).warm == len(new), 10.0, "it is in DRAM")
        assert count_right(kv, ONE_MIB, new) == len(new)
        assert kv.stats()["counters"]["hit_blobs"] == {"dram": len(new)}
        with kv.get(ns, old, hint=Hint("another")) as lease:  # a branch off the old one
            assert len(lease) == len(old)
        assert kv.stats()["superseded"] == {"blobs": 0, "branches": 0}


def rebuild(job: RebuildJob) -> None:
    """A model runner, as far as the daemon can tell."""
    for at, key in enumerate(job.keys):
        job[at][:] = payload_of(key, MIB)
        job.seal(at)


@pytest.mark.parametrize("n_left", [0, 3])
def test_a_conversation_of_which_only_text_is_left_is_taken_up_again(
    tmp_path: Path, n_left: int
) -> None:
    ids = np.arange(TOKENS * N_OLD)
    keys = ONE_MIB.keys(ids)
    with daemon(tmp_path) as run, Client(run.address, timeout_s=20.0) as kv:
        ns = kv.namespace(ONE_MIB)
        session = kv.session("conversation")
        contents = payloads_of(keys, MIB)
        assert session.put_from(ns, keys, contents, token_ids=ids) == ["stored"] * N_OLD
        poll_until(lambda: kv.stats()["texts"]["entries"] == N_OLD, 10.0)
        poll_until(lambda: kv.stats()["uses"]["waiting"] == 0, 10.0)
        assert kv.drop(ns, keys[n_left:]) == N_OLD - n_left
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 0
    with daemon(tmp_path) as run, Client(run.address, timeout_s=20.0) as kv:
        ns = kv.namespace(ONE_MIB)
        assert kv.prefetch(session="conversation") == n_left  # no runner is there
        with kv.serve_rebuilds([ns], rebuild):
            assert kv.prefetch(session="conversation") >= N_OLD - n_left
            poll_until(lambda: kv.match(ns, keys).warm == N_OLD, 20.0, "it is in DRAM")
        assert count_right(kv, ONE_MIB, keys) == N_OLD
        assert set(kv.stats()["counters"]["hit_blobs"]) == {"dram"}

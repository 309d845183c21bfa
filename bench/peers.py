"""`blobstore bench peers`: the same puts, gets and look-ups by this store and by others.

All contestants run at once, each with its real server, and take turns in one loop
on the same bytes; what they return is compared with what was put, outside the
measured part. In it the first and last byte of every blob are read.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import count

import numpy as np

from blobstore.bench.blobs import key_chain, require
from blobstore.bench.machine import beyond_caches_bytes, machine_facts, memory_available_bytes
from blobstore.bench.pairs import timed
from blobstore.bench.peer import Bytes, Lends, Payload, Peer, Room, view
from blobstore.bench.peer_lmcache import LMCacheServer
from blobstore.bench.peer_mooncake import MooncakeStore
from blobstore.bench.peer_ours import Ours
from blobstore.bench.peer_ray import RayStore
from blobstore.bench.peer_redis import RedisByHand, RedisPackage
from blobstore.bench.peers_report import PeerRow, PeersReport
from blobstore.bench.raw_copy import caller_buffers, copy_each
from blobstore.bench.report import Setting, Unit, latency_row, rate_row
from blobstore.bench.rounds import Rounds, Turn, take_turns
from blobstore.bench.setup import Setup
from blobstore.errors import InvalidRequest, SetupError
from blobstore.units import KIB, MIB, format_size

PEERS: Mapping[str, tuple[Callable[[], Peer], ...]] = {
    "redis": (RedisPackage, RedisByHand),
    "mooncake": (MooncakeStore,),
    "ray": (RayStore,),
    "lmcache": (LMCacheServer,),
}
"""What `--peers` chooses from."""

BETTER_OF = (RedisPackage.name, MooncakeStore.name)
"""Puts and gets are judged against the better of these, as their own clients do them."""

MEMCPY = "memcpy"
"""No copying store can pass it: one thread, between two buffers of the caller."""
ASIDES = (RedisByHand.name, LMCacheServer.name, RayStore.name, MEMCPY)
LARGE = 16 * MIB
SMALL = MIB
ASKED = 500
_ASKED_BYTES = 4 * KIB
_SHARES = 12
"""Sources, targets, six stores that hold as much with their reserves, and copies on the way."""

_PUTS = "puts at least 3 x the better of Redis and Mooncake"
_COPIES = "copied gets at least 5 x the better of Redis and Mooncake"
_LEASES = "leased gets (zero copy) at least 5 x the better of Redis and Mooncake"
_ONE = "a lease of one 16 MiB blob faster than Ray's zero-copy get"
_EXISTS = f"existence of {ASKED} keys in one batch no slower than Mooncake's"


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is moved, and how often."""

    set_bytes: int
    n_rounds: int
    single_gets: int
    exists_rounds: int
    exists_calls: int


@dataclass(frozen=True, slots=True)
class Work:
    """What is put, and where copies of it go; as many blobs of a size as fit."""

    sources: Bytes
    targets: Bytes

    @classmethod
    def of(cls, nbytes: int) -> Work:
        """`nbytes` of noise, and as much room."""
        work = cls(caller_buffers(1, nbytes)[0], caller_buffers(1, nbytes)[0])
        random = np.random.default_rng(1)
        for part in blobs_of(work.sources, min(nbytes, LARGE)):
            part[:] = np.frombuffer(random.bytes(part.nbytes), np.uint8)
        return work


def report(setup: Setup, chosen: Sequence[str] = ()) -> PeersReport:
    """Measure the chosen peers, or all; those that are not installed are skipped."""
    others = _chosen(chosen)
    scale = _scale(setup)
    work = Work.of(scale.set_bytes)
    room = Room(setup.directory, scale.set_bytes, (work.sources, work.targets))
    found = PeersReport(machine_facts(setup.directory), asides=ASIDES)
    with ExitStack() as undo:
        ours = Ours()
        undo.callback(ours.stop)
        ours.start(room)
        here, found.skipped = undo.enter_context(running(others, room, setup.say))
        if not here:
            missing = "; ".join(f"{name}: {line}" for name, line in found.skipped.items())
            raise SetupError(f"nothing to compare with: {missing}")
        contestants = [ours, *here]
        found.how = {peer.name: peer.how for peer in contestants}
        found.rows += compare(contestants, work, scale, setup.say)
    return found


@contextmanager
def running(
    peers: Sequence[Peer], room: Room, say: Callable[[str], None]
) -> Iterator[tuple[list[Peer], dict[str, str]]]:
    """Start what is installed: those that run, and a line for each that does not."""
    here: list[Peer] = []
    skipped: dict[str, str] = {}
    with ExitStack() as undo:
        for peer in peers:
            if missing := peer.missing():
                skipped[peer.name] = f"not installed: {missing}"
            else:
                say(f"starting {peer.name}")
                undo.callback(peer.stop)
                try:
                    peer.start(room)
                    here.append(peer)
                except Exception as error:
                    # A foreign server that this machine cannot run must not hide the others.
                    skipped[peer.name] = f"does not start: {error or type(error).__name__}"
                    peer.stop()
            if peer.name in skipped:
                say(f"{peer.name} is skipped, {skipped[peer.name]}")
        yield here, skipped


def compare(
    contestants: Sequence[Peer], work: Work, scale: Scale, say: Callable[[str], None]
) -> list[PeerRow]:
    """All rows; the first contestant is ours."""
    ours = contestants[0].name
    found = []
    for size in (SMALL, LARGE):
        say(f"blobs of {format_size(size)}, {format_size(scale.set_bytes)} of them")
        rounds = _blob_rounds(contestants, work, size, scale)
        name, setting = f"{size // MIB}MiB", Setting(scale.set_bytes)
        make = partial(_row, ours, rounds, BETTER_OF, setting)
        found.append(make(f"peers.put_{name}", "put", "B/s", 3.0, _PUTS))
        found.append(make(f"peers.get_{name}", "get", "B/s", 5.0, _COPIES))
        found.append(make(f"peers.lease_{name}", "lease", "B/s", 5.0, _LEASES))
    one = partial(_row, ours, rounds, (RayStore.name,), Setting(scale.set_bytes))
    found.append(one("peers.lease_one_16MiB", "lease one", "s", 1.0, _ONE))
    say(f"existence of {ASKED} keys")
    rounds = _exists_rounds(contestants, work, scale)
    asked = Setting(ASKED * len(key_chain("", 1)[0]))
    exists = partial(_row, ours, rounds, (MooncakeStore.name,), asked)
    if len(rounds.seconds) > 1:  # not beside one that cannot tell
        found.append(exists(f"peers.exists_{ASKED}", "exists", "s", 1.0, _EXISTS))
    return found


def blobs_of(memory: Bytes, size: int) -> list[Bytes]:
    """`memory` cut into blobs of `size`."""
    return [memory[start : start + size] for start in range(0, memory.nbytes - size + 1, size)]


def _chosen(names: Sequence[str]) -> list[Peer]:
    if unknown := [name for name in names if name not in PEERS]:
        raise InvalidRequest(f"unknown peers {', '.join(unknown)}: known are {', '.join(PEERS)}")
    return [peer() for name in (names or PEERS) for peer in PEERS[name]]


def _scale(setup: Setup) -> Scale:
    if setup.tiny:
        return Scale(2 * LARGE, n_rounds=2, single_gets=3, exists_rounds=2, exists_calls=2)
    # Beyond the caches where memory allows; the rows tell the size of the working set.
    share = memory_available_bytes() // _SHARES // LARGE * LARGE
    set_bytes = max(4 * LARGE, min(beyond_caches_bytes(), share))
    setup.need_memory(set_bytes * _SHARES)
    return Scale(set_bytes, n_rounds=7, single_gets=10, exists_rounds=15, exists_calls=10)


def _blob_rounds(contestants: Sequence[Peer], work: Work, size: int, scale: Scale) -> Rounds:
    sources, targets = blobs_of(work.sources, size), blobs_of(work.targets, size)
    numbers = count()

    def memcpy() -> Mapping[str, float]:
        taken_s = sum(copy_each(sources, targets))
        return {"put": taken_s, "get": taken_s}

    turns: dict[str, Turn] = {
        peer.name: partial(_blob_turn, peer, sources, work, targets, numbers, scale)
        for peer in contestants
    }
    return take_turns(turns | {MEMCPY: memcpy}, scale.n_rounds)


def _blob_turn(
    peer: Peer,
    sources: Sequence[Bytes],
    work: Work,
    targets: Sequence[Bytes],
    numbers: Iterator[int],
    scale: Scale,
) -> Mapping[str, float]:
    """Put all blobs, get them, lease them if the peer lends, get one alone, and remove them."""
    keys = key_chain(f"{peer.name}/{next(numbers)}", len(sources))
    taken_s = {"put": timed(lambda: peer.put(keys, sources))}
    try:
        work.targets.fill(0)  # what the contestant before left there is as good as what we want
        taken_s["get"] = _get(peer, keys, sources, targets)
        if isinstance(peer, Lends):
            taken_s["lease"] = _lease(peer.name, peer, keys, sources)
        if sources[0].nbytes == LARGE:
            one = partial(_one, peer, keys[:1], sources[:1], targets[:1])
            taken_s["lease one"] = statistics.median(one() for _ in range(scale.single_gets))
    finally:
        peer.remove(keys)
    return taken_s


def _get(
    peer: Peer, keys: Sequence[bytes], sources: Sequence[Bytes], targets: Sequence[Bytes]
) -> float:
    started_s = time.perf_counter()
    found = peer.get(keys, targets)
    _touch(found)
    taken_s = time.perf_counter() - started_s
    _verify(peer.name, found, sources)
    return taken_s


def _lease(name: str, peer: Lends, keys: Sequence[bytes], sources: Sequence[Bytes]) -> float:
    started_s = time.perf_counter()
    with peer.lease(keys) as found:
        _touch(found)
        taken_s = time.perf_counter() - started_s
        _verify(name, found, sources)
    return taken_s


def _one(
    peer: Peer, key: Sequence[bytes], source: Sequence[Bytes], target: Sequence[Bytes]
) -> float:
    """A single blob, by the form of get that the peer is best at."""
    if isinstance(peer, Lends):
        return _lease(peer.name, peer, key, source)
    target[0].fill(0)
    return _get(peer, key, source, target)


def _touch(found: Sequence[Payload]) -> int:
    total = 0
    for payload in found:
        data = view(payload)
        total += data[0] + data[-1]
    return total


def _verify(name: str, found: Sequence[Payload], sources: Sequence[Bytes]) -> None:
    require(len(found) == len(sources), f"{name} gave as many blobs as were asked for")
    for number, (payload, source) in enumerate(zip(found, sources, strict=True)):
        same = np.array_equal(np.frombuffer(payload, np.uint8), source)
        require(same, f"{name} gave blob {number} back as it was put")


def _exists_rounds(contestants: Sequence[Peer], work: Work, scale: Scale) -> Rounds:
    sources = blobs_of(work.sources, _ASKED_BYTES)[:ASKED]
    held, absent = key_chain("asked", ASKED), key_chain("absent", ASKED)
    turns: dict[str, Turn] = {}
    for peer in contestants:
        peer.put(held, sources)
        if answers := peer.exists(absent):
            require(answers == [False] * ASKED, f"{peer.name} does not hold what was never put")
            turns[peer.name] = partial(_exists_turn, peer, held, scale.exists_calls)
    rounds = take_turns(turns, scale.exists_rounds)
    for peer in contestants:
        peer.remove(held)
    return rounds


def _exists_turn(peer: Peer, keys: Sequence[bytes], n_calls: int) -> Mapping[str, float]:
    each_s = []
    for _ in range(n_calls):
        started_s = time.perf_counter()
        answers = peer.exists(keys)
        each_s.append(time.perf_counter() - started_s)
        require(answers == [True] * len(keys), f"{peer.name} holds what was put")
    return {"exists": statistics.median(each_s)}


def _row(
    ours: str,
    rounds: Rounds,
    judges: Sequence[str],
    setting: Setting,
    name: str,
    operation: str,
    unit: Unit,
    least: float,
    claim: str,
) -> PeerRow:
    """A row against the best of the `judges`, or of all others if none of those is here."""
    medians_s = {
        other: median_s
        for other in rounds.seconds
        if other != ours
        and (median_s := rounds.median_s(other, _theirs(rounds, other, operation))) is not None
    }
    counting = [other for other in judges if other in medians_s]
    rivals = counting or [other for other in medians_s if other != MEMCPY]
    best = min(rivals, key=medians_s.__getitem__)
    pairs = rounds.pairs((ours, operation), (best, _theirs(rounds, best, operation)))
    setting = replace(setting, least=least if counting else 0.0)
    if unit == "B/s":
        nbytes = setting.working_set_bytes
        row = rate_row(name, pairs, nbytes, best, setting)
        peers = {other: nbytes / median_s for other, median_s in medians_s.items()}
    else:
        row = latency_row(name, pairs, best, setting)
        peers = medians_s
    facts = {field.name: getattr(row, field.name) for field in fields(row)}
    absent = tuple(judge for judge in judges if judge not in medians_s)
    return PeerRow(**facts, peers=peers, claim=claim, absent=absent)


def _theirs(rounds: Rounds, other: str, operation: str) -> str:
    """Those that lend nothing take part in a lease with the get that they have."""
    if operation == "lease" and other != MEMCPY and "lease" not in rounds.seconds[other]:
        return "get"
    return operation

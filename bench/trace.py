"""Traces of requests on a KV cache: their format, those that come with us, and a made one.

Which blocks each prompt had, never what was in them. `traces/README.md` describes the
format, and says where the traces come from.
"""

from __future__ import annotations

import gzip
import random
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from blobstore.errors import InvalidRequest

BUNDLED = Path(__file__).parent / "traces"
"""Where the traces lie that come with the benchmarks."""

_SUFFIX = ".jsonl.gz"

_TICK_S = 1e-6
"""Least time between two requests: what happened at the same time still has an order."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt: its blocks from the root on, and what is known about it ("" or -1: not)."""

    time_s: float
    blocks: Sequence[int]
    prompt_tokens: int
    answer_tokens: int = 0
    session: str = ""
    turn: int = -1
    kind: str = ""
    finish: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order, no two at one time.

    Blocks are numbered from 0 in order of their first use. Equal ones are one object,
    whichever requests they are in: traces have millions.
    """

    name: str
    block_tokens: int
    requests: Sequence[Request]
    n_blocks: int

    @property
    def prompt_tokens(self) -> int:
        """Of all requests."""
        return sum(request.prompt_tokens for request in self.requests)

    def head(self, n_requests: int) -> Trace:
        """Its first requests."""
        requests = self.requests[:n_requests]
        n_blocks = 1 + max((block for request in requests for block in request.blocks), default=-1)
        return Trace(self.name, self.block_tokens, requests, n_blocks)


class _Header(msgspec.Struct):
    name: str
    block_size: int


class _Line(msgspec.Struct):
    t: float
    in_: int = msgspec.field(name="in")
    ids: list[int]
    out: int = 0
    s: str = ""
    turn: int = -1
    type: str = ""
    stop: str = ""


def bundled_traces() -> list[str]:
    """Names of the traces that come with us."""
    return sorted(file.name.removesuffix(_SUFFIX) for file in BUNDLED.glob(f"*{_SUFFIX}"))


def load_trace(name: str) -> Trace:
    """The trace in the file `name`, or the bundled one of that name.

    Raises InvalidRequest, with the line, where it is none.
    """
    path = Path(name)
    if not path.is_file():
        if name not in bundled_traces():
            known = ", ".join(bundled_traces())
            raise InvalidRequest(f"no trace {name!r}: give a file, or one of {known}")
        path = BUNDLED / f"{name}{_SUFFIX}"
    try:
        with gzip.open(path, "rb") as lines:
            return _parse(lines, str(path))
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidRequest(f"{path} cannot be read as gzip: {error}") from error


def _parse(lines: Iterable[bytes], where: str) -> Trace:
    numbered = enumerate(lines)
    number = 0
    try:
        number, line = next(numbered, (0, b""))
        header = msgspec.json.decode(line, type=_Header)
        decoder = msgspec.json.Decoder(_Line)
        requests = _Requests(header.block_size)
        for number, line in numbered:  # noqa: B007 (told when a line fails)
            requests.add(decoder.decode(line))
    except (msgspec.DecodeError, InvalidRequest) as error:
        raise InvalidRequest(f"{where}, line {number + 1}: {error}") from error
    return Trace(header.name, header.block_size, requests.all, len(requests.blocks))


class _Requests:
    """Requests as they are read: blocks get their numbers, times become distinct."""

    def __init__(self, block_tokens: int) -> None:
        if block_tokens < 1:
            raise InvalidRequest(f"a block of {block_tokens} tokens")
        self.all: list[Request] = []
        self.blocks: dict[int, int] = {}
        self._parents: list[int] = []
        self._block_tokens = block_tokens
        self._time_s = 0.0

    def add(self, line: _Line) -> None:
        if -(-line.in_ // self._block_tokens) != len(line.ids):
            raise InvalidRequest(f"{line.in_} tokens are not {len(line.ids)} blocks")
        if self.all:
            line.t = max(line.t, self._time_s + _TICK_S)
        self._time_s = line.t
        known = self.blocks
        blocks = [known.setdefault(block, len(known)) for block in line.ids]
        self._check_prefixes(blocks)
        self.all.append(
            Request(
                *(line.t, blocks, line.in_, line.out),
                *(line.s, line.turn, line.type, line.stop),
            )
        )

    def _check_prefixes(self, blocks: Sequence[int]) -> None:
        """A block stands for its prefix, so its parent is always the same."""
        parents = self._parents
        parents.extend([-2] * (len(self.blocks) - len(parents)))
        before = -1
        for block in blocks:
            if parents[block] != before:
                if parents[block] != -2:
                    raise InvalidRequest("a block does not come after the same one as before")
                parents[block] = before
            before = block


def made_trace(n_sessions: int = 40, n_turns: int = 8, seed: int = 7) -> Trace:
    """A small trace of conversations over shared system prompts, the same for equal arguments.

    Most conversations are left early, so that much is never used again.
    """
    rng = random.Random(seed)  # noqa: S311 (no secret)
    lines = list(_conversations(rng, n_sessions, n_turns))
    lines.sort(key=lambda line: line.t)
    requests = _Requests(512)
    for line in lines:
        requests.add(line)
    return Trace("made", 512, requests.all, len(requests.blocks))


def _conversations(rng: random.Random, n_sessions: int, n_turns: int) -> Iterator[_Line]:
    next_block = 1000
    for session in range(n_sessions):
        start = rng.randrange(4) * 100
        blocks = list(range(start, start + 4))
        time_s = rng.uniform(0, 600)
        for turn in range(1, n_turns + 1):
            n_new = rng.randint(1, 6)
            blocks = [*blocks, *range(next_block, next_block + n_new)]
            next_block += n_new
            last = turn == n_turns or rng.random() < 0.3
            yield _Line(
                *(time_s, 512 * len(blocks) - rng.randrange(512), blocks, 300),
                *(f"s{session}", turn, "main", "end_turn" if last else "tool_use"),
            )
            if last:
                break
            time_s += rng.expovariate(1 / 20)

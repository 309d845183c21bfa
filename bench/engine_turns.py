"""Conversations taken through an engine: every request in several ways, beside the cold one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from blobstore.bench.chat import Chat
from blobstore.bench.engine import CHUNK_TOKENS, Turn, namespace
from blobstore.bench.engine_conversation import Conversation, Request
from blobstore.bench.engine_process import EngineProcess
from blobstore.bench.engine_report import Sample
from blobstore.bench.engine_ways import COLD, DRAM, REBUILD, SSD, Ways
from blobstore.bench.model_file import ModelFile
from blobstore.bench.own_daemon import OwnDaemon
from blobstore.clients import Client


class Turns:
    """One engine, and one daemon that its contexts are kept by."""

    def __init__(
        self,
        daemon: OwnDaemon,
        kv: Client,
        engine: EngineProcess,
        file: ModelFile,
        say: Callable[[str], None],
    ) -> None:
        self._daemon = daemon
        self._kv = kv
        self._ns = kv.namespace(namespace(file.sizes, file.digest))
        self._chat = Chat(file)
        self._ways = Ways(daemon, kv, self._ns, engine)
        self._say = say
        self.prompts: dict[str, list[int]] = {}
        """Of the requests so far, by name."""

    def converse(
        self, script: Sequence[Request], seed: int, ways: Sequence[str] = (COLD, SSD, DRAM, REBUILD)
    ) -> Iterator[Sample]:
        """Every request of a conversation, in the ways that it names, or in `ways`."""
        conversation = Conversation(self._chat, script, seed)
        leaves: dict[int, bytes] = {}
        for number, request in enumerate(script):
            if request.pause:
                self._say("the daemon restarts")
                self._daemon.restart()
            ids = conversation.prompt(number)
            self.prompts[request.name] = ids
            samples = list(self._request(request, ids, request.ways or ways))
            yield from samples
            answer = samples[0].turn.tokens
            read = len(ids) + len(answer) - 1  # the last one was only said
            leaves[number] = self._ways.stored(conversation.answered(number, answer)[:read])[-1]
            if request.compacts is not None:
                self._kv.supersede(self._ns, leaves[request.compacts], leaves[number])

    def known_blobs(self, ids: Sequence[int]) -> int:
        """How many leading blobs of a prompt were stored once."""
        return self._ways.known_blobs(ids)

    def rebuilt_for(self, ids: Sequence[int], blobs: int, readers: int) -> list[float]:
        """See Ways.rebuilt_for; of the first `blobs` of a prompt."""
        keys = self._ns.keys(ids[: blobs * CHUNK_TOKENS])
        return self._ways.rebuilt_for(keys, readers)

    def take(self, way: str, ids: Sequence[int], blobs: int, *, store: str = "") -> Turn:
        """One turn in one way; see Ways.take."""
        turn = self._ways.take(way, ids, blobs, store=store)
        self._say(
            f"{len(ids)} tokens, {blobs * CHUNK_TOKENS} by way of {way}: "
            f"{turn.restore_s:.3f} s, first token after {turn.first_token_s:.3f} s"
        )
        return turn

    def _request(
        self, request: Request, ids: Sequence[int], ways: Sequence[str]
    ) -> Iterator[Sample]:
        """A request cold, and in its other ways; the last of them puts what is new."""
        blobs = self._ways.known_blobs(ids)
        ways = ways if blobs else (COLD,)
        cold = None
        for way in ways:
            turn = self.take(way, ids, blobs, store="durable" if way == ways[-1] else "")
            cold = cold or turn
            yield Sample(request.name, way, blobs * CHUNK_TOKENS, turn, cold)

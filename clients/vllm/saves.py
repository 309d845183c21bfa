"""Writing blobs that have become whole to the store.

Memory is reserved on a thread while the engine computes. Once it has, the blobs are
copied there before the step ends, so that no later step can change what is saved;
a thread seals them. What is computed before its memory is there is copied aside. A
daemon that is slow or gone costs a step no more than a moment.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from functools import partial

import numpy as np

from blobstore.clients.sync import Writer
from blobstore.clients.vllm.copies import Copies
from blobstore.clients.vllm.daemon import Daemon
from blobstore.clients.vllm.faults import Faults
from blobstore.clients.vllm.lane import Lane
from blobstore.clients.vllm.metadata import Save
from blobstore.clients.vllm.place import SavePlace, blocks_at
from blobstore.clients.vllm.reasons import BUSY, FAILED, LATE, ORPHAN, UNAVAILABLE
from blobstore.clients.vllm.recorder import Recorder
from blobstore.clients.vllm.room import Room
from blobstore.clients.vllm.saving import Refusal, Saving
from blobstore.errors import BlobStoreError
from blobstore.hint import Hint
from blobstore.keys import Keys

PATIENCE_S = 0.005
"""How long the end of a step waits for memory, all of its saves together."""
RESERVE_S = 0.5
"""How long a reservation may wait for room: longer than that, few steps last."""
SEALING_MAX = 64
"""Saves whose seals are under way; more are left out: the daemon is many steps behind."""
ASIDE_BYTES_MAX = 256 << 20
"""Of blobs that were computed before their memory came: some steps' worth, of the host's memory."""

_WRITTEN = ("stored", "partial", "exists")
"""Of blobs that were lent: the last where another rank's seal was the one that made it whole."""

_PASSING = (UNAVAILABLE, LATE, BUSY, ORPHAN, FAILED)
"""Reasons that are said elsewhere, or are over by the next step."""
_UNWRITTEN = "unwritten"
"""The daemon's word for a blob whose memory was not touched."""


class Saves:
    """All saves of a worker. But for the threads' part, called by the engine's thread."""

    def __init__(
        self,
        place: SavePlace,
        daemon: Daemon,
        recorder: Recorder,
        faults: Faults,
        timeout_s: float,
        *,
        tells_tokens: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._place = place
        self._daemon = daemon
        self._recorder = recorder
        self._faults = faults
        self._timeout_s = timeout_s
        self._tells_tokens = tells_tokens
        self._clock = clock
        self._reserving = Lane("reserve", waiting_max=SEALING_MAX)
        self._sealing = Lane("seal", waiting_max=SEALING_MAX)
        self._step: list[Saving] = []
        self._stopped = False
        self._aside = Room(ASIDE_BYTES_MAX)
        self._lock = threading.Lock()
        self._unsaved: dict[str, int] = {}

    def prepare(self) -> None:
        """Connect, so that the first save need not wait for it."""
        self._reserving.post(self._connect)

    def spread(self, cores: AbstractSet[int]) -> None:
        """Reserve and seal on any of `cores`."""
        self._reserving.spread(cores)
        self._sealing.spread(cores)

    def begin(self, saves: Sequence[Save]) -> None:
        """A step begins: reserve memory for what it will make whole."""
        self.abandon()
        for save in saves:
            saving = Saving(save)
            if self._stopped:
                self._missed(saving, saving.whole(FAILED))
            elif not self._daemon.usable:
                self._missed(saving, saving.whole(UNAVAILABLE))
            elif self._reserving.post(partial(self._reserve, saving)):
                self._step.append(saving)
            else:
                self._missed(saving, saving.whole(BUSY))

    def layer(self, copies: Copies, layer: int, part: int | None) -> None:
        """The step has computed layer number `layer`: copy it now, for who follows the blobs.

        `part` is its number among those that this rank writes. Layers come in order; what
        memory came too late for is copied at the end.
        """
        for saving in self._step:
            writer = saving.writer
            if layer < saving.layers:
                saving.layers = -1  # it was computed in portions: none of them was the whole
            if writer is None or saving.layers != layer:
                continue
            copied = part is None or self._copy_layer(saving, writer, copies, layer, part)
            saving.layers = layer + 1 if copied else -1

    def finish(self, copies: Copies) -> None:
        """The step has run: copy its blobs, and have them sealed."""
        deadline_s = self._clock() + PATIENCE_S
        while self._step:
            saving = self._step[0]  # until it is seen to: what is interrupted here is abandoned
            saving.computed_s = self._clock()
            ready = saving.wait(max(0.0, deadline_s - saving.computed_s))
            if ready or not self._set_aside(saving, copies):
                self._finish(saving, copies)
            self._step.pop(0)

    def abandon(self) -> None:
        """The step that began will not be finished: nothing of it is stored.

        What earlier steps made whole is, also what is set aside still.
        """
        step, self._step = self._step, []
        for saving in step:
            saving.give_up()

    def stop(self) -> None:
        """As `abandon`, and from now on nothing is saved: what is computed may be wrong."""
        self._stopped = True
        self.abandon()

    def take_unsaved(self) -> dict[str, int]:
        """Requests of which blobs were not saved since the last call: the first such blob."""
        with self._lock:
            unsaved, self._unsaved = self._unsaved, {}
        return unsaved

    def close(self, timeout_s: float) -> None:
        """Seal what was copied, and take no more."""
        self.abandon()
        self._reserving.stop()
        deadline_s = self._clock() + timeout_s
        self._sealing.close(timeout_s)
        self._reserving.close(max(0.0, deadline_s - self._clock()))

    def _copy_layer(
        self, saving: Saving, writer: Writer, copies: Copies, layer: int, part: int
    ) -> bool:
        """Whether a layer is copied, or will be; if not, the end of the step tries again."""
        try:
            if self._copy(saving, writer, copies, layer) is not None:
                return False
        except Exception:  # the end of the step says what it was, if it still is
            return False
        self._sealing.post(partial(self._seal_layer, saving, writer, part))
        return True

    def _finish(self, saving: Saving, copies: Copies) -> None:
        writer = saving.take()
        if writer is None:
            self._missed(saving, saving.refusal or saving.whole(LATE))
            return
        try:
            if saving.layers != copies.layers:
                saving.cut = self._copy(saving, writer, copies)
        except Exception as error:  # whatever it is: nothing is saved, and the engine goes on
            saving.give_up()
            self._broken(saving, saving.whole(FAILED), _told(error))
            return
        if not self._sealing.post(partial(self._seal, saving, writer, copies.written_bytes)):
            saving.give_up()
            self._missed(saving, saving.whole(BUSY))

    def _copy(
        self, saving: Saving, writer: Writer, copies: Copies, layer: int | None = None
    ) -> int | None:
        """Copy the blobs to be written, or a layer of them; the number of the first without room.

        Memory of those without room is not touched: so the store refuses them when it is sealed.
        """
        for number in _lent(writer):
            if not copies.has_room(layer):
                return number
            blocks = blocks_at(self._place, saving.save.blocks, number)
            saving.add(copies.out(blocks, writer[number], layer))
        return None

    def _set_aside(self, saving: Saving, copies: Copies) -> bool:
        """Copy what has no memory in the store yet to some of ours; whether that is seen to.

        There may be no later step that could save the end of a request once more.
        """
        nbytes = saving.blobs * self._place.blob_bytes
        if not self._aside.fits(nbytes):
            return False
        self._aside.hold(nbytes)
        aside: list[memoryview] = []
        try:
            while len(aside) < saving.blobs and copies.has_room():
                payload = np.empty(self._place.blob_bytes, np.uint8).data
                blocks = blocks_at(self._place, saving.save.blocks, len(aside))
                saving.add(copies.out(blocks, payload))
                aside.append(payload)
        except Exception as error:  # whatever it is: nothing is saved, and the engine goes on
            self._leave_aside(saving, nbytes)
            self._broken(saving, saving.whole(FAILED), _told(error))
            return True
        if len(aside) < saving.blobs:
            saving.cut = len(aside)
        if not self._sealing.post(partial(self._seal_aside, saving, aside, nbytes, copies)):
            self._leave_aside(saving, nbytes)
            self._missed(saving, saving.whole(BUSY))
        return True

    def _leave_aside(self, saving: Saving, nbytes: int) -> None:
        saving.give_up()
        self._aside.give_back(nbytes)

    # On the threads.

    def _connect(self) -> None:
        self._daemon.reach()

    def _reserve(self, saving: Saving) -> None:
        failed = None, saving.whole(FAILED)
        saving.put(*self._faults.guarded(failed, self._reserved, saving))

    def _reserved(self, saving: Saving) -> tuple[Writer | None, Refusal | None]:
        """A writer, or why there is none."""
        client = None if saving.given_up else self._daemon.reach()
        if client is None:
            return None, saving.whole(LATE if saving.given_up else UNAVAILABLE)
        save = saving.save
        writer = client.put(
            self._place.bound_of(save.namespace),
            Keys(save.keys, save.key_bytes),
            parent=save.parent or None,
            retention=save.retention,
            hint=Hint.from_dict(save.hint),
            group=self._place.writer_group,
            timeout_s=min(RESERVE_S, self._timeout_s),
        )
        first, refusal = next(_lent(writer), None), _refusal(writer)
        if refusal is not None and first is None:
            self._daemon.note(refusal.reason)
            writer.abort()
            return None, refusal
        if first is not None:
            writer[first]  # maps the arena if need be: not in the engine's time
        return writer, None

    def _seal_layer(self, saving: Saving, writer: Writer, part: int) -> None:
        try:
            saving.bring()
        except Exception:  # nothing of the blobs is stored: their seal says what it was
            return
        with contextlib.suppress(BlobStoreError):  # it was aborted: nobody follows it any more
            for number in _lent(writer):
                writer.seal_parts(number, [part])

    def _seal(self, saving: Saving, writer: Writer, blob_bytes: int) -> None:
        short = _cut_short(saving, writer)
        if short is not None:
            saving.give_up()
            self._missed(saving, short)
            return
        fault, lent = "", list(_lent(writer))
        try:
            saving.bring()
            writer.seal(timeout_s=self._timeout_s)
        except Exception as error:  # a durable blob that was refused, or a fault of ours
            saving.give_up()
            fault = _told(error)
        self._settle(saving, _refusal(writer), fault)
        stored = sum(writer.results[number] in _WRITTEN for number in lent)
        if stored:
            tokens = stored * self._place.blob_tokens if self._tells_tokens else 0
            seconds = self._clock() - saving.computed_s
            self._recorder.saved(tokens, stored * blob_bytes, seconds)
        if saving.save.ttl_s and any(result != "refused" for result in writer.results):
            self._pin(saving.save)

    def _settle(self, saving: Saving, refusal: Refusal | None, fault: str) -> None:
        """It is sealed, but for what was refused or could not be."""
        if refusal is not None and refusal.reason == _UNWRITTEN:
            # Here or by another rank, which had no room either.
            self._missed(saving, refusal._replace(reason=BUSY))
        elif fault:
            self._broken(saving, refusal or saving.whole(FAILED), fault)
        elif refusal is not None:
            self._daemon.note(refusal.reason)
            self._missed(saving, refusal)
        else:
            self._daemon.note("")
            self._faults.note("saves", "")

    def _seal_aside(
        self, saving: Saving, aside: list[memoryview], nbytes: int, copies: Copies
    ) -> None:
        """Seal blobs that were set aside, if their memory comes."""
        saving.wait(RESERVE_S)
        writer = saving.take()
        try:
            if writer is None:
                self._missed(saving, saving.refusal or saving.whole(LATE))
                return
            saving.bring()
            for number in _lent(writer):
                if number < len(aside):
                    copies.move(aside[number], writer[number])
        except Exception as error:
            saving.give_up()
            self._broken(saving, saving.whole(FAILED), _told(error))
            return
        finally:
            self._aside.give_back(nbytes)
        self._seal(saving, writer, copies.written_bytes)

    def _pin(self, save: Save) -> None:
        client = self._daemon.reach()
        if client is not None:
            ns, keys = self._place.bound_of(save.namespace), Keys(save.keys, save.key_bytes)
            client.pin(ns, keys, save.ttl_s, timeout_s=self._timeout_s)

    def _broken(self, saving: Saving, refusal: Refusal, fault: str) -> None:
        self._faults.note("saves", fault)
        self._missed(saving, refusal._replace(reason=FAILED))

    def _missed(self, saving: Saving, refusal: Refusal) -> None:
        """Blobs were not saved. Of an orphan's ancestors it is not known which are left."""
        reason, save = refusal.reason, saving.save
        if reason not in _PASSING:
            self._faults.note("saves", reason)
        if self._tells_tokens:
            self._recorder.unsaved(reason, refusal.blobs)
        first = 0 if reason == ORPHAN else save.first + refusal.first
        with self._lock:
            known = self._unsaved.get(save.request_id, first)
            self._unsaved[save.request_id] = min(known, first)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _lent(writer: Writer) -> Iterator[int]:
    """The numbers of the blobs that are to be written: others are held, or refused."""
    return (number for number, reason in enumerate(writer.reasons) if not reason)


def _refusal(writer: Writer) -> Refusal | None:
    """Which blobs were refused, and why the first of them was; None if none was."""
    refused = [number for number, result in enumerate(writer.results) if result == "refused"]
    if not refused:
        return None
    return Refusal(writer.reasons[refused[0]], refused[0], len(refused))


def _cut_short(saving: Saving, writer: Writer) -> Refusal | None:
    """Why nothing may be sealed: of the blobs without room, memory of some was touched.

    That is the first one's, when it was reserved, and that of all whose layers were copied
    one by one. The store takes what was touched for written.
    """
    lent = list(_lent(writer))
    if saving.cut is None or not lent or (lent[0] < saving.cut and not saving.layers):
        return None
    return Refusal(BUSY, lent[0], len(lent))

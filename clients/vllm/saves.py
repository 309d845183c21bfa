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
from collections.abc import Callable, Sequence
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
from blobstore.clients.vllm.saving import Saving
from blobstore.errors import BlobStoreError
from blobstore.hint import Hint
from blobstore.keys import Keys

PATIENCE_S = 0.005
"""How long the end of a step waits for memory, all of its saves together."""
RESERVE_S = 0.5
"""How long a reservation may wait for room: longer than that, few steps last."""
SEALING_MAX = 64
"""Saves whose seals are under way; more are left out."""
ASIDE_BYTES_MAX = 256 << 20
"""Of blobs that were computed before their memory came."""

_PASSING = (UNAVAILABLE, LATE, BUSY, ORPHAN, FAILED)
"""Reasons that are said elsewhere, or are over by the next step."""


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
        self._lock = threading.Lock()
        self._unsaved: dict[str, int] = {}
        self._aside_bytes = 0

    def prepare(self) -> None:
        """Connect, so that the first save need not wait for it."""
        self._reserving.post(self._connect)

    def begin(self, saves: Sequence[Save]) -> None:
        """A step begins: reserve memory for what it will make whole."""
        self.abandon()
        for save in saves:
            saving = Saving(save)
            if not self._daemon.usable:
                self._missed(saving, UNAVAILABLE)
            elif self._reserving.post(partial(self._reserve, saving)):
                self._step.append(saving)
            else:
                self._missed(saving, BUSY)

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
            saving.layers += 1
            if part is None:
                continue
            try:
                self._copy(saving, writer, copies, layer)
            except Exception:  # the end of the step tries again, and says what it was
                saving.layers = -1
                continue
            self._sealing.post(partial(self._seal_layer, saving, writer, part))

    def finish(self, copies: Copies) -> None:
        """The step has run: copy its blobs, and have them sealed."""
        step, self._step = self._step, []
        deadline_s = self._clock() + PATIENCE_S
        for saving in step:
            saving.computed_s = self._clock()
            ready = saving.wait(max(0.0, deadline_s - saving.computed_s))
            if not ready and self._set_aside(saving, copies):
                continue
            writer = saving.take()
            if writer is None:
                self._missed(saving, saving.reason or LATE)
                continue
            try:
                if saving.layers != copies.layers:
                    self._copy(saving, writer, copies)
            except Exception as error:  # whatever it is: nothing is saved, and the engine goes on
                writer.abort()
                self._broken(saving, error)
                continue
            if not self._sealing.post(partial(self._seal, saving, writer, copies.written_bytes)):
                writer.abort()
                self._missed(saving, BUSY)

    def abandon(self) -> None:
        """The step that began will not be finished."""
        step, self._step = self._step, []
        for saving in step:
            writer = saving.take()
            if writer is not None:
                writer.abort()

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

    def _copy(
        self, saving: Saving, writer: Writer, copies: Copies, layer: int | None = None
    ) -> None:
        for number, reason in enumerate(writer.reasons):
            if not reason:  # else it is held, or refused
                blocks = blocks_at(self._place, saving.save.blocks, number)
                saving.finishes.append(copies.out(blocks, writer[number], layer))

    def _set_aside(self, saving: Saving, copies: Copies) -> bool:
        """Copy what has no memory in the store yet to some of ours; whether that is seen to.

        There may be no later step that could save the end of a request once more.
        """
        blobs = len(saving.save.keys) // saving.save.key_bytes
        nbytes = blobs * self._place.blob_bytes
        with self._lock:
            if self._aside_bytes + nbytes > ASIDE_BYTES_MAX:
                return False
            self._aside_bytes += nbytes
        try:
            aside = []
            for number in range(blobs):
                aside.append(np.empty(self._place.blob_bytes, np.uint8).data)
                blocks = blocks_at(self._place, saving.save.blocks, number)
                saving.finishes.append(copies.out(blocks, aside[number]))
        except Exception as error:  # whatever it is: nothing is saved, and the engine goes on
            self._give_up(saving, nbytes)
            self._broken(saving, error)
            return True
        if not self._sealing.post(partial(self._seal_aside, saving, aside, copies)):
            self._give_up(saving, nbytes)
            self._missed(saving, BUSY)
        return True

    def _give_up(self, saving: Saving, aside_bytes: int) -> None:
        writer = saving.take()
        if writer is not None:
            writer.abort()
        with self._lock:
            self._aside_bytes -= aside_bytes

    # On the threads.

    def _connect(self) -> None:
        self._daemon.reach()

    def _reserve(self, saving: Saving) -> None:
        saving.put(*self._faults.guarded((None, FAILED), self._reserved, saving))

    def _reserved(self, saving: Saving) -> tuple[Writer | None, str]:
        """A writer, or why there is none."""
        client = None if saving.given_up else self._daemon.reach()
        if client is None:
            return None, LATE if saving.given_up else UNAVAILABLE
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
        refused = _refusal(writer)
        if refused and "" not in writer.reasons:
            self._daemon.note(refused)
            writer.abort()
            return None, refused
        for number, reason in enumerate(writer.reasons):
            if not reason:
                writer[number]  # maps the arena if need be: not in the engine's time
        return writer, ""

    def _seal_layer(self, saving: Saving, writer: Writer, part: int) -> None:
        saving.bring()
        with contextlib.suppress(BlobStoreError):  # it was aborted: nobody follows it any more
            for number, reason in enumerate(writer.reasons):
                if not reason:
                    writer.seal_parts(number, [part])

    def _seal(self, saving: Saving, writer: Writer, blob_bytes: int) -> None:
        try:
            saving.bring()
            writer.seal(timeout_s=self._timeout_s)
        except Exception as error:  # a durable blob that was refused, or a fault of ours
            writer.abort()
            self._broken(saving, error)
            return
        reason = _refusal(writer)
        self._daemon.note(reason)
        if reason:
            self._missed(saving, reason)
        else:
            self._faults.note("saves", "")
        stored = sum(result in ("stored", "partial") for result in writer.results)
        if stored:
            tokens = stored * self._place.blob_tokens if self._tells_tokens else 0
            seconds = self._clock() - saving.computed_s
            self._recorder.saved(tokens, stored * blob_bytes, seconds)
        if saving.save.ttl_s:
            self._pin(saving.save)

    def _seal_aside(self, saving: Saving, aside: list[memoryview], copies: Copies) -> None:
        """Seal blobs that were set aside, if their memory comes."""
        saving.wait(RESERVE_S)
        writer = saving.take()
        try:
            if writer is None:
                self._missed(saving, saving.reason or LATE)
                return
            saving.bring()
            for number, reason in enumerate(writer.reasons):
                if not reason:
                    copies.move(aside[number], writer[number])
        except Exception as error:
            if writer is not None:
                writer.abort()
            self._broken(saving, error)
            return
        finally:
            with self._lock:
                self._aside_bytes -= sum(each.nbytes for each in aside)
        self._seal(saving, writer, copies.written_bytes)

    def _pin(self, save: Save) -> None:
        client = self._daemon.reach()
        if client is not None:
            ns, keys = self._place.bound_of(save.namespace), Keys(save.keys, save.key_bytes)
            client.pin(ns, keys, save.ttl_s, timeout_s=self._timeout_s)

    def _broken(self, saving: Saving, error: Exception) -> None:
        self._faults.note("saves", f"{type(error).__name__}: {error}")
        self._missed(saving, FAILED)

    def _missed(self, saving: Saving, reason: str) -> None:
        """Blobs were not saved. Of an orphan's ancestors it is not known which are left."""
        save = saving.save
        if reason not in _PASSING:
            self._faults.note("saves", reason)
        if self._tells_tokens:
            self._recorder.unsaved(reason, len(save.keys) // save.key_bytes)
        first = 0 if reason == ORPHAN else save.first
        with self._lock:
            known = self._unsaved.get(save.request_id, first)
            self._unsaved[save.request_id] = min(known, first)


def _refusal(writer: Writer) -> str:
    """Why the first blob that was refused was; "" if none was."""
    outcomes = zip(writer.results, writer.reasons, strict=True)
    return next((why for result, why in outcomes if result == "refused"), "")

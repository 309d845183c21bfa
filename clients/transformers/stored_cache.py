"""Prefixes of a model's contexts in the store: restored, stored after each turn, recomputed."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from blobstore.clients.client_session import ClientSession
from blobstore.clients.rebuilds import RebuildServer
from blobstore.clients.sync import Client, Lease, Writer
from blobstore.clients.transformers import identity, layers, libraries
from blobstore.clients.transformers.layers import name_of
from blobstore.clients.transformers.rebuilder import Rebuilder
from blobstore.clients.transformers.recompute import Ids, Portion, portions
from blobstore.clients.transformers.states import Filling, States
from blobstore.clients.windows import WINDOW_BYTES, windows
from blobstore.errors import BlobStoreError, InvalidRequest, SizeMismatch
from blobstore.hint import Hint
from blobstore.keys import Keys
from blobstore.namespace import Namespace

log = logging.getLogger(__name__)

PREFILL_TOKENS = 2048
"""Read at once when blobs are recomputed: bounds the memory that attention takes."""

SERVED_TOKENS = 512
"""Read at once while somebody waits for the first of them."""


class StoredCache:
    """The keys and values of `model`, kept in a store.

    Finds out what the model keeps, and declares its namespace: model, weights,
    configuration, dtype and layout, so that no other model's bytes can ever be taken
    for its own. Works for decoders whose layers are plain or sliding-window attention;
    InvalidRequest names what is not supported. Contexts are single sequences without
    masked tokens: nothing is stored from a padding token on, and other attention masks
    than ones must not be used. The model's weights must stay as they are.

    Args:
        kv: a client of the store.
        model: a causal language model of transformers, on any device.
        name: of the model; by default what it was loaded as.
        revision: names the weights. Left out, they are read once and named by a digest.
        adapter: names the adapter that is active, if any.
        salt: keeps tenants apart.
        tokens_per_blob: what is stored and restored at a time.
        retention: "volatile", "standard" or "durable", as of Client.put.
    """

    def __init__(
        self,
        kv: Client,
        model: Any,
        *,
        name: str = "",
        revision: str = "",
        adapter: str = "",
        salt: str = "",
        tokens_per_blob: int = 256,
        retention: str = "standard",
    ) -> None:
        libraries.torch()
        libraries.cache_utils()
        identity.check_model(model, adapter)
        found = layers.probe(model)
        self._kv = kv
        self._model = model
        self._retention = retention
        self._tokens_max = identity.tokens_max(model.config)
        self._padding = identity.padding(model)
        self.namespace = Namespace(
            model=name or identity.model_name(model.config, revision),
            layout=layers.layout(found),
            revision=revision,
            weights_digest=identity.digest(model, weights=not revision),
            dtype=identity.compute_dtype(model),
            tokens_per_blob=tokens_per_blob,
            adapter=adapter,
            salt=salt,
        )
        self._states = States(model, found, self.namespace.layout, tokens_per_blob)
        self._faults = Faults(name_of(model))
        self.ns = kv.namespace(self.namespace)

    def restore(
        self,
        token_ids: object,
        *,
        session: ClientSession | None = None,
        hint: Hint | None = None,
        timeout_s: float | None = None,
    ) -> tuple[Any, int]:
        """A DynamicCache with the longest stored prefix of `token_ids`, and its length in tokens.

        It ends before the last token, which the model has to read for the next one, and
        may be empty. A store that is not there, slow or failing is a miss. What has only its
        tokens left is waited for where a model runner serves them and may be in time.
        `session` is the conversation that this is a turn of, if the store is to know.
        """
        ids = as_ids(token_ids)
        blobs = min(len(ids) - 1, self._sound(ids)) // self.ns.tokens_per_blob
        if blobs > 0 and self._may_be_stored(len(ids)):
            keys = self.ns.keys(ids[: blobs * self.ns.tokens_per_blob])
            try:
                return self._restore(session or self._kv, keys, hint, timeout_s)
            except BlobStoreError as error:
                self._faults.note("restore", _reason(error))
        return self._states.empty(), 0

    def store(
        self,
        token_ids: object,
        past: Any,
        *,
        session: ClientSession | None = None,
        hint: Hint | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Store the full blobs of `past` that are new; how many.

        `token_ids` are those that `past` has read, from the first one on; more may follow,
        such as the last token of an answer. A fault stores less and raises nothing. Raises
        InvalidRequest if `past` is not a cache of this model, or of several sequences.
        """
        ids = as_ids(token_ids)
        held = self._states.length(past)
        blobs = min(held, self._sound(ids)) // self.ns.tokens_per_blob
        if not blobs or not self._may_be_stored(held):
            return 0
        keys = self.ns.keys(ids[: blobs * self.ns.tokens_per_blob])
        try:
            return self._store(session or self._kv, keys, ids, past, hint, timeout_s)
        except BlobStoreError as error:
            self._faults.note("store", _reason(error))
            return 0

    def rebuild(
        self,
        token_ids: object,
        parent: Sequence[memoryview] = (),
        into: Sequence[memoryview] | None = None,
    ) -> list[memoryview]:
        """Compute the payloads of the full blobs that `token_ids` fill after those of `parent`.

        `parent` are the payloads of all blobs before, such as a lease, which are read in
        place. The payloads are written to `into`, or to new memory, and returned. Raises
        InvalidRequest for sizes that do not fit.
        """
        ids = as_ids(token_ids)
        blobs = len(ids) // self.ns.tokens_per_blob
        if into is None:
            into = [memoryview(bytearray(self._states.nbytes)) for _ in range(blobs)]
        if [payload.nbytes for payload in into] != [self._states.nbytes] * blobs:
            raise SizeMismatch(f"{len(ids)} tokens fill {blobs} of {self._states.nbytes} bytes")
        for portion in self.portions(ids, parent):
            for blob in portion.blobs:
                portion.write(blob, into[blob])
        return list(into)

    def portions(
        self,
        token_ids: object,
        parent: Sequence[memoryview] = (),
        tokens_at_once: int = PREFILL_TOKENS,
    ) -> Iterator[Portion]:
        """As `rebuild`, for who wants to do something between: some blobs at a time, in order."""
        ids, step = as_ids(token_ids), self.ns.tokens_per_blob
        if len(ids) % step or not self._may_be_stored(len(parent) * step + len(ids)):
            raise InvalidRequest(
                f"{len(ids)} tokens after {len(parent)} blobs of {step} are no blobs"
            )
        at_once = max(1, tokens_at_once // step)
        return portions(self._model, self._states, ids, parent, at_once)

    def serve_rebuilds(self, *, tokens_at_once: int = SERVED_TOKENS) -> RebuildServer:
        """Let this process's model compute again what the store has only the tokens of.

        Until the server is closed: `with cache.serve_rebuilds(): …`, or close(). It works in
        a thread of its own, on one job at a time. Readers get the blobs of `tokens_at_once`
        as soon as those are there; fewer at once come sooner, more take less time in all.
        """
        return self._kv.serve_rebuilds([self.ns], Rebuilder(self.portions, tokens_at_once))

    def _may_be_stored(self, n_tokens: int) -> bool:
        return self._tokens_max is None or n_tokens <= self._tokens_max

    def _sound(self, ids: Ids) -> int:
        """How many leading tokens are no padding, which would be masked for those after it."""
        if self._padding is None or not (at := np.flatnonzero(ids == self._padding)).size:
            return len(ids)
        return int(at[0])

    def _restore(
        self,
        kv: Client | ClientSession,
        keys: Keys,
        hint: Hint | None,
        timeout_s: float | None,
    ) -> tuple[Any, int]:
        """Restore all of `keys` that can be had. What a window needs depends on where it ends."""
        hit = kv.match(self.ns, keys, hint=hint, timeout_s=timeout_s)
        self._faults.note("restore", hit.reason)
        blobs, stream = hit.blobs, hit.warm < hit.blobs
        if timeout_s is None or hit.rebuild_eta_s < timeout_s:
            blobs += hit.rebuildable
        while blobs:
            filling = self._states.filling(blobs)
            filled = 0
            while filled < blobs:
                lease = kv.get(
                    self.ns, keys[filled:blobs], hint=hint, timeout_s=timeout_s, stream=stream
                )
                n = self._fill(filling, filled, lease, stream=stream, timeout_s=timeout_s)
                if not n:
                    break
                filled += n
            if filled == blobs:
                return filling.cache(), blobs * self.ns.tokens_per_blob
            blobs = filled  # the rest went meanwhile, or could not be loaded
        return self._states.empty(), 0

    def _fill(
        self, filling: Filling, first: int, lease: Lease, *, stream: bool, timeout_s: float | None
    ) -> int:
        """Read what is leased, which begins with blob number `first`; how many blobs."""
        filled = 0
        with lease:
            for number in range(len(lease)):
                if stream and not lease.wait(number, timeout_s=timeout_s):
                    break
                filling.read(first + number, lease[number])
                filled += 1
        if lease.reason != _ABSENT:
            self._faults.note("restore", "" if filled else lease.reason)
        return filled

    def _store(
        self,
        kv: Client | ClientSession,
        keys: Keys,
        ids: Ids,
        past: Any,
        hint: Hint | None,
        timeout_s: float | None,
    ) -> int:
        """Put the blobs of `keys` that are not held, a window at a time; how many were stored."""
        hit = self._kv.match(self.ns, keys, timeout_s=timeout_s)  # it begins no turn of a session
        why, step = hit.reason, self.ns.tokens_per_blob
        new = range(hit.blobs, len(keys))
        if not why and new and self._states.earliest(past) > new.start * step:
            why = _LEFT_THE_WINDOW
        stored, waiting = 0, windows([self._states.nbytes] * len(new), 4 * WINDOW_BYTES)
        while waiting and not why:
            window = waiting.pop(0)
            blobs = new[window.start : window.stop]
            writer = kv.put(
                self.ns,
                keys[blobs.start : blobs.stop],
                token_ids=ids[blobs.start * step : blobs.stop * step],
                parent=keys[blobs.start - 1] if blobs.start else None,
                retention=self._retention,
                hint=hint,
                timeout_s=timeout_s,
            )
            if _TOO_LARGE in writer.reasons and len(window) > 1:
                writer.abort()
                middle = len(window) // 2
                waiting[:0] = [window[:middle], window[middle:]]
                continue
            why = self._write(past, blobs, writer)
            stored += writer.results.count("stored")
        self._faults.note("store", why)
        if not why:
            self._states.forget(past, len(keys) * step)
        return stored

    def _write(self, past: Any, blobs: range, writer: Writer) -> str:
        """Write blobs of `past`, and seal them; why one was refused, if any was."""
        with writer:
            for number, blob in enumerate(blobs):
                if not writer.reasons[number]:  # else it is held, or refused
                    self._states.write(past, blob, writer[number])
        outcomes = zip(writer.results, writer.reasons, strict=True)
        return next((why for result, why in outcomes if result == "refused"), "")


def _reason(error: BlobStoreError) -> str:
    """Its code; with what it says if somebody has to change something."""
    return f"{error.code}: {error}" if isinstance(error, InvalidRequest) else error.code


_ABSENT = "absent"
_TOO_LARGE = "too_large"
_LEFT_THE_WINDOW = "left_the_window"
_MEANING = {
    _LEFT_THE_WINDOW: "the cache has forgotten tokens that are not stored: begin with restore",
}


class Faults:
    """Says why something was a miss: once, until it has worked again."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._last: dict[str, str] = {}

    def note(self, verb: str, reason: str) -> None:
        """The outcome of `verb`: "" if it worked, else why not."""
        if self._last.get(verb, "") == reason:
            return
        self._last[verb] = reason
        if reason:
            log.warning("%s: %s is a miss: %s", self._model, verb, _MEANING.get(reason, reason))
        else:
            log.info("%s: %s works again", self._model, verb)


def as_ids(token_ids: Any) -> Ids:
    """Token ids of one sequence as an array; InvalidRequest for a batch of several."""
    if hasattr(token_ids, "keys") and "input_ids" in token_ids:  # as a tokenizer gives them
        token_ids = token_ids["input_ids"]
    if hasattr(token_ids, "detach"):
        token_ids = token_ids.detach().cpu()
    ids = np.asarray(token_ids)
    if ids.ndim == 2 and len(ids) == 1:
        ids = ids[0]
    if ids.ndim != 1:
        raise InvalidRequest(
            f"token ids of shape {ids.shape}: contexts are restored and stored one by one"
        )
    if ids.size and ids.dtype.kind not in "iu":
        raise InvalidRequest(f"token ids are ints, found {ids.dtype}")
    return ids.astype(np.int64)

"""What the scheduler's half knows of one request, between the scheduler's calls."""

from __future__ import annotations

from typing import Any

from blobstore.clients.vllm.lookups import Lookup
from blobstore.clients.vllm.request_params import RequestParams


class RequestState:
    """A request of the engine, and how far it is stored and may be loaded."""

    __slots__ = (
        "failed_at",
        "failed_saves",
        "limit",
        "lookup",
        "params",
        "preemptions",
        "promised",
        "request",
        "saves_from_s",
        "saving",
        "stored",
    )  # fmt: skip

    def __init__(self, request: Any, params: RequestParams) -> None:
        self.request = request
        self.params = params
        self.lookup: Lookup | None = None
        self.stored: int | None = None
        """Leading blobs that need not be saved; None until the store has said."""
        self.limit: int | None = None
        """Leading blobs that may be promised: fewer after each load that failed."""
        self.promised = range(0)
        """The tokens that were promised last."""
        self.saving = not params.no_store
        self.preemptions = 0
        self.failed_at = -1
        self.failed_saves = 0
        """At blob number `failed_at`."""
        self.saves_from_s = 0.0
        """Until then nothing is tried again."""

"""What blobs stand for: texts are told of blobs that were put, and forgotten with them."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
import numpy as np
from aiohttp import web

from blobstore.http import bodies
from blobstore.http.answers import answer
from blobstore.http.context import Context
from blobstore.http.tokens import Right
from blobstore.http.verbs import ROOT, Chain, KeyList, unpacked_keys
from blobstore.protocol import TOKENS_MAX

TokenId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]


class Told(msgspec.Struct, forbid_unknown_fields=True):
    """The tokens of blobs, one after the other, and the caller's text of the first."""

    keys: KeyList
    token_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1, max_length=TOKENS_MAX)]
    text: str = ""


class TextVerbs:
    """The handlers."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._store = context.store

    def routes(self) -> list[web.RouteDef]:
        """Where they are served."""
        one = ROOT + "/{namespace}"
        return [web.post(f"{one}/texts", self.texts), web.post(f"{one}/forget", self.forget)]

    async def texts(self, request: web.Request) -> web.StreamResponse:
        """Keep the tokens of blobs that are held."""
        context = self._context
        ns = context.namespace(request, Right.WRITE)
        asked = await bodies.read_json(request, Told, context.io_timeout_s)
        keys, key_bytes = await unpacked_keys(asked.keys)
        packed = await asyncio.get_running_loop().run_in_executor(None, _packed, asked.token_ids)
        count = await self._store.text_calls.note(ns.id, keys, key_bytes, packed, asked.text)
        return answer({"count": count})

    async def forget(self, request: web.Request) -> web.StreamResponse:
        """Free blobs, and erase what is known of their tokens."""
        context = self._context
        ns = context.namespace(request, Right.ADMIN)
        asked = await bodies.read_json(request, Chain, context.io_timeout_s)
        keys, key_bytes = await unpacked_keys(asked.keys)
        return answer({"count": await self._store.text_calls.forget(ns.id, keys, key_bytes)})


def _packed(token_ids: list[int]) -> bytes:
    return np.array(token_ids, "<u4").tobytes()

"""The dashboard's routes, served alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

from blobstore.errors import Busy
from blobstore.http import page
from blobstore.http.loop_lag import LoopLag
from blobstore.http.tokens import Right, Token
from blobstore.latencies import Latencies
from blobstore.store import Store

TOKEN = "a-token-of-the-tests"


class Serving:
    """The page on a port of its own; it can be stopped and started again at that port."""

    def __init__(self, store: Store, latencies: Latencies, lag: LoopLag | None = None) -> None:
        self.store = store
        self.latencies = latencies
        self.lag = lag
        self.tokens: dict[str, Token] = {TOKEN: Token("tests", Right.READ)}
        self.asked: list[str] = []
        """Paths and queries of all requests."""
        self.n_served = 0
        """Requests that are over."""
        self.mute = False
        """Requests for events are taken and not answered."""
        self.interval_s = 0.05
        self._port = 0
        self._stopping = asyncio.Event()
        self._runner: web.AppRunner | None = None

    @property
    def address(self) -> str:
        """Of the page."""
        return f"http://127.0.0.1:{self._port}/"

    async def start(self) -> None:
        """Serve; at the same port as before, if there was one."""
        self._stopping = asyncio.Event()
        app = web.Application(middlewares=[self._note])
        app.add_routes(
            page.routes(
                self.store,
                authorize=self._authorize,
                stopping=self._stopping,
                latencies=self.latencies,
                lag=self.lag,
                interval_s=self.interval_s,
            )
        )
        self._runner = web.AppRunner(app, shutdown_timeout=5.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """End all streams and close; again is harmless."""
        self._stopping.set()
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    def _authorize(self, request: web.Request) -> Token:
        kind, _, secret = request.headers.get("Authorization", "").partition(" ")
        if kind != "Bearer" or secret not in self.tokens:
            raise web.HTTPUnauthorized(headers={"WWW-Authenticate": "Bearer"})
        return self.tokens[secret]

    @web.middleware
    async def _note(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        self.asked.append(request.path_qs)
        try:
            if self.mute and request.path != "/":
                await self._stopping.wait()
            return await handler(request)
        except Busy as error:
            raise web.HTTPServiceUnavailable from error
        finally:
            self.n_served += 1

"""Facts for operators over HTTP: metrics, the dashboard, the loop's lag."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from aiohttp import web

from blobstore.http import page
from blobstore.http.context import Context
from blobstore.http.loop_lag import LoopLag
from blobstore.http.metrics import Metrics
from blobstore.latencies import Latencies


class Operations:
    """What is measured of one daemon, and where it is served."""

    def __init__(
        self,
        context: Context,
        draining: asyncio.Event,
        latencies: Latencies,
        connections: Mapping[str, Callable[[], int]],
    ) -> None:
        self._context = context
        self._draining = draining
        self._latencies = latencies
        self._lag = LoopLag()
        self._metrics = Metrics(
            context.store, latencies=latencies, lag=self._lag, connections=connections
        )

    def start(self) -> None:
        """Begin to measure."""
        self._lag.start()

    async def close(self) -> None:
        """Stop measuring."""
        await self._lag.close()

    def routes(self) -> list[web.RouteDef]:
        """Where it is served."""
        context = self._context
        return [
            web.get("/metrics", self.metrics),
            *page.routes(
                context.store,
                authorize=context.bearer,
                stopping=self._draining,
                latencies=self._latencies,
                lag=self._lag,
            ),
        ]

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        """All numbers, for Prometheus."""
        body, content_type = self._metrics.render(request.headers.get("Accept", ""))
        return web.Response(
            body=body,
            headers={"Content-Type": content_type, "X-Content-Type-Options": "nosniff"},
        )

"""The admin port: health, metrics, status, decisions. aiohttp; every answer is made from memory.

Health and metrics need no token (probes and scrapers have none); everything else does once one is configured.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Protocol

from aiohttp import web

from extproc.admin.reply import reply

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/metrics"})
TOKEN_HEADER = "X-Internal-Token"
MAX_BODY = 64 << 20
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Source(Protocol):
    """What the admin port shows; `extproc.app.App` is one."""

    def readiness(self) -> tuple[bool, Mapping[str, Any]]: ...
    def status(self) -> Mapping[str, Any]: ...
    def streams(self) -> list[Mapping[str, Any]]: ...
    def decisions(
        self, limit: int, pool: str | None, reason: str | None, request_id: str | None
    ) -> list[Mapping[str, Any]]: ...
    def metrics(self, accept: str) -> tuple[bytes, str]: ...


def make_app(source: Source, *, token: str | None = None, more: Iterable[web.AbstractRouteDef] = ()) -> web.Application:
    """The routes over one source, and `more` behind the same guard. `token` None = nobody is asked for one."""
    expected = token.encode() if token else None

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if expected is not None and request.path not in OPEN_PATHS:
            given = request.headers.get(TOKEN_HEADER) or request.headers.get("Authorization", "").removeprefix(
                "Bearer "
            )
            if not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), expected):
                return reply({"error": "invalid internal token"}, 401)
        try:
            return await handler(request)
        except web.HTTPException as error:
            return reply({"error": error.reason}, error.status)
        except Exception:
            log.exception("admin request %s %s failed", request.method, request.path)
            return reply({"error": "internal error, see the log"}, 500)

    routes = web.RouteTableDef()

    @routes.get("/healthz")
    async def healthz(_request: web.Request) -> web.StreamResponse:
        return web.Response(text="ok\n")

    @routes.get("/readyz")
    async def readyz(_request: web.Request) -> web.StreamResponse:
        ready, detail = source.readiness()
        return reply({"ready": ready, **detail}, 200 if ready else 503)

    @routes.get("/metrics")
    async def metrics(request: web.Request) -> web.StreamResponse:
        body, content_type = source.metrics(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    @routes.get("/status")
    async def status(_request: web.Request) -> web.StreamResponse:
        return reply(source.status())

    @routes.get("/streams")
    async def streams(_request: web.Request) -> web.StreamResponse:
        return reply({"streams": source.streams()})

    @routes.get("/decisions")
    async def decisions(request: web.Request) -> web.StreamResponse:
        query = request.query
        text = query.get("limit", "100")
        if not (text.isascii() and text.isdigit() and len(text) <= 5 and 1 <= int(text) <= 10_000):
            return reply({"error": "limit must be a number from 1 to 10000"}, 400)
        found = source.decisions(int(text), query.get("pool"), query.get("reason"), query.get("request_id"))
        return reply({"decisions": found})

    app = web.Application(middlewares=[guard], client_max_size=MAX_BODY)
    app.add_routes([*routes, *more])
    return app


class AdminServer:
    """Serves an application on one address until `stop`."""

    def __init__(self, app: web.Application, host: str, port: int) -> None:
        # compressed bodies stay so: nobody sends them here, and a small one could unpack to a very large one
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, auto_decompress=False)
        self._host, self._port = host, port

    async def start(self) -> int:
        """Binds and serves; returns the port. Raises OSError when the address cannot be bound."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port, shutdown_timeout=2.0)
        await site.start()
        port: int = self._runner.addresses[0][1]
        return port

    async def stop(self) -> None:
        await self._runner.cleanup()

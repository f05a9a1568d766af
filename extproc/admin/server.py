"""The admin port: one aiohttp application, its guard, its description, and the server that runs it.

    pages.py      GET: health, metrics, status, pools, streams, decisions, configuration
    actions.py    POST: resync, rebuild, drain, log level
    query.py      POST: who holds a prompt, heartbeats        (given as `more`, as are the dashboard's and others')
    guard.py      who may ask what
    endpoint.py   routes with their description: /openapi.json and the index at / are made from them

Health and metrics need no token (probes and scrapers have none); everything else does once one is configured. Every
answer is made from memory.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from aiohttp import web

from extproc import __version__
from extproc.admin.actions import Actions
from extproc.admin.endpoint import Endpoint, document
from extproc.admin.guard import action_objection, objection
from extproc.admin.pages import Pages, Source
from extproc.admin.reply import reply
from extproc.admin.schemas import COMPONENTS, OBJECT

__all__ = ["AdminServer", "Source", "make_app", "tls_context"]

log = logging.getLogger(__name__)

MAX_BODY = 64 << 20
DESCRIPTION = "/openapi.json"
REMOTE_HEADER = "X-Kvcar-Remote"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(
    source: Source, *, token: str | None = None, more: Iterable[web.AbstractRouteDef] = (), behind: bool = False
) -> web.Application:
    """The routes over one source, and `more` behind the same guard. `token` None = nobody is asked for one.

    Of `more`, an `Endpoint` is described in /openapi.json; one for GET / takes the place of the index. `behind`: it
    serves on a socket of ours alone, and who asks stands in REMOTE_HEADER (extproc/workers/front.py).
    """
    return guarded([*Pages(source).endpoints(), *Actions(source).endpoints(), *more], token=token, behind=behind)


def guarded(more: Iterable[web.AbstractRouteDef], *, token: str | None = None, behind: bool = False) -> web.Application:
    """These routes alone, with guard, description and index."""
    expected = token.encode() if token else None
    more = list(more)
    described = [one for one in more if isinstance(one, Endpoint)]

    async def openapi(_request: web.Request) -> web.StreamResponse:
        return reply(document(described, COMPONENTS, version=__version__, token=expected is not None))

    async def index(_request: web.Request) -> web.StreamResponse:
        return reply({f"{one.method} {one.path}": one.summary for one in described})

    described.append(Endpoint("GET", DESCRIPTION, openapi, "This description", {200: OBJECT}))
    if not any(getattr(one, "path", None) == "/" for one in more):
        described.append(Endpoint("GET", "/", index, "Every path and what it is for", {200: OBJECT}))
    open_paths = frozenset(one.path for one in described if one.open)
    actions = frozenset((one.method, one.path) for one in described if one.action)

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if behind:
            request = request.clone(remote=request.headers.get(REMOTE_HEADER, ""))
        # the path of the route that will serve it, however the request spells it
        resource = request.match_info.route.resource
        path = resource.canonical if resource is not None else ""
        refused = objection(
            request.method, request.headers, request.remote, expected=expected, open_to_all=path in open_paths
        )
        if refused is None and (request.method, path) in actions:
            refused = action_objection(request.content_type, request.remote, with_token=expected is not None)
        if refused is not None:
            return reply({"error": refused[1]}, refused[0])
        try:
            return await handler(request)
        except web.HTTPException as error:
            if isinstance(error, web.HTTPNotFound):
                return reply({"error": f"there is no such path: GET {DESCRIPTION} describes every one"}, 404)
            if isinstance(error, web.HTTPMethodNotAllowed):
                allowed = ",".join(sorted(error.allowed_methods))
                text = f"{error.method} is not allowed here, only {allowed}: GET {DESCRIPTION} describes every path"
                answer = reply({"error": text}, 405)
                answer.headers["Allow"] = allowed
                return answer
            return reply({"error": error.reason}, error.status)
        except Exception:
            log.exception("admin request %s %s failed", request.method, request.path)
            return reply({"error": "internal error, see the log"}, 500)

    app = web.Application(middlewares=[guard], client_max_size=MAX_BODY)
    app.add_routes([*described, *(one for one in more if not isinstance(one, Endpoint))])
    return app


def tls_context(cert: str, key: str, client_ca: str | None) -> ssl.SSLContext:
    """For PEM files; with `client_ca` every client must show a certificate it signed. Raises OSError, ssl.SSLError."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    if client_ca is not None:
        context.load_verify_locations(client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


class AdminServer:
    """Serves an application on one address until `stop`. `tls` None = plain HTTP. `path`: a Unix socket instead."""

    def __init__(
        self,
        app: web.Application,
        host: str,
        port: int,
        *,
        tls: ssl.SSLContext | None = None,
        path: Path | None = None,
    ) -> None:
        # compressed bodies stay so: nobody sends them here, and a small one could unpack to a very large one
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, auto_decompress=False)
        self._host, self._port, self._tls, self._path = host, port, tls, path

    async def start(self) -> int:
        """Binds and serves; returns the port. Raises OSError when the address cannot be bound."""
        await self._runner.setup()
        if self._path is not None:
            self._path.unlink(missing_ok=True)  # of the process that was there before
            await web.UnixSite(self._runner, self._path, shutdown_timeout=2.0).start()
            return 0
        site = web.TCPSite(self._runner, self._host, self._port, shutdown_timeout=2.0, ssl_context=self._tls)
        await site.start()
        port: int = self._runner.addresses[0][1]
        return port

    async def stop(self) -> None:
        await self._runner.cleanup()

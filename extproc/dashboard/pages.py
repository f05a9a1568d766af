"""Routes of the dashboard: its files, which are open and hold no data, and its three APIs behind the port's guard."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncIterator
from importlib import resources
from typing import NamedTuple

from aiohttp import web

from extproc.admin.endpoint import Endpoint, reference
from extproc.admin.reply import reply
from extproc.admin.schemas import OBJECT, TEXT
from extproc.dashboard.explain import DEFAULT_TOKENS, MAX_TOKENS, Explainer
from extproc.dashboard.history import History
from extproc.dashboard.overview import Source, loads, overview, totals
from extproc.openai import DEFAULT_ROUTES, Routes

log = logging.getLogger(__name__)

ERROR = reference("Error")
TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class File(NamedTuple):
    body: bytes
    kind: str
    tag: str


def _files() -> dict[str, File]:
    """By path, every file of the page."""
    found = {}
    for file in resources.files(__package__).joinpath("static").iterdir():
        kind = TYPES.get(file.name.rpartition(".")[2])
        if kind is not None:
            path = "/" if file.name == "index.html" else f"/dashboard/{file.name}"
            body = file.read_bytes()
            found[path] = File(body, kind, hashlib.sha256(body).hexdigest()[:16])
    return found


FILES = _files()
"""Open without a token, and without data: the page has to load before it can ask for one."""


class Dashboard:
    """The page over one source. `endpoints` for the application, `sampling` for its cleanup context."""

    def __init__(self, source: Source, *, routes: Routes = DEFAULT_ROUTES, max_body_bytes: int = 32 << 20) -> None:
        self._source = source
        self._explainer = Explainer(
            lambda: source.pools, clock=time.monotonic, routes=routes, max_body_bytes=max_body_bytes
        )
        self.history = History(0.0)  # ticks of the machine's clock: the same in each of several workers

    def endpoints(self) -> list[Endpoint]:
        ask = {"description": f"token ids shown, at most {MAX_TOKENS}", "type": "integer", "default": DEFAULT_TOKENS}
        since = {"description": "tick of the answer before: only newer history comes", "type": "integer", "default": -1}
        number = {"description": "of one of the overview's decisions", "type": "integer"}
        return [
            *(
                Endpoint("GET", path, self._file, "A file of the dashboard", {200: TEXT}, open=True, media=file.kind)
                for path, file in FILES.items()
            ),
            Endpoint("GET", "/v1/internal/overview", self._overview, "Everything the dashboard shows",
                     {200: OBJECT, 400: ERROR}, {"since": since}),
            Endpoint("GET", "/v1/internal/decision", self._decision, "One decision with every candidate",
                     {200: reference("Decision"), 400: ERROR, 404: ERROR}, {"number": number}),
            Endpoint("POST", "/v1/internal/explain", self._explain,
                     "Tokens, blocks and holders of a request, and whom each scorer would choose; nothing is charged",
                     {200: OBJECT, 400: OBJECT}, {"tokens": ask}, body=OBJECT),
        ]  # fmt: skip

    async def sampling(self, _app: web.Application) -> AsyncIterator[None]:
        """Fills the history as long as the application serves."""
        task = asyncio.create_task(self._sample())
        yield
        task.cancel()

    async def _sample(self) -> None:
        while True:
            try:
                self.sample()
            except Exception:
                log.exception("the dashboard's history leaves a point out")
            await asyncio.sleep(self.history.step)

    def sample(self) -> None:
        """One point of the history, now."""
        now, source = time.monotonic(), self._source
        self.history.add(now, totals(source.pools, source.metrics_registry), loads(source.pools, now))

    async def _file(self, request: web.Request) -> web.StreamResponse:
        body, kind, tag = FILES[request.path]
        if any(known.value == tag for known in request.if_none_match or ()):
            return web.Response(status=304, headers={**HEADERS, "ETag": f'"{tag}"'})
        return web.Response(body=body, content_type=kind, charset="utf-8", headers={**HEADERS, "ETag": f'"{tag}"'})

    async def _overview(self, request: web.Request) -> web.StreamResponse:
        text = request.query.get("since", "-1")
        if text != "-1" and not (text.isascii() and text.isdigit() and len(text) <= 12):
            return reply({"error": "since must be a tick of an earlier answer"}, 400)
        return reply(overview(self._source, self.history, int(text)))

    async def _decision(self, request: web.Request) -> web.StreamResponse:
        text = request.query.get("number", "")
        if not (text.isascii() and text.isdigit() and len(text) <= 15):
            return reply({"error": "the number must be one of the overview's decisions"}, 400)
        record = self._source.decision_log.at(int(text))
        if record is None:
            return reply({"error": "this decision is not remembered any more"}, 404)
        return reply({"number": int(text), **record.as_dict()})

    async def _explain(self, request: web.Request) -> web.StreamResponse:
        text = request.query.get("tokens", str(DEFAULT_TOKENS))
        if not (text.isascii() and text.isdigit() and len(text) <= 5 and int(text) <= MAX_TOKENS):
            return reply({"error": f"tokens must be a number from 0 to {MAX_TOKENS}"}, 400)
        try:
            data = await request.read()
        except web.RequestPayloadError:
            return reply({"error": "the body cannot be read"}, 400)
        status, body = await self._explainer.explain(data, request.headers, int(text))
        return reply(body, status)
